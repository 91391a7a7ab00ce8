"""How long one of our rounds takes, and what it moves: butterfly and ring of collectives/, in closed form.

The sizes are the real ones: chunk grid, codec and control messages are those of the product. The time is the sum of the steps
that wait for each other (Ready -> Open -> Chunk -> Result -> Vote -> Commit), each with its latency, and of the bytes that the
slowest link has to pass in between. Encoding, sealing and the outer step are not in it (0.75 s of one core per GB
of fp32 parameters, docs/benchmarks.md). tests/sim/test_plan.py holds it against whole swarms in virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import msgspec
from thinwire.collectives.allotment import Load, allot
from thinwire.collectives.shards import MIN_COUNT, Grid, Sized, grid
from thinwire.compression.codec import Codec
from thinwire.swarm.ballots import MAX_SPANS, SPAN_PREFIX
from thinwire.swarm.frame import HEADER_BYTES
from thinwire.swarm.identity import SIGNATURE_BYTES
from thinwire.swarm.protocol import (
    MAX_CHUNKS,
    Ballot,
    Chunk,
    Commit,
    Contribution,
    Message,
    Open,
    Partial,
    Proof,
    Ready,
    Record,
    Result,
    Span,
    Vote,
)

_ID = bytes(32)
_NUMBER = 1 << 17
"""Stands for the numbers in messages of which only the size counts: five bytes, as most of them have."""


@dataclass(frozen=True, slots=True)
class Place:
    """One peer of a plan: bytes/s down and up, and seconds of its inner steps in one round."""

    down: float
    up: float
    computing: float


@dataclass(frozen=True, slots=True)
class RoundTime:
    """What a round costs.

    Seconds: `waiting` until everyone that is waited for has computed, then `agreement`, then `data`. `sent` and `received`:
    bytes per peer, the mean, control included. `late`: peers that are not waited for. `busy`: the fraction of a round that
    peers compute; what the late ones do counts for nothing.
    """

    waiting: float
    agreement: float
    data: float
    sent: float
    received: float
    late: int
    busy: float

    @property
    def exchange(self) -> float:
        """Seconds from the last announcement to the commit."""
        return self.agreement + self.data

    @property
    def period(self) -> float:
        """Seconds from one commit to the next."""
        return self.waiting + self.exchange


def largest_fragment(codec: Sized) -> int:
    """Parameters that one fragment can have at most."""
    return grid(MIN_COUNT << 19, codec).chunk * MAX_CHUNKS


def grids(total: int, codec: Sized) -> list[Grid]:
    """The chunk grids of `total` parameters: one, or as few fragments of equal size as the limits of a grid allow."""
    count = max(1, -(-total // largest_fragment(codec)))
    size = max(1, -(-total // count))
    return [grid(min(size, total - start), codec) for start in range(0, total, size)]


def round_time(
    total: int,
    codec: Codec,
    places: Sequence[Place],
    latency: float,
    *,
    grace: float = 10.0,
    quorum: float = 0.5,
    jitter: float = 0.0,
    sized: bool = True,
    topology: str = "butterfly",
) -> RoundTime:
    """A round of `total` parameters among `places`, all of them contributing.

    `latency`: seconds one way, of which the part `jitter` is exponentially distributed; `grace`, `quorum` and `topology`: the
    manifest's. `sized`: chunks are dealt out by bandwidth, as it is once all know theirs; else equally.
    """
    ready = sorted(place.computing for place in places)
    opened = min(ready[-1], ready[min(len(ready) - 1, int(quorum * len(ready)))] + grace)
    here = [place for place in places if place.computing <= opened]
    peers, late = len(here), len(places) - len(here)
    computing = sum(place.computing for place in here) / len(places)
    if peers == 1:
        return RoundTime(opened, 0.0, 0.0, 0.0, 0.0, late, computing / opened if opened else 1.0)
    up, down = min(place.up for place in here), min(place.down for place in here)
    slow = sum(place.up == up for place in here)
    cut = grids(total, codec)
    sizes = _sizes(peers, slow, cut, codec)
    # Of several messages at one time the last one counts; the leader, which is one of the peers, is near to itself.
    worst = latency * (1 - jitter + jitter * sum(1 / i for i in range(1, peers)))
    agreement = (
        2 * worst + 2 * latency * (peers - 1) / peers + sizes.led * (peers - 1) / up + sizes.ready * peers / 2 / up
    )
    scattered = sizes.scatter / min(up, down) + worst + sizes.last / up
    data = worst + max(sizes.most / up, sizes.most / down, scattered)
    if topology == "ring":
        data = sum(ring_data(peers, fragment, codec, min(up, down), latency) for fragment in cut)
    elif sized and (dealt := _allotted(here, cut, codec)) is not None:
        data = worst + max(dealt[0], dealt[1] + worst)
    moved = sizes.mean + (peers - 1) * (sizes.ready + sizes.record + (sizes.led + sizes.vote) / peers)
    period = opened + agreement + data
    return RoundTime(opened, agreement, data, moved, moved, late, computing / period)


def ring_data(peers: int, cut: Grid, codec: Codec, rate: float, latency: float) -> float:
    """Seconds in which one fragment's chunks go round a ring twice: links of `rate` bytes/s and `latency` seconds one way.

    A peer sends the chunks of one owner after those of another: the next ones are there when the link is free, or, where the
    latency is longer than an owner's chunks take, one hop after those before.
    """
    count = len(cut)
    frame = wire(Partial(_NUMBER, 0, Ballot(1, _ID), 500))
    payload = (codec.nbytes(cut.chunk) * (count - 1) + codec.nbytes(cut.size(count - 1))) / count
    one, run = (payload + frame) / rate, count / peers * (payload + frame) / rate
    return (2 * (peers - 1) - 1) * max(run, latency + min(one, run)) + run + latency


def _allotted(places: Sequence[Place], fragments: Sequence[Grid], codec: Codec) -> tuple[float, float] | None:
    """Seconds of the busiest link, and until the last contribution is averaged and sent, with chunks dealt out by bandwidth.

    None where they are dealt out equally.
    """
    loads, others = [Load(max(1, int(place.up)), max(1, int(place.down))) for place in places], len(places) - 1
    busy = scattered = 0.0
    for cut in fragments:
        owned = allot(len(cut), loads)
        if not owned:
            return None
        chunk, result = _of_data(cut, codec)
        dealt = [(place, own, len(cut) - own) for place, own in zip(places, owned, strict=True)]
        busy += max(
            max((rest * chunk + own * others * result) / place.up, (rest * result + own * others * chunk) / place.down)
            for place, own, rest in dealt
        )
        scattered += max(rest * chunk / min(place.up, place.down) for place, _, rest in dealt)
    return busy, scattered + others * result / min(place.up for place, own, _ in dealt if own)


def _of_data(cut: Grid, codec: Codec) -> tuple[float, float]:
    """Bytes of a chunk and of a result on the wire, the mean."""
    count = len(cut)
    payload = (codec.nbytes(cut.chunk) * (count - 1) + codec.nbytes(cut.size(count - 1))) / count
    return payload + wire(Chunk(_NUMBER, 0, _NUMBER, 500)), payload + wire(Result(_NUMBER, 0, Ballot(1, _ID), 500))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes on the wire. Data of one peer: all it sends on average (`mean`), the most that any of the slowest peers sends
    (`most`), its own contribution (`scatter`), the last result that it sends to all others (`last`). Messages to one peer:
    `ready`, `record`, `vote`, and `led`, which the leader sends.
    """

    mean: float
    most: float
    scatter: float
    last: float
    ready: int
    record: int
    vote: int
    led: int


