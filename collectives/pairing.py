"""Who averages with whom in a round of pairs: a uniformly random perfect matching that everyone draws alike, without a word.

Every peer gets a random 64-bit label, a hash of run, round and its id; the pairs are those of a knock-out tree over the labels:
in each subtree whose two halves both leave somebody over, the two are a pair, and what is left of an odd number waits for the
next larger subtree. Labels are independent of who the peers are, so every matching is equally likely, as when a random
permutation is cut into pairs (NoLoCo, arXiv 2506.10911, pairs rank k with rank k + N/2). The tree is preferred because it
is local: a peer that comes or goes changes a few pairs, one a level at most, and not all of them. So peers whose views differ
for a moment agree on nearly every pair, and those that do not are told so by the other side.
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


def partner(run_id: Digest, round: int, view: Sequence[PeerId], me: PeerId) -> PeerId | None:
    """The other one of my pair in this round; None for the one who is alone when the number is odd, and for a stranger.

    `view` is sorted. Takes one vectorized pass and a sort of the labels; what follows is O(log² N).
    """
    place = bisect_left(view, me)
    if len(view) < 2 or place == len(view) or view[place] != me:
        return None
    all_labels = labels(run_id, round, view)
    order = np.argsort(all_labels, kind="stable")
    tree = _Tree(all_labels[order])
    found = tree.opponent(int(np.flatnonzero(order == place)[0]))
    return None if found is None else view[int(order[found])]


class _Tree:
    """Subtrees are ranges [low, high) of the sorted labels that share their highest bits."""

    def __init__(self, ordered: NDArray[np.uint64]) -> None:
        self._ordered = ordered

    def _split(self, low: int, high: int, bit: int) -> int:
        """Where the half with this bit set begins."""
        if bit < 0:
            return (low + high) // 2  # equal labels: any rule will do that all know
        lowest = int(self._ordered[low])
        edge = (lowest >> bit | 1) << bit
        if lowest >= edge:
            return low
        return low + int(np.searchsorted(self._ordered[low:high], np.uint64(edge)))

    def _left_over(self, low: int, high: int, bit: int) -> int:
        """Who of an odd number is in no pair of the subtree: of its halves one is odd, and so on down."""
        while high - low > 1:
            middle = self._split(low, high, bit)
            low, high = (low, middle) if (middle - low) % 2 else (middle, high)
            bit -= 1
        return low

    def opponent(self, rank: int) -> int | None:
        """The rank of the partner of `rank`."""
        low, high, bit = 0, len(self._ordered), _BITS - 1
        siblings: list[tuple[int, int, int]] = []
        while high - low > 1:
            middle = self._split(low, high, bit)
            bit -= 1
            mine, other = ((low, middle), (middle, high)) if rank < middle else ((middle, high), (low, middle))
            siblings.append((*other, bit))
            low, high = mine
        for low, high, bit in reversed(siblings):
            # Up the tree while nobody is left over next door: so far the peer is what its own half leaves over.
            if (high - low) % 2:
                return self._left_over(low, high, bit)
        return None
