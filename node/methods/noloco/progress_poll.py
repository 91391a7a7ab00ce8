"""Poll of some peers for their round, when one peer claims to be ahead; a single claim may be a lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_low

from thinwire.collectives.state_sync.offer_search import LAST_ROUND
from thinwire.swarm.messages.registry import PeerId

ASKED = 4
"""Peers that are asked for their round."""


class ProgressPoll:
    """Poll: `open` returns the peers to ask, `answer` and `due` report its end, `close` its result."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._asked: frozenset[PeerId] = frozenset()
        self._claims: dict[PeerId, int] = {}
        self._until = -1.0
        self.reached = 0
        """Result of the last poll: the round that most had reached or passed."""

    def open(self, peer: PeerId, round: int, others: Sequence[PeerId], patience: float) -> list[PeerId]:
        """Start a poll after `peer` claimed `round`; return the peers to ask, none shortly after a poll."""
        if self._now() < self._until:
            return []
        self._until, self._claims = self._now() + patience, {peer: round}
        self._asked = frozenset([one for one in others if one != peer][:ASKED] + [peer])
        return sorted(self._asked - {peer})

    def answer(self, peer: PeerId, round: int) -> bool:
        """Record the answer of a peer; return True if all have answered."""
        if peer in self._asked:
            self._claims[peer] = round
        return self.complete

    @property
    def complete(self) -> bool:
        return bool(self._asked) and self._claims.keys() >= self._asked

    @property
    def running(self) -> bool:
        """True from `open` to `close`."""
        return bool(self._asked)

    @property
    def due(self) -> bool:
        """True if the time for answers is over."""
        return bool(self._asked) and self._now() > self._until

    def close(self) -> int:
        """End the poll; return the round that most have reached or passed, 0 without answers."""
        rounds = [round for round in self._claims.values() if round < LAST_ROUND]
        self._asked, self._claims = frozenset(), {}
        self.reached = median_low(rounds) if rounds else 0
        return self.reached

    def on_link_down(self, peer: PeerId) -> None:
        """Discard the answer of a departed peer."""
        self._claims.pop(peer, None)
        self._asked -= {peer}