def _sizes(peers: int, slow: int, fragments: Sequence[Grid], codec: Codec) -> _Sizes:
    ballot = Ballot(1, _ID)
    ids = (_ID,) * peers
    opened = Open(_NUMBER, 0, ballot, ids, ids, (Contribution(_ID, _NUMBER, _NUMBER),) * peers, (), None, ())
    commit = Commit(opened, _ID, (Proof(_ID, bytes(64)),) * peers)
    vote = wire(Vote(_NUMBER, 0, ballot, _ID, _ID))
    spans = (Span(bytes(SPAN_PREFIX), 100, 0),) * min(MAX_SPANS, peers - 1)
    mean = most = scatter = last = 0.0
    ready = record = 0
    for cut in fragments:
        count = len(cut)
        chunk, result = _of_data(cut, codec)
        # Some own one chunk more than others; how likely one of the slowest is among them?
        odd = count % peers
        owned = count // peers + 1 - comb(peers - slow, odd) / comb(peers, odd)
        mean += (count * (peers - 1) / peers) * (chunk + result)
        most += (count - owned) * chunk + owned * (peers - 1) * result
        scatter += (count - owned) * chunk
        last = (peers - 1) * result
        ready += wire(Ready(_NUMBER, 0, _NUMBER, _ID, _ID, _NUMBER, bytes(32 * count), True, 0.0, 0.0, spans=spans))
        mine = tuple(range(500, 500 + -(-count // peers)))
        record += wire(Record(_NUMBER, 0, ballot, mine, bytes(32 * len(mine))))
    led = len(fragments) * (wire(opened) + wire(commit))
    return _Sizes(mean, most, scatter, last, ready, record, vote * len(fragments), led)


def wire(message: Message) -> int:
    """Bytes of a message's frame without its payload."""
    return HEADER_BYTES + len(msgspec.msgpack.encode(message)) + (SIGNATURE_BYTES if message.signed else 0)
