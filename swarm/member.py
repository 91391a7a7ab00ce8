"""One peer as the others see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from .protocol import PeerId
from .record import PeerRecord
from .suspicion import Suspicion

State: TypeAlias = Literal["alive", "suspect", "dead", "left", "banned"]
"""suspect: somebody could not reach it; dead: its time to answer is up, and we or k others could not reach it; left: it said
so; banned: it signed two records with one sequence."""


class Event(NamedTuple):
    """Something happened to `peer`. Kinds: joined, updated (its record), suspect, refuted, dead, left, equivocation;
    duplicate: another process uses our key, its record is newer, we should stop."""

    kind: str
    peer: PeerId
    detail: str = ""


@dataclass(slots=True)
class Member:
    """`note`: the signed item that explains a state other than alive. `void`: sequences up to it count no more."""

    record: PeerRecord
    state: State
    since: float
    void: int = 0
    note: bytes = b""
    suspicion: Suspicion | None = None
    progress: int = 0

    @property
    def live(self) -> bool:
        return self.state in ("alive", "suspect")
