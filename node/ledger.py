"""Which samples of the data are used up: a part of the swarm's state, so that no sample is used twice and none is lost.

Of every shard the ledger has one number, how many samples were drawn from it; the shard's order follows from the seed, and so
do the samples. For each round the shards are dealt out among the members of the last committed one (a lease), and a member
draws from its own, the least used first. How many it drew its contribution says (tokens), so all who commit a round book the
same: of each contributor's shards what it drew, of all others nothing. What went into no committed contribution, because its
peer died, was late, or was left out, was never booked and is drawn again. The ledger is in the state digest, in checkpoints
and in what joiners fetch, so it shares the fate of the parameters whatever happens. Who is not a member yet has no lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.codec import Floats
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import Contribution, PeerId

Counts: TypeAlias = NDArray[np.int64]

_EXACT, _WORD = 1 << 24, 1 << 22
"""A count is two float32 words, high and low: states have nothing but finite floats, exact below 2^24."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What a peer may draw in a round: `shards` (ascending), how often each was drawn from (`used`), `samples` of a step."""

    shards: Counts
    used: Counts
    samples: int

    def __bool__(self) -> bool:
        """Whether there is anything to train on."""
        return self.shards.size > 0 and self.samples > 0

    def after(self, count: int) -> Lease:
        """What is left when so many samples have been drawn."""
        return Lease(self.shards, fill(self.used, count), self.samples)


def fill(used: Counts, count: int) -> Counts:
    """How often each was drawn from after `count` more draws, each from the least used, the first of several.

    Draws can be cut anywhere: fill(fill(u, a), b) = fill(u, a + b).
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
    """Each member's shards in the round after `round`: disjoint, complete, equal in number but for one.

    The least used go first, each to the next member, and every round begins with another one: a shard whose holder does
    not get on is soon another's.
    """
    order = np.argsort(used, kind="stable")
    group = sorted(members)
    turns = (np.arange(order.size) + round) % len(group)
    return {peer: np.sort(order[turns == turn]) for turn, peer in enumerate(group)}


class Ledger:
    """The counts of all shards, kept in `words` (two for each shard), a view of the state. `sample`: tokens of one."""

    def __init__(self, words: Floats, sample: int) -> None:
        self._words, self._sample = words.reshape(-1, 2), sample

    @staticmethod
    def words(manifest: Manifest) -> int:
        """Floats that a ledger of this run takes; 0 when it has none."""
        return 2 * manifest.data.shards if manifest.data.once else 0

    @property
    def used(self) -> Counts:
        """How many samples were drawn from each shard, whatever is in a state that was fetched."""
        words: Counts = np.clip(np.rint(self._words), 0, (_EXACT - 1, _WORD - 1)).astype(np.int64)
        return words[:, 0] * _WORD + words[:, 1]

    def lease(self, members: Sequence[PeerId], me: PeerId, round: int, samples: int) -> Lease:
        """What `me` may draw in the round after `round`, `samples` a step."""
        used = self.used
        shards = deal(used, members, round)[me] if me in members else np.empty(0, np.int64)
        return Lease(shards, used[shards], samples)

    def book(self, contributors: Iterable[Contribution], members: Sequence[PeerId], round: int) -> None:
        """The round after `round` is committed with these contributors, and `members` had the leases."""
        used = self.used
        leases = deal(used, members, round)
        for entry in contributors:
            shards = leases.get(entry.peer)
            if shards is not None and shards.size:
                used[shards] = fill(used[shards], entry.weight // self._sample)
        self._words[:, 0], self._words[:, 1] = np.divmod(used, _WORD)
