"""Record of used samples.

It is a part of the swarm's state, so that no sample is used twice and none is lost.

For every shard the ledger has one number, how many samples were drawn from it; the shard's order follows from the seed,
and so do the samples. For each round the shards are dealt out among the members of the last committed one (a lease), also
after peers have founded a lineage, and a member draws from its own shards, the least used first. Its contribution states
how many it drew (tokens), so all peers that commit a round record the same: the draws of each contributor, and nothing for
other members. Samples that are in no committed contribution, because their peer died, was late, or was left out, are not
recorded and are drawn again. The ledger is in the state digest, in checkpoints and in what joiners fetch, so it always
matches the parameters. A peer that is not a member yet has no lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.types import Floats
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Contribution, PeerId

Counts: TypeAlias = NDArray[np.int64]

_EXACT, _WORD = 1 << 24, 1 << 22
"""A count is two float32 words, high and low: states contain only finite floats, exact below 2^24."""


@dataclass(frozen=True, slots=True)
class DataLease:
    """Data that a peer may draw in a round.

    `shards`: ascending; `used`: draws from each so far; `samples`: per step.
    """

    shards: Counts
    used: Counts
    samples: int

    def __bool__(self) -> bool:
        """Return True if there is anything to train on."""
        return self.shards.size > 0 and self.samples > 0

    def after(self, count: int) -> DataLease:
        """Return the lease after `count` more draws."""
        return DataLease(self.shards, fill(self.used, count), self.samples)


def fill(used: Counts, count: int) -> Counts:
    """Return the draws per shard after `count` more draws.

    Each is from the least used shard, the first of several.

    Draws can be split anywhere: fill(fill(u, a), b) = fill(u, a + b).
    """
    if not count:
        return used.copy()
    # The level up to which all can be filled: with the k least used at level L the draws are L·k − their sum.
    ordered = np.sort(used)
    sums, places = np.cumsum(ordered), np.arange(1, used.size + 1)
    k = int(np.searchsorted(ordered * places - sums, count, side="right"))
    level, rest = divmod(count + int(sums[k - 1]), k)
    new = np.maximum(used, level)
    new[np.flatnonzero(new == level)[:rest]] += 1
    return new


def deal(used: Counts, members: Sequence[PeerId], round: int) -> dict[PeerId, Counts]:
    """Return each member's shards in the round after `round`: disjoint, complete, balanced to within one.

    The least used shards go first, each to the next member, and every round begins with another member: a shard whose
    holder makes no progress soon goes to another one.
    """
    order = np.argsort(used, kind="stable")
    group = sorted(members)
    turns = (np.arange(order.size) + round) % len(group)
    return {peer: np.sort(order[turns == turn]) for turn, peer in enumerate(group)}


class DataLedger:
    """The counts of all shards, stored in `words` (two for each shard), a view of the state.

    `sample`: tokens per sample.
    """

    def __init__(self, words: Floats, sample: int) -> None:
        self._words, self._sample = words.reshape(-1, 2), sample

    @staticmethod
    def words(manifest: Manifest) -> int:
        """Return the floats that a ledger of this run takes; 0 if it has none."""
        return 2 * manifest.data.shards if manifest.data.exactly_once else 0

    def move(self, state: Floats) -> None:
        """Continue at the end of `state`, a copy of the state."""
        self._words = state[-self._words.size :].reshape(-1, 2)

    @property
    def used(self) -> Counts:
        """Samples drawn from each shard, valid for any content of a fetched state."""
        words: Counts = np.clip(np.rint(self._words), 0, (_EXACT - 1, _WORD - 1)).astype(np.int64)
        return words[:, 0] * _WORD + words[:, 1]

    def lease(self, members: Sequence[PeerId], me: PeerId, round: int, samples: int) -> DataLease:
        """Return the lease of `me` in the round after `round`, for `samples` per step."""
        used = self.used
        shards = deal(used, members, round)[me] if me in members else np.empty(0, np.int64)
        return DataLease(shards, used[shards], samples)

    def book(self, contributors: Iterable[Contribution], members: Sequence[PeerId], round: int) -> None:
        """Record the round after `round`, committed with these contributors; `members` had the leases."""
        used = self.used
        leases = deal(used, members, round)
        for entry in contributors:
            shards = leases.get(entry.peer)
            if shards is not None and shards.size:
                used[shards] = fill(used[shards], entry.weight // self._sample)
        self._words[:, 0], self._words[:, 1] = np.divmod(used, _WORD)
