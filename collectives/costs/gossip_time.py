"""Duration and traffic of a round of pairs or groups (NoLoCo), in closed form.

The protocol is in collectives/gossip/pair.py. The sizes are those of the product: both vectors of a payload, chunks and
messages. A peer waits only for its group: a round takes the computing time of the slowest member, then Ready -> Fetch
-> Chunk, and the time of the bytes on the slowest link between the members. Slow weights travel meanwhile, as far as
the link can carry them in that time. The model ignores that partners that are late repeatedly end their inner steps
early, and so contribute fewer steps; unequal machines therefore wait less than predicted.
tests/swarms/topologies/test_planned_times.py compares the model with whole swarms in virtual time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement

import numpy as np
from thinwire.collectives.costs.round_time import PlannedPeer, RoundTime, grids, wire
from thinwire.collectives.gossip.pair_codec import PairCodec
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.core.codec import Codec
from thinwire.swarm.messages.registry import Base, Chunk, Fetch, Ready

DRAWN = 1000
"""Number of random groups over which the mean is taken."""

_ID = bytes(32)
_NUMBER = 1 << 17


def pair_time(
    total: int, how: PairCodec, places: Sequence[tuple[int, PlannedPeer]], latency: float, group: int = 2
) -> RoundTime:
    """Return the time of a round of `total` parameters in random groups.

    places: pairs of a number of peers and their kind. latency: seconds one way. The result is a mean over all pairs, or
    over DRAWN larger groups: `waiting` lasts until the slowest member has computed, `agreement` is the latency of Ready
    and Fetch.
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


def _pairs(places: Sequence[tuple[int, PlannedPeer]]) -> Iterator[tuple[float, tuple[PlannedPeer, ...]]]:
    """Yield all pairs of kinds with their probabilities."""
    peers = sum(count for count, _ in places)
    for first, second in combinations_with_replacement(range(len(places)), 2):
        (some, a), (others, b) = places[first], places[second]
        ways = some * (some - 1) if first == second else 2 * some * others
        yield ways / (peers * (peers - 1)), (a, b)


def _groups(places: Sequence[tuple[int, PlannedPeer]], size: int) -> Iterator[tuple[float, tuple[PlannedPeer, ...]]]:
    """Yield random larger groups, because there may be too many combinations of kinds to enumerate."""
    rng, everyone = np.random.default_rng(0), [place for count, place in places for _ in range(count)]
    drawn = 1 if len(places) == 1 else DRAWN
    for _ in range(drawn):
        yield 1 / drawn, tuple(everyone[index] for index in rng.choice(len(everyone), size, replace=False))


def _sizes(total: int, how: PairCodec) -> tuple[float, float, float]:
    """Return the bytes that one peer sends to a partner: step chunks, slow-weight chunks, and messages."""
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
    """Return the bytes of one vector on the wire."""
    count = len(cut)
    chunk = wire(Chunk(_NUMBER, 0, _NUMBER, min(count, 500)))
    ends = sum(codec.nbytes(cut.size(index)) + chunk for index in (0, count - 1)[: min(count, 2)])
    return ends + max(0, count - 2) * (codec.nbytes(cut.chunk) + chunk)
