"""How long a round of pairs (NoLoCo) takes, and what it moves: the meeting of collectives/gossip.py, in closed form.

The sizes are those of the product: both halves of a payload, chunks and messages. Nobody waits for a third: a round takes what
the slower of two computes, then Ready -> Fetch -> Chunk, and the bytes through the slowest link between the two. Partners that
are late time and again end their inner steps early and so contribute fewer, which is not in it: unequal machines wait less
than it says. tests/sim/test_plan.py holds it against whole swarms in virtual time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement

from thinwire.collectives.halves import Halves
from thinwire.sims.roundtime import Place, RoundTime, grids, wire
from thinwire.swarm.protocol import Chunk, Fetch, Ready

_ID = bytes(32)
_NUMBER = 1 << 17


def pair_time(total: int, how: Halves, places: Sequence[tuple[int, Place]], latency: float) -> RoundTime:
    """A round of `total` parameters in random pairs. `places`: how many peers there are of a kind; `latency`: seconds one way.

    Means over all pairs: `waiting` until the slower one has computed, `agreement` the way of Ready and Fetch.
    """
    data, control = _sizes(total, how)
    waiting = moving = computing = 0.0
    for chance, a, b in _pairs(places):
        slower = max(a.computing, b.computing)
        seconds = latency + max(data / min(a.up, b.down), data / min(b.up, a.down))
        waiting += chance * slower
        moving += chance * seconds
        computing += chance * (a.computing + b.computing) / 2 / (slower + 2 * latency + seconds)
    moved = data + control
    return RoundTime(waiting, 2 * latency, moving, moved, moved, 0, computing)


def _pairs(places: Sequence[tuple[int, Place]]) -> Iterator[tuple[float, Place, Place]]:
    """How likely a pair is of two kinds."""
    peers = sum(count for count, _ in places)
    for first, second in combinations_with_replacement(range(len(places)), 2):
        (some, a), (others, b) = places[first], places[second]
        ways = some * (some - 1) if first == second else 2 * some * others
        yield ways / (peers * (peers - 1)), a, b


def _sizes(total: int, how: Halves) -> tuple[float, float]:
    """Bytes of what one sends to the other: chunks, and the messages before them."""
    data = control = 0
    for cut in grids(total, how):
        count = len(cut)
        chunk = wire(Chunk(_NUMBER, 0, _NUMBER, min(count, 500)))
        data += sum(how.nbytes(cut.size(index)) + chunk for index in (0, count - 1)[: min(count, 2)])
        data += max(0, count - 2) * (how.nbytes(cut.chunk) + chunk)
        control += wire(Ready(_NUMBER, 0, _NUMBER, _ID, _ID, _NUMBER, bytes(32 * count), True, 0.0, 0.0))
        control += wire(Fetch(_NUMBER, 0, _ID, tuple(range(count))))
    return data, control
