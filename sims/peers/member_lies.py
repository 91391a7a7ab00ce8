"""Peers that lie about the members of the next round."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace
from thinwire.node.methods.noloco.session import GossipSession
from thinwire.node.outer.round_session import RoundSession
from thinwire.sims.peers.false_messages import each
from thinwire.sims.peers.machine import Process
from thinwire.swarm.frame import Frame, sign_message
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.messages.registry import LIFE, PeerId

MADE = 3
"""Keys that a liar makes.

With them it has most members of a run of four; more of them would own chunks, and rounds would fail.
"""


class _MadeMembers:
    """Member that makes keys, and names them as new members when it leads.

    It receives announcements that it has signed with them.
    """

    def __init__(self, session: RoundSession) -> None:
        self._session, self._on_frame = session, session.on_frame
        self._keys = [Identity.generate(bytes([number]) + session.me[1:]) for number in range(MADE)]
        self._round = -1
        session.on_frame = self._receive  # type: ignore[method-assign]
        session.factory.standing.is_admitted = lambda peer, token: True  # type: ignore[method-assign]

    def _receive(self, peer: PeerId, frame: Frame) -> None:
        self._on_frame(peer, frame)
        agreement, keyring = self._session.current.agreement, self._session.factory.keyring
        if agreement.ready and agreement.proposal is None and agreement.terms.round != self._round:
            self._round, pattern = agreement.terms.round, next(iter(agreement.ready.values()))
            keyring.borrow([key.public_key for key in self._keys], {key.peer_id for key in self._keys})
            for key in self._keys:
                ready = replace(pattern, weight=0, voter=True, life=key.peer_id[:LIFE], hashes=b"", norms=b"")
                signature = sign_message(ready.statement(), b"", key, keyring.run_id)
                agreement.electorate.live.add(key.peer_id)
                agreement.on_message(key.peer_id, ready, signature, self._session._now())


def _make_members(session: RoundSession | GossipSession) -> None:
    if isinstance(session, RoundSession):
        _MadeMembers(session)


MEMBER_LIES: dict[str, Callable[[Process], None]] = {"made-members": each(_make_members)}
"""Kind of lie -> function that makes the peer of a process tell it.

VOTE_LIES in faults.py describes them.
"""
