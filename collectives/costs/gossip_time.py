"""Duration and traffic of a round of pairs or groups (NoLoCo), in closed form.

The protocol is in collectives/gossip/pair.py, that of large groups in collectives/gossip/owner_group.py. The sizes are
those of the product: both vectors of a payload, chunks and messages. A peer waits only for its group: a round takes the
computing time of the slowest member, then Ready -> Fetch -> Chunk (and back, as a mean), and the time of the bytes on the
slowest link between the members. Slow weights travel meanwhile, as far as the link can carry them in that time. The model
ignores that partners that are late repeatedly end their inner steps early, and so contribute fewer steps; unequal
machines therefore wait less than predicted. tests/swarms/topologies/test_planned_times.py compares the model with whole
swarms in virtual time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
from thinwire.collectives.costs.exchange_bytes import bits_of
from thinwire.collectives.costs.round_time import PlannedPeer, RoundTime, grids, wire
from thinwire.collectives.gossip.owner_group import MESH
from thinwire.collectives.gossip.pair_codec import PairCodec
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.sparse.flat import PORTION, ChunkCodec, FlatSparse
from thinwire.compression.sparse.header import HEADER
from thinwire.swarm.messages.registry import Base, Chunk, Fetch, Ready

DRAWN = 1000
"""Number of random groups over which the mean is taken."""

_ID = bytes(32)
_NUMBER = 1 << 17


def pair_time(
    total: int,
    how: PairCodec,
    places: Sequence[tuple[int, PlannedPeer]],
    latency: float,
    group: int = 2,
    *,
    jitter: float = 0.0,
) -> RoundTime:
    """Return the time of a round of `total` parameters in random groups.

    places: pairs of a number of peers and their kind. latency: seconds one way, of which the share `jitter` is
    exponentially distributed. The result is a mean over all pairs, or over DRAWN larger groups: `waiting` lasts until the
    slowest member has computed, `agreement` is the latency of Ready and Fetch.
    """
    size = min(group, sum(count for count, _ in places))
    sent = _by_owners(total, how, size) if group > MESH else _to_all(total, how, size)
    # Of the messages of all other members the last one counts.
    latency *= 1 - jitter + jitter * sum(1 / i for i in range(1, size))
    slow_hops = 2 if group > MESH else 1  # to the owner, and back as a mean
    hops = slow_hops if how.averaged else 1
    waiting = moving = computing = 0.0
    for chance, members in _pairs(places) if size == 2 else _groups(places, size):
        slowest = max(one.computing for one in members)
        rate = min(min(one.up, one.down) for one in members)
        late = (slow_hops - hops) * latency + sent.base / rate - slowest
        seconds = hops * latency + sent.step / rate + max(0.0, late)
        waiting += chance * slowest
        moving += chance * seconds
        computing += chance * sum(one.computing for one in members) / size / (slowest + 2 * latency + seconds)
    return RoundTime(waiting, 2 * latency, moving, sent.all, sent.all, 0, computing)


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


@dataclass(frozen=True, slots=True)
class _Sent:
    """Bytes of a round: of Δ and of slow weights on the busiest link, and all that one peer sends."""

    step: float
    base: float
    all: float


def _to_all(total: int, how: PairCodec, size: int) -> _Sent:
    """Return the bytes of a group whose members send everything to each other."""
    step = base = control = 0.0
    for cut in grids(total, how):
        step += (size - 1) * _chunks(cut, how.fast)
        base += (size - 1) * _chunks(cut, how.slow) / how.parts if how.slow is not None else 0
        control += (size - 1) * _messages(cut, how, len(cut))
    return _Sent(step, base, step + base + control)


def _by_owners(total: int, how: PairCodec, size: int) -> _Sent:
    """Return the bytes of a group whose chunks have owners: vectors to the owners, and means back.

    With fewer chunks than members, or a few more, the links of the owners with most chunks are the busiest.
    """
    step = base = everything = 0.0
    for cut in grids(total, how):
        count = len(cut)
        share, most = (size - 1) / size, (size - 1) * -(-count // size) / count
        fast = _chunks(cut, how.fast)
        if how.averaged:
            fast += _chunks(cut, how.means)
            step += most * fast
            everything += share * fast
        else:
            step += (size - 1) * fast
            everything += (size - 1) * fast
        if how.slow is not None:
            slow = _chunks(cut, how.slow) + _chunks(cut, how.means)
            turns = (len(range(part, count, how.parts)) for part in range(how.parts))
            most = (size - 1) * sum(-(-chunks // size) for chunks in turns) / count
            base += most * slow / how.parts
            everything += share * slow / how.parts
        everything += (size - 1) * _messages(cut, how, -(-count // size) if how.averaged else count)
    return _Sent(step, base, everything)


def _messages(cut: Grid, how: PairCodec, requested: int) -> int:
    """Return the bytes of the messages to one partner, which requests this many chunks of a vector."""
    count = len(cut)
    fetch = wire(Fetch(_NUMBER, 0, _ID, tuple(range(requested))))
    control = wire(Ready(_NUMBER, 0, _NUMBER, _ID, _ID, _NUMBER, bytes(32 * count), True, 0.0, 0.0)) + fetch
    if how.slow is not None:
        control += wire(Base(_NUMBER, 0, _NUMBER, _ID, bytes(32 * -(-count // how.parts)))) + fetch
    return control


def _chunks(cut: Grid, codec: ChunkCodec) -> float:
    """Return the bytes of one vector on the wire."""
    count = len(cut)
    chunk = wire(Chunk(_NUMBER, 0, _NUMBER, min(count, 500)))
    ends = sum(usual_bytes(codec, cut.size(index)) + chunk for index in (0, count - 1)[: min(count, 2)])
    return ends + max(0, count - 2) * (usual_bytes(codec, cut.chunk) + chunk)


def usual_bytes(codec: ChunkCodec, n: int) -> float:
    """Return the bytes of n elements: exact for dense codecs, usual for a sparse one."""
    if not isinstance(codec, FlatSparse):
        return codec.nbytes(n)
    return n * bits_of(codec.codec) / 8 + HEADER.size * -(-n // PORTION)
