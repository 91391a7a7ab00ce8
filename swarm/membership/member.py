"""State of one peer as seen by the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import PeerId

State: TypeAlias = Literal["alive", "suspect", "dead", "left", "banned"]
"""State of a member.

suspect: some peer could not reach it; dead: its time to answer is over, and we or k others could not reach it; left: it
announced its departure; banned: it signed two records with the same sequence, or two statements about one ballot, or the
author of the run has revoked its admission.
"""


EventKind: TypeAlias = Literal[
    "joined", "updated", "suspect", "refuted", "dead", "left", "banned", "pardoned", "revoked", "duplicate", "yielded"
]


class Event(NamedTuple):
    """Event that concerns `peer`.

    Kinds: joined, updated (its record), suspect, refuted, dead, left; banned, with the reason, also this peer itself;
    revoked: `peer` is the start of an id whose admission the author has revoked, of a peer or an invite.
    duplicate: another process uses our key and its record is newer, so this process should stop. yielded: another process
    that used our key has stopped because this one came later.
    """

    kind: EventKind
    peer: PeerId
    detail: str = ""


@dataclass(slots=True)
class Member:
    """Table entry of one peer.

    note: the signed item that explains a state other than alive. void: records with a sequence up to this one are
    ignored. reason: of a ban. met: it has proved its keys to this peer; otherwise we only know it from others. linked: a
    message has arrived from it over a link.
    """

    record: PeerRecord
    state: State
    since: float
    void: int = 0
    note: bytes = b""
    progress: int = 0
    reason: str = ""
    met: bool = False
    linked: bool = False

    @property
    def live(self) -> bool:
        return self.state in ("alive", "suspect")
