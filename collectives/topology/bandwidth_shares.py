"""Number of chunks that each peer of a round owns, by the bandwidth of its link: a pure function.

A contributor sends its chunks to their owners and receives all results. An owner receives its chunks from every
contributor and sends the results to all. With N peers that do both, where a peer owns the share s, it moves P · (1 + s
· (N − 2)) bytes in each direction. Chunks are assigned one by one to the peer that would finish first with one more;
for times that grow with every chunk, this minimises the longest time (the greedy solution of min-max allocation). So a
link that takes longer for its own contribution than others for their chunks owns nothing.

Announced link speeds cannot be checked. So no peer owns more than MOST equal shares, whatever it announces: a liar
makes a round last at most (1 + MOST) / 2 times as long as with equal shares. If unequal shares gain little, shares are
equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from statistics import median

from thinwire.collectives.topology.shards import equal

MOST = 3
"""Maximum number of equal shares that one peer owns; more if too few peers may own chunks.

It also bounds the memory of an owner, in sizes of the fragment.
"""

GAIN = 1.2
"""Shares are equal unless that takes this factor longer, since measured links never quite agree."""


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """Capacities and roles of one peer in a round: bytes/s up and down (0: unknown).

    contributes: it has a contribution. owns: it may own chunks.
    """

    up: int
    down: int
    contributes: bool = True
    owns: bool = True


def seconds(loads: Sequence[PeerLoad], counts: Sequence[int]) -> list[float]:
    """Return the time of each peer if it owns this number of chunks, in seconds per byte of a chunk.

    All bandwidths must be known (see `filled`). If the only contributor owns chunks, its downlink counts as if it owned
    none.
    """
    total, contributors = sum(counts), sum(load.contributes for load in loads)
    return [_time(load, owned, total, len(loads), contributors) for load, owned in zip(loads, counts, strict=True)]


def _time(load: PeerLoad, owned: int, total: int, peers: int, contributors: int) -> float:
    mine = int(load.contributes)
    up = mine * total + owned * (peers - 1 - mine)
    down = total + owned * max(0, contributors - mine - 1)
    return max(up / load.up, down / load.down)


def allot(count: int, loads: Sequence[PeerLoad], fragment: int = 0) -> tuple[int, ...]:
    """Return the number of chunks of each peer, `count` in all; empty if equal shares are as good.

    Also empty if nothing is known. An unknown bandwidth counts as the median of the known ones. Among equal peers,
    others come first in each `fragment`.
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


def filled(loads: Sequence[PeerLoad]) -> list[PeerLoad]:
    """Return the loads with unknown bandwidths filled in; empty if none is known."""
    up, down = ([value for value in values if value] for values in ([x.up for x in loads], [x.down for x in loads]))
    if not up and not down:
        return []
    # If one direction is unknown for all peers, the other one is as good a guess.
    usual_up, usual_down = int(median(up or down)) or 1, int(median(down or up)) or 1
    return [PeerLoad(x.up or usual_up, x.down or usual_down, x.contributes, x.owns) for x in loads]
