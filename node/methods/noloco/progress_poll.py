"""Whether most have gone on without us: one that says so may be anything, so some others are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_low

from thinwire.collectives.state_sync import LAST_ROUND
from thinwire.swarm.messages.registry import PeerId

ASKED = 4
"""Peers that are asked for their round when a partner says that it is past ours."""


class ProgressPoll:
    """One at a time. `open` says whom to ask, `answer` and `due` when it has come to an end, then `verdict` which round
    most have made.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._asked: frozenset[PeerId] = frozenset()
        self._claims: dict[PeerId, int] = {}
        self._until = -1.0

    def open(self, peer: PeerId, round: int, others: Sequence[PeerId], patience: float) -> list[PeerId]:
        """`peer` claims to have made `round`: whom to ask for theirs; nobody while an inquiry goes on, or one just was."""
        if self._now() < self._until:
            return []
        self._until, self._claims = self._now() + patience, {peer: round}
        self._asked = frozenset([one for one in others if one != peer][:ASKED] + [peer])
        return sorted(self._asked - {peer})

    def answer(self, peer: PeerId, round: int) -> bool:
        """What one that was asked says; True when all have."""
        if peer in self._asked:
            self._claims[peer] = round
        return self.complete

    @property
    def complete(self) -> bool:
        """Whether all that were asked have answered."""
        return bool(self._asked) and self._claims.keys() >= self._asked

    @property
    def due(self) -> bool:
        """Whether those who have not answered by now are not waited for."""
        return bool(self._asked) and self._now() > self._until

    def close(self) -> int:
        """The round that most have made or are beyond, 0 when nobody has said anything; the inquiry is over."""
        rounds = [round for round in self._claims.values() if round < LAST_ROUND]
        self._asked, self._claims = frozenset(), {}
        return median_low(rounds) if rounds else 0

    def on_link_down(self, peer: PeerId) -> None:
        """A peer is not here any more: its word does not count."""
        self._claims.pop(peer, None)
        self._asked -= {peer}
