"""How long a round of pairs or groups (NoLoCo) takes, and what it moves: the meeting of collectives/gossip.py, in closed form.

The sizes are those of the product: both vectors of a payload, chunks and messages. Nobody waits for others than its group: a
round takes what the slowest of the group computes, then Ready -> Fetch -> Chunk, and the bytes through the slowest link between
them; slow weights have gone through it meanwhile, or as much of them as it passes in that time. Partners that are late time
and again end their inner steps early and so contribute fewer, which is not in it: unequal machines wait less than it says.
tests/sim/test_plan.py holds it against whole swarms in virtual time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement

import numpy as np
from thinwire.collectives.halves import Halves
from thinwire.collectives.shards import Grid
from thinwire.compression.codec import Codec
from thinwire.sims.roundtime import Place, RoundTime, grids, wire
from thinwire.swarm.protocol import Base, Chunk, Fetch, Ready

DRAWN = 1000
"""Groups of which the mean is taken."""

_ID = bytes(32)
_NUMBER = 1 << 17


def pair_time(
    total: int, how: Halves, places: Sequence[tuple[int, Place]], latency: float, group: int = 2
) -> RoundTime:
    """A round of `total` parameters in random groups. `places`: how many peers there are of a kind; `latency`: seconds one way.

    Means over all pairs, of larger groups over DRAWN: `waiting` until the slowest one has computed, `agreement` the way of
    Ready and Fetch.
    """
    step, base, control = _sizes(total, how)
    size = min(group, sum(count for count, _ in places))
    waiting = moving = computing = 0.0
    for chance, members in _pairs(places) if size == 2 else _groups(places, size):
        slowest = max(one.computing for one in members)
        rate = min(min(one.up, one.down) for one in members) / (size - 1)
        seconds = latency + step / rate + max(0.0, base / rate - slowest)
        waiting += chance * slowest
        moving += chance * seconds
        computing += chance * sum(one.computing for one in members) / size / (slowest + 2 * latency + seconds)
    moved = (size - 1) * (step + base + control)
    return RoundTime(waiting, 2 * latency, moving, moved, moved, 0, computing)


def _pairs(places: Sequence[tuple[int, Place]]) -> Iterator[tuple[float, tuple[Place, ...]]]:
    """How likely a pair is of two kinds."""
    peers = sum(count for count, _ in places)
    for first, second in combinations_with_replacement(range(len(places)), 2):
        (some, a), (others, b) = places[first], places[second]
        ways = some * (some - 1) if first == second else 2 * some * others
        yield ways / (peers * (peers - 1)), (a, b)


def _groups(places: Sequence[tuple[int, Place]], size: int) -> Iterator[tuple[float, tuple[Place, ...]]]:
    """Larger groups, of which there may be too many kinds to count."""
    rng, everyone = np.random.default_rng(0), [place for count, place in places for _ in range(count)]
    drawn = 1 if len(places) == 1 else DRAWN
    for _ in range(drawn):
        yield 1 / drawn, tuple(everyone[index] for index in rng.choice(len(everyone), size, replace=False))


def _sizes(total: int, how: Halves) -> tuple[float, float, float]:
    """Bytes of what one sends to the other: chunks that it makes of its steps, those of its slow weights, and messages."""
    step = base = control = 0
    for cut in grids(total, how):
        count = len(cut)
        fetch = wire(Fetch(_NUMBER, 0, _ID, tuple(range(count))))
        step += _chunks(cut, how.fast)
        control += wire(Ready(_NUMBER, 0, _NUMBER, _ID, _ID, _NUMBER, bytes(32 * count), True, 0.0, 0.0)) + fetch
        if how.slow is not None:
            base += _chunks(cut, how.slow)
            control += wire(Base(_NUMBER, 0, _NUMBER, _ID, bytes(32 * count))) + fetch
    return step, base, control


def _chunks(cut: Grid, codec: Codec) -> int:
    """Bytes of one vector."""
    count = len(cut)
    chunk = wire(Chunk(_NUMBER, 0, _NUMBER, min(count, 500)))
    ends = sum(codec.nbytes(cut.size(index)) + chunk for index in (0, count - 1)[: min(count, 2)])
    return ends + max(0, count - 2) * (codec.nbytes(cut.chunk) + chunk)
