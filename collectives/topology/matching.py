"""Random partition of the peers into pairs, or larger groups, that all peers compute alike.

No messages are needed. Every peer gets a random 64-bit label, a hash of run, round and its id. The groups are those of
a knock-out tree over the labels: in each subtree whose two halves together have enough ungrouped peers for a group,
these form one, and the peers that are then left wait for the next larger subtree. Labels are independent of the
identity of the peers, so every partition is equally likely, as if a random permutation were cut into pieces (NoLoCo,
arXiv 2506.10911, pairs rank k with rank k + N/2). The tree is preferred because it is local: a peer that joins or
departs changes only a few groups, at most one per level. So peers whose views differ for a moment agree on nearly every
group, and where they disagree, the other side declines.

The peers that are left at the root form a smaller group. With pairs, a single peer is left alone; with larger groups, a
single peer and a full group are divided into two groups.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import blake3
import numpy as np
from numpy.typing import NDArray
from thinwire.swarm.messages.registry import Digest, PeerId

_BITS = 64
_SPLITMIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT = np.uint64(31)


def labels(run_id: Digest, round: int, view: Sequence[PeerId]) -> NDArray[np.uint64]:
    """Return one label per peer of a view, different in each round.

    A label is a bijection of the first eight bytes of the id.
    """
    key = np.frombuffer(blake3.blake3(b"thinwire/pairs/1\0" + run_id + round.to_bytes(8, "big")).digest(), "<u8")
    mixed = np.frombuffer(b"".join(view), "<u8").reshape(-1, 4)[:, 0].astype(np.uint64)
    shifted = np.empty_like(mixed)
    for word in key:
        # The finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), with a new key each time. In place, because views
        # change with each peer that joins, and temporary arrays take as long as the arithmetic.
        mixed ^= word
        for shift, factor in _SPLITMIX:
            mixed ^= np.right_shift(mixed, shift, out=shifted)
            mixed *= factor
        mixed ^= np.right_shift(mixed, _LAST_SHIFT, out=shifted)
    return mixed


def others(run_id: Digest, round: int, view: Sequence[PeerId], me: PeerId, size: int = 2) -> tuple[PeerId, ...]:
    """Return the other peers of our group of at most `size` in this round, sorted.

    Empty if this peer is left over or not in the view. `view` is sorted. Takes one vectorized pass and a sort of the
    labels; the rest is O(size · log² N).
    """
    place = bisect_left(view, me)
    if len(view) < 2 or place == len(view) or view[place] != me:
        return ()
    all_labels = labels(run_id, round, view)
    order = all_labels.argsort(kind="stable")
    rank = int((order == place).argmax())
    return tuple(sorted(view[int(order[one])] for one in _Tree(all_labels[order], size).group(rank) if one != rank))


def partition(run_id: Digest, round: int, view: Sequence[PeerId], size: int) -> list[list[int]]:
    """Return all groups of a round as positions in the sorted view; a peer alone is a group, too."""
    all_labels = labels(run_id, round, view)
    order = all_labels.argsort(kind="stable")
    tree, groups = _Tree(all_labels[order], size), dict[int, list[int]]()
    for rank in range(len(view)):
        if rank not in groups:
            group = tree.group(rank)
            groups.update(dict.fromkeys(group, [int(order[one]) for one in group]))
    return list({id(group): group for group in groups.values()}.values())


class _Tree:
    """Tree over the sorted labels.

    Subtrees are ranges [low, high) of labels that share their highest bits; peers are ranks in that order.
    """

    def __init__(self, ordered: NDArray[np.uint64], size: int) -> None:
        # A memory view returns Python integers, which take less time than arrays of a few values.
        self._ordered, self._size = ordered.data, size

    def _split(self, low: int, high: int, bit: int) -> int:
        """Return the start of the half in which this bit is set."""
        if bit < 0:
            return (low + high) // 2  # equal labels: any rule that all peers know will do
        lowest = self._ordered[low]
        edge = (lowest >> bit | 1) << bit
        if lowest >= edge:
            return low
        return bisect_left(self._ordered, edge, low, high)

    def _left_over(self, low: int, high: int, bit: int) -> list[int]:
        """Return the peers that are in no full group of the subtree, fewer than a group."""
        size = self._size
        if (high - low) % size == 0:
            return []
        if high - low == 1:
            return [low]
        middle = self._split(low, high, bit)
        missing = size - (middle - low) % size
        right = self._left_over(middle, high, bit - 1)
        return right[missing:] if len(right) >= missing else self._left_over(low, middle, bit - 1) + right

    def _full(self, rank: int) -> list[int]:
        """Return the group of `rank`, or all peers that are left over if `rank` is one of them."""
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
            # Go up the tree until the two halves together leave enough peers over for a group with this peer.
            both = sorted(left + self._left_over(low, high, bit))
            if len(both) >= self._size:
                if rank in both[: self._size]:
                    return both[: self._size]
                both = both[self._size :]
            left = both
        return left

    def group(self, rank: int) -> list[int]:
        """Return the ranks of the group of `rank`, including itself."""
        size, everyone = self._size, len(self._ordered)
        if 2 < size < everyone and everyone % size == 1:
            (alone,) = self._left_over(0, everyone, _BITS - 1)
            both = sorted([alone, *self._full(alone - 1 if alone else 1)])
            half = (len(both) + 1) // 2
            if rank in both:
                return both[:half] if rank in both[:half] else both[half:]
        return self._full(rank)
