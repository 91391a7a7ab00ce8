"""How many chunks each peer of a round is to own, by the bandwidth of its link: a pure function.

Whoever contributes sends its own chunks to their owners and receives all results; whoever owns chunks receives them from every
contributor and sends the results to all. With N peers that do both, and s the part that a peer owns, it moves
P · (1 + s · (N − 2)) bytes each way. Chunks are dealt one by one to the peer that would be done first with one more, which
for times that grow with every chunk makes the longest time as short as it can be (the greedy solution of min-max allocation).
So a link that takes longer with its own contribution than others with their part owns nothing.

What peers say of their own links cannot be checked. So nobody owns more than MOST equal parts, whatever it says: a liar makes
a round last at most (1 + MOST) / 2 times as long as equal parts would; and parts are equal where others gain little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from statistics import median

from thinwire.collectives.shards import equal

MOST = 3
"""Equal parts, of all peers of a round, that one owns at most, or more where too few may own any; also bounds what an owner has
to hold, in sizes of the fragment.
"""

GAIN = 1.2
"""Equal parts have to take so many times longer, or they stay equal: measured links are never quite alike."""


@dataclass(frozen=True, slots=True)
class Load:
    """One peer of a round: bytes/s up and down (0: unknown), whether it contributes, whether it may own chunks."""

    up: int
    down: int
    contributes: bool = True
    owns: bool = True


def seconds(loads: Sequence[Load], counts: Sequence[int]) -> list[float]:
    """Time of each peer, in chunks per byte/s, when it owns so many; all bandwidths are known (see `filled`).

    Of a sole contributor that owns chunks the way down is counted as if it owned none.
    """
    total, contributors = sum(counts), sum(load.contributes for load in loads)
    return [_time(load, owned, total, len(loads), contributors) for load, owned in zip(loads, counts, strict=True)]


def _time(load: Load, owned: int, total: int, peers: int, contributors: int) -> float:
    mine = int(load.contributes)
    up = mine * total + owned * (peers - 1 - mine)
    down = total + owned * max(0, contributors - mine - 1)
    return max(up / load.up, down / load.down)


def allot(count: int, loads: Sequence[Load], fragment: int = 0) -> tuple[int, ...]:
    """Chunks of each peer, `count` in all; empty: equal parts are as good, or nothing is known.

    An unknown bandwidth counts as the median of the known ones. Of those that are alike others come first in each `fragment`.
    """
    known = filled(loads)
    owners = [at for at, load in enumerate(loads) if load.owns]
    if not known or not count or len(owners) < 2:
        return ()
    contributors, peers = sum(load.contributes for load in known), len(known)
    most = max(-(-MOST * count // peers), -(-count // len(owners)))
    owned = [0] * peers

    def turn(at: int, chunks: int) -> tuple[float, int, int, int]:
        return _time(known[at], chunks, count, peers, contributors), chunks, (at - fragment * count) % peers, at

    waiting = [turn(at, 1) for at in owners]
    heapify(waiting)
    for _ in range(count):
        at = waiting[0][-1]
        owned[at] += 1
        if owned[at] < most:
            heapreplace(waiting, turn(at, owned[at] + 1))
        else:
            heappop(waiting)
    alike = [0] * peers
    for at, part in zip(owners, equal(count, len(owners), fragment), strict=True):
        alike[at] = part
    if max(seconds(known, alike)) < GAIN * max(seconds(known, owned)):
        return ()
    return tuple(owned)


def filled(loads: Sequence[Load]) -> list[Load]:
    """The same with the unknown filled in; empty when nothing is known."""
    up, down = ([value for value in values if value] for values in ([x.up for x in loads], [x.down for x in loads]))
    if not up and not down:
        return []
    # Of a direction that nobody knows the other one is as good a guess.
    usual_up, usual_down = int(median(up or down)) or 1, int(median(down or up)) or 1
    return [Load(x.up or usual_up, x.down or usual_down, x.contributes, x.owns) for x in loads]
