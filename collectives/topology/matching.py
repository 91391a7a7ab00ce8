"""Random partition of the peers into pairs, or larger groups, that all peers compute alike.

No messages are needed. Every peer gets a random 64-bit label, a hash of run, round and its id. The groups are those of
a knock-out tree over the labels: in each subtree whose two halves together have enough ungrouped peers for a group,
these form one, and the peers that are then left wait for the next larger subtree. Labels are independent of the
identity of the peers, so every partition is equally likely, as if a random permutation were cut into pieces (NoLoCo,
arXiv 2506.10911, pairs rank k with rank k + N/2). Unlike a permutation, the tree is local: a peer that joins or
departs changes only a few groups, at most one per level. So peers whose views differ for a moment agree on nearly every
group, and where they disagree, the other side declines.

The peers that are left at the root form a smaller group. With pairs, a single peer is left alone; with larger groups, a
single peer and a full group are divided into two groups.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import blake3
from thinwire.swarm.messages.registry import Digest, PeerId

_BITS = 64
_MASK = (1 << _BITS) - 1


class _Labels(dict[PeerId, int]):
    """Labels of peers in one round, each computed when it is first needed."""

    def __init__(self, run_id: Digest, round: int) -> None:
        super().__init__()
        digest = blake3.blake3(b"thinwire/pairs/1\0" + run_id + round.to_bytes(8, "big")).digest()
        self._key = struct.unpack("<4Q", digest)

    def __missing__(self, peer: PeerId) -> int:
        # A bijection of the first eight bytes of the id: the finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), four
        # times, each with another part of the key.
        mixed = int.from_bytes(peer[:8], "little")
        for word in self._key:
            mixed ^= word
            mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
            mixed ^= mixed >> 31
        self[peer] = mixed
        return mixed


# Cached, as the next function, because all peers of a simulation need the same labels in the same order.
_labels_of = lru_cache(maxsize=16)(_Labels)


@lru_cache(maxsize=16)
def _ranking(run_id: Digest, round: int, view: tuple[PeerId, ...]) -> tuple[tuple[PeerId, ...], tuple[int, ...]]:
    """Return the peers of a sorted view in the order of their labels, and the labels in this order."""
    label = _labels_of(run_id, round).__getitem__
    ranked = tuple(sorted(view, key=label))
    return ranked, tuple(map(label, ranked))


def labels(run_id: Digest, round: int, view: Sequence[PeerId]) -> list[int]:
    """Return one label per peer of a view, different in each round."""
    return list(map(_labels_of(run_id, round).__getitem__, view))


def others(run_id: Digest, round: int, view: Sequence[PeerId], me: PeerId, size: int = 2) -> tuple[PeerId, ...]:
    """Return the other peers of our group of at most `size` in this round, as `Matching.others` does."""
    return Matching(run_id, round, size).others(view, me)


def partition(run_id: Digest, round: int, view: Sequence[PeerId], size: int) -> list[list[int]]:
    """Return all groups of a round as positions in the sorted view; a peer alone is a group, too."""
    places = {peer: place for place, peer in enumerate(view)}
    return [[places[peer] for peer in group] for group in Matching(run_id, round, size).groups(view)]


class Matching:
    """Partition of the peers of one round, for a view that changes.

    The labels of the first view are sorted. Later views differ from it by a few peers, which are inserted and removed. Finding
    the group of a peer then takes O(size · log² N).
    """

    def __init__(self, run_id: Digest, round: int, size: int) -> None:
        self.round = round
        self._run_id = run_id
        self._label, self._size = _labels_of(run_id, round).__getitem__, size
        self._ranked: list[PeerId] = []
        """The view in the order of `_labels`; those with equal labels in that of their ids."""
        self._labels: list[int] = []

    def others(self, view: Sequence[PeerId], me: PeerId, changed: Iterable[PeerId] | None = None) -> tuple[PeerId, ...]:
        """Return the other peers of the group of `me`, sorted.

        Empty if this peer is left over or not in the view. `view` is sorted. changed: the only peers that may have joined or
        departed since the last call; None: any.
        """
        self._follow(view, changed)
        rank = self._rank(me)
        if len(view) < 2 or rank == len(view) or self._ranked[rank] != me:
            return ()
        group = _Tree(self._labels, self._size).group(rank)
        return tuple(sorted(self._ranked[one] for one in group if one != rank))

    def groups(self, view: Sequence[PeerId]) -> list[list[PeerId]]:
        """Return all groups of a sorted view; a peer alone is a group, too."""
        self._follow(view)
        tree, found = _Tree(self._labels, self._size), dict[int, list[PeerId]]()
        for rank in range(len(view)):
            if rank not in found:
                group = tree.group(rank)
                found.update(dict.fromkeys(group, [self._ranked[one] for one in group]))
        return list({id(group): group for group in found.values()}.values())

    def _rank(self, peer: PeerId) -> int:
        """Return the place of a peer, or where it would be."""
        label = self._label(peer)
        rank = bisect_left(self._labels, label)
        while rank < len(self._labels) and self._labels[rank] == label and self._ranked[rank] < peer:
            rank += 1
        return rank

    def _follow(self, view: Sequence[PeerId], changed: Iterable[PeerId] | None = None) -> None:
        if not self._ranked:
            ranked, labels = _ranking(self._run_id, self.round, tuple(view))
            self._ranked, self._labels = list(ranked), list(labels)
            return
        for peer in set(self._ranked).symmetric_difference(view) if changed is None else changed:
            rank, place = self._rank(peer), bisect_left(view, peer)
            was_here = rank < len(self._ranked) and self._ranked[rank] == peer
            is_here = place < len(view) and view[place] == peer
            if was_here and not is_here:
                del self._labels[rank], self._ranked[rank]
            elif is_here and not was_here:
                self._labels.insert(rank, self._label(peer))
                self._ranked.insert(rank, peer)


class _Tree:
    """Tree over the sorted labels.

    Subtrees are ranges [low, high) of labels that share their highest bits; peers are ranks in that order.
    """

    def __init__(self, ordered: Sequence[int], size: int) -> None:
        self._ordered, self._size = ordered, size

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

    def _other_halves(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield the sibling of each subtree that contains `rank`, without empty ones, the smallest first.

        Each is a range of ranks, and the bit by which this range is divided.
        """
        ordered = self._ordered
        label = ordered[rank]
        low, high = rank, rank + 1
        if ordered[low - 1 : low] == [label] or ordered[high : high + 1] == [label]:
            yield from reversed(list(self._halves_of_equals(rank)))
            low, high = bisect_left(ordered, label), bisect_right(ordered, label)
        while high - low < len(ordered):
            # The next larger subtree contains the neighbour that has more of the highest bits in common with this half.
            before = (label ^ ordered[low - 1]).bit_length() if low else _BITS + 1
            after = (label ^ ordered[high]).bit_length() if high < len(ordered) else _BITS + 1
            if before < after:
                start = bisect_left(ordered, label >> before << before, 0, low)
                yield start, low, before - 2
                low = start
            else:
                end = bisect_left(ordered, (label >> after) + 1 << after, high)
                yield high, end, after - 2
                high = end

    def _halves_of_equals(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield the siblings of the subtrees of peers with the label of `rank`, the largest first."""
        low, high = bisect_left(self._ordered, self._ordered[rank]), bisect_right(self._ordered, self._ordered[rank])
        while high - low > 1:
            middle = self._split(low, high, -1)
            mine, other = ((low, middle), (middle, high)) if rank < middle else ((middle, high), (low, middle))
            yield *other, -1
            low, high = mine

    def _full(self, rank: int) -> list[int]:
        """Return the group of `rank`, or all peers that are left over if `rank` is one of them."""
        left = [rank]
        for other in self._other_halves(rank):
            # Go up the tree until the two halves together leave enough peers over for a group with this peer.
            both = sorted(left + self._left_over(*other))
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
