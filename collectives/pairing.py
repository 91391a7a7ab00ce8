"""Who averages with whom in a round of pairs, or of larger groups: a uniformly random partition that everyone draws alike,
without a word.

Every peer gets a random 64-bit label, a hash of run, round and its id; the groups are those of a knock-out tree over them:
in each subtree whose two halves together leave enough peers over for a group, these are one, and what is then left waits for
the next larger subtree. Labels are independent of who the peers are, so every partition is equally likely, as when a random
permutation is cut into pieces (NoLoCo, arXiv 2506.10911, pairs rank k with rank k + N/2). The tree is preferred because it
is local: a peer that comes or goes changes a few groups, one a level at most, and not all of them. So peers whose views differ
for a moment agree on nearly every group, and those that do not are told so by the other side.

What is left of all is a smaller group. One that is left of pairs is alone; with larger groups it and a full one become two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import blake3
import numpy as np
from numpy.typing import NDArray
from thinwire.swarm.protocol import Digest, PeerId

_BITS = 64


def labels(run_id: Digest, round: int, view: Sequence[PeerId]) -> NDArray[np.uint64]:
    """One label for each peer of a view; of `round` a new one. A bijection of the first eight bytes of the id."""
    key = np.frombuffer(blake3.blake3(b"thinwire/pairs/1\0" + run_id + round.to_bytes(8, "big")).digest(), "<u8")
    mixed = np.frombuffer(b"".join(view), "<u8").reshape(-1, 4)[:, 0].astype(np.uint64)
    for word in key:
        # The finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), keyed anew each time.
        mixed = mixed ^ word
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed


def others(run_id: Digest, round: int, view: Sequence[PeerId], me: PeerId, size: int = 2) -> tuple[PeerId, ...]:
    """The others of my group of at most `size` in this round, sorted; nobody for who is left over, and for a stranger.

    `view` is sorted. Takes one vectorized pass and a sort of the labels; what follows is O(size · log² N).
    """
    place = bisect_left(view, me)
    if len(view) < 2 or place == len(view) or view[place] != me:
        return ()
    all_labels = labels(run_id, round, view)
    order = np.argsort(all_labels, kind="stable")
    rank = int(np.flatnonzero(order == place)[0])
    return tuple(sorted(view[int(order[one])] for one in _Tree(all_labels[order], size).group(rank) if one != rank))


class _Tree:
    """Subtrees are ranges [low, high) of the sorted labels that share their highest bits; peers are ranks in that order."""

    def __init__(self, ordered: NDArray[np.uint64], size: int) -> None:
        self._ordered, self._size = ordered, size

    def _split(self, low: int, high: int, bit: int) -> int:
        """Where the half with this bit set begins."""
        if bit < 0:
            return (low + high) // 2  # equal labels: any rule will do that all know
        lowest = int(self._ordered[low])
        edge = (lowest >> bit | 1) << bit
        if lowest >= edge:
            return low
        return low + int(np.searchsorted(self._ordered[low:high], np.uint64(edge)))

    def _left_over(self, low: int, high: int, bit: int) -> list[int]:
        """Who is in no full group of the subtree: fewer than a group."""
        size = self._size
        if (high - low) % size == 0:
            return []
        if high - low == 1:
            return [low]
        middle = self._split(low, high, bit)
        lacking = size - (middle - low) % size
        right = self._left_over(middle, high, bit - 1)
        return right[lacking:] if len(right) >= lacking else self._left_over(low, middle, bit - 1) + right

    def _full(self, rank: int) -> list[int]:
        """The group of `rank`, or all that is left over when it is one of these."""
        low, high, bit = 0, len(self._ordered), _BITS - 1
        siblings: list[tuple[int, int, int]] = []
        while high - low > 1:
            middle = self._split(low, high, bit)
            bit -= 1
            mine, other = ((low, middle), (middle, high)) if rank < middle else ((middle, high), (low, middle))
            siblings.append((*other, bit))
            low, high = mine
        left = [rank]
        for low, high, bit in reversed(siblings):
            # Up the tree while the two halves together leave too few over for a group with the peer.
            both = sorted(left + self._left_over(low, high, bit))
            if len(both) >= self._size:
                if rank in both[: self._size]:
                    return both[: self._size]
                both = both[self._size :]
            left = both
        return left

    def group(self, rank: int) -> list[int]:
        """The ranks of the group of `rank`, itself among them."""
        size, everyone = self._size, len(self._ordered)
        if 2 < size < everyone and everyone % size == 1:
            (alone,) = self._left_over(0, everyone, _BITS - 1)
            both = sorted([alone, *self._full(alone - 1 if alone else 1)])
            half = (len(both) + 1) // 2
            if rank in both:
                return both[:half] if rank in both[:half] else both[half:]
        return self._full(rank)
