"""Whether every sample is used once: who drew what for the contributions that were committed, along every history of states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from thinwire.swarm.protocol import Commit, Digest, PeerId

Draws: TypeAlias = Sequence[tuple[int, int, int]]
"""What was drawn: shard, first and end of a range in the shard's endless order."""

KEPT = 4000
"""States whose counts are kept."""


class Samples:
    """Fed by the oracles. `checked`: contributions that were looked at."""

    def __init__(self, tell: Callable[[str, int, str], None]) -> None:
        self.checked = 0
        self._tell = tell
        self._drawn: dict[tuple[PeerId, int, int], Draws] = {}
        self._used: dict[Digest, dict[int, int]] = {}

    def first(self, digest: Digest) -> None:
        """The state before the first round: nothing is used up."""
        self._used.setdefault(digest, {})

    def encoded(self, peer: PeerId, round: int, attempt: int, draws: Draws) -> None:
        """A peer is about to announce what it made of these draws."""
        self._drawn[peer, round, attempt] = tuple(draws)

    def committed(self, index: int, old: Digest, new: Digest, commit: Commit) -> None:
        """The state `old` has become `new`. Shards are used in order, without a gap and without a second time."""
        if new in self._used or old not in self._used:
            return
        used, round = dict(self._used[old]), commit.opened.round
        for entry in commit.opened.contributors:
            draws = self._drawn.get((entry.peer, round, entry.attempt))
            if draws is None:
                return  # a liar's: nobody knows what it used, and those who come after it are not to blame
            for shard, first, end in draws:
                at = used.get(shard, 0)
                if first != at:
                    what = "again" if first < at else "with a gap"
                    self._tell(
                        "once", index, f"round {round}: shard {shard} is used {what}, from {first} instead of {at}"
                    )
                used[shard] = end
            self.checked += 1
        self._used[new] = used
        if len(self._used) > KEPT:
            self._used.pop(next(iter(self._used)))
