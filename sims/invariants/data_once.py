"""Invariant of data.exactly_once: every sample is used once along every history of committed states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from thinwire.swarm.messages.registry import Commit, Digest, PeerId

Draws: TypeAlias = Sequence[tuple[int, int, int]]
"""Drawn samples: shard, start and end of a range in the shard's endless order."""

KEPT = 4000
"""Number of states with stored counts."""


class DataOnceInvariant:
    """Checker of this invariant. `checked`: number of contributions that were checked."""

    def __init__(self, on_violation: Callable[[str, int, str], None]) -> None:
        self.checked = 0
        self._on_violation = on_violation
        self._drawn: dict[tuple[PeerId, int, int], Draws] = {}
        self._used: dict[Digest, dict[int, int]] = {}

    def first(self, digest: Digest) -> None:
        """Record the state before the first round: no sample is used."""
        self._used.setdefault(digest, {})

    def encoded(self, peer: PeerId, round: int, attempt: int, draws: Draws) -> None:
        """Record that a peer is about to announce a contribution made from these samples."""
        self._drawn[peer, round, attempt] = tuple(draws)

    def committed(self, index: int, old: Digest, new: Digest, commit: Commit) -> None:
        """Check that the step from `old` to `new` uses shards in order, without gaps and repetitions."""
        if new in self._used or old not in self._used:
            return
        used, round = dict(self._used[old]), commit.proposal.round
        for entry in commit.proposal.contributors:
            draws = self._drawn.get((entry.peer, round, entry.attempt))
            if draws is None:
                return  # The draws of a liar are unknown, and its successors are not to blame.
            for shard, first, end in draws:
                at = used.get(shard, 0)
                if first != at:
                    what = "again" if first < at else "with a gap"
                    self._on_violation(
                        "once", index, f"round {round}: shard {shard} is used {what}, from {first} instead of {at}"
                    )
                used[shard] = end
            self.checked += 1
        self._used[new] = used
        if len(self._used) > KEPT:
            self._used.pop(next(iter(self._used)))
