"""Poll of some peers for their round, when one claims another round; a single claim may be a lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_high

from thinwire.collectives.state_sync.offer_search import LAST_ROUND
from thinwire.swarm.messages.registry import PeerId

ASKED = 4
"""Peers that are asked for their round."""

LEAD = 8
"""Most rounds by which a peer may be ahead of most others.

Waits for late partners double from round to round, so they stop a faster peer before.
"""


class ProgressPoll:
    """Poll: `open` returns the peers to ask, `answer` and `due` report its end, `close` its result."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._asked: frozenset[PeerId] = frozenset()
        self._claims: dict[PeerId, int] = {}
        self._until = -1.0
        self.reached: int | None = None
        """Result of the last poll, see `close`."""

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

    def close(self, ours: int) -> int:
        """End the poll; return the round that at least half have reached or passed.

        This peer, which is in round `ours`, is included. So of two halves of a swarm only the one behind takes over a state of
        the other one.
        """
        rounds = [round for round in self._claims.values() if round < LAST_ROUND]
        self._asked, self._claims = frozenset(), {}
        self.reached = median_high([*rounds, ours])
        return self.reached

    def apart(self, ours: int) -> bool:
        """Return True if a peer in round `ours` must take over a state, by the result of the last poll."""
        return self.reached is not None and (self.reached > ours or far_ahead(ours, self.reached))

    def on_link_down(self, peer: PeerId) -> None:
        """Discard the answer of a departed peer."""
        self._claims.pop(peer, None)
        self._asked -= {peer}


def far_ahead(ours: int, theirs: int) -> bool:
    """Return True if round `ours` is too far ahead of `theirs` to wait for it."""
    return ours > theirs + LEAD
