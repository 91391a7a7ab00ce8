"""Duration and traffic of a round of this version (butterfly or ring), in closed form.

The sizes are exact: chunk grid, codec and control messages are those of the product. The time is the sum of the
dependent steps (Ready -> Propose -> Chunk -> Result -> Vote -> Commit), each with its latency, and of the bytes on the
slowest link in between. Encoding, encryption and the outer step are not included: with int8 about a second of one core per
GB of fp32 parameters (docs/measured/exchange.md). tests/swarms/topologies/test_planned_times.py compares the model with
whole swarms in virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from thinwire.collectives.consensus.certificates import compact
from thinwire.collectives.topology.bandwidth_shares import PeerLoad, allot
from thinwire.collectives.topology.shards import Grid, Sized, grid, largest_chunk
from thinwire.compression.core.codec import Codec
from thinwire.swarm.choices import Topology
from thinwire.swarm.frame import HEADER_BYTES
from thinwire.swarm.identity.identity import SIGNATURE_BYTES
from thinwire.swarm.messages import wire_form
from thinwire.swarm.messages.announcement import MAX_SPANS, SPAN_PREFIX
from thinwire.swarm.messages.registry import (
    LIFE,
    MAX_CHUNKS,
    Ballot,
    Chunk,
    Commit,
    Contribution,
    Message,
    Partial,
    Proof,
    Proposal,
    Propose,
    Ready,
    Result,
    ResultRecord,
    Span,
    Vote,
)

_ID = bytes(32)
_NUMBER = 1 << 17
"""Placeholder for numbers in messages of which only the size counts: five bytes, as most have."""


@dataclass(frozen=True, slots=True)
class PlannedPeer:
    """One peer of a plan: bytes/s down and up, and seconds of its inner steps in one round."""

    down: float
    up: float
    computing: float


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Cost of a round.

    waiting: seconds until all awaited peers have computed; then `agreement`, then `data`. sent, received: mean bytes
    per peer, control messages included. late: number of peers that the round does not wait for. busy: fraction of a
    round that peers compute; late peers count as idle.
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
    """Return the maximum number of parameters in one fragment."""
    return largest_chunk(codec) * MAX_CHUNKS


def grids(total: int, codec: Sized) -> list[Grid]:
    """Return the chunk grids of `total` parameters: the fewest equal fragments that the limits allow."""
    count = max(1, -(-total // largest_fragment(codec)))
    size = max(1, -(-total // count))
    return [grid(min(size, total - start), codec) for start in range(0, total, size)]


def round_time(
    total: int,
    codec: Codec,
    places: Sequence[PlannedPeer],
    latency: float,
    *,
    grace: float = 10.0,
    quorum: float = 0.5,
    jitter: float = 0.0,
    sized: bool = True,
    topology: Topology = "butterfly",
) -> RoundTime:
    """Return the cost of a round of `total` parameters among `places`, all of them contributing.

    latency: seconds one way, of which the share `jitter` is exponentially distributed. grace, quorum, topology: those
    of the manifest. sized: chunks are assigned by bandwidth, as they are once all peers know theirs; otherwise equally.
    """
    ready = sorted(place.computing for place in places)
    proposal = min(ready[-1], ready[min(len(ready) - 1, int(quorum * len(ready)))] + grace)
    here = [place for place in places if place.computing <= proposal]
    peers, late = len(here), len(places) - len(here)
    computing = sum(place.computing for place in here) / len(places)
    if peers == 1:
        return RoundTime(proposal, 0.0, 0.0, 0.0, 0.0, late, computing / proposal if proposal else 1.0)
    up, down = min(place.up for place in here), min(place.down for place in here)
    slow = sum(place.up == up for place in here)
    cut = grids(total, codec)
    sizes = _sizes(peers, slow, cut, codec)
    # Of several simultaneous messages the last one counts. The leader is one of the peers, so it reaches itself at
    # once.
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
    period = proposal + agreement + data
    return RoundTime(proposal, agreement, data, moved, moved, late, computing / period)


def ring_data(peers: int, cut: Grid, codec: Codec, rate: float, latency: float) -> float:
    """Return the seconds in which the chunks of one fragment go round a ring twice.

    Links have `rate` bytes/s and `latency` seconds one way. A peer sends the chunks of one owner after those of
    another. The next ones have arrived when the link becomes free, or, if the latency exceeds the time of an owner's
    chunks, one hop after the previous ones.
    """
    count = len(cut)
    frame = wire(Partial(_NUMBER, 0, Ballot(1, _ID), 500))
    payload = (codec.nbytes(cut.chunk) * (count - 1) + codec.nbytes(cut.size(count - 1))) / count
    one, run = (payload + frame) / rate, count / peers * (payload + frame) / rate
    return (2 * (peers - 1) - 1) * max(run, latency + min(one, run)) + run + latency


def _allotted(places: Sequence[PlannedPeer], fragments: Sequence[Grid], codec: Codec) -> tuple[float, float] | None:
    """Return the time of a round's data with chunks assigned by bandwidth, or None if they are equal.

    Two values in seconds: time of the busiest link, and time until the last contribution is averaged and sent.
    """
    loads, others = [PeerLoad(max(1, int(place.up)), max(1, int(place.down))) for place in places], len(places) - 1
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
    """Return the mean bytes of a chunk and of a result on the wire."""
    count = len(cut)
    payload = (codec.nbytes(cut.chunk) * (count - 1) + codec.nbytes(cut.size(count - 1))) / count
    return payload + wire(Chunk(_NUMBER, 0, _NUMBER, 500)), payload + wire(Result(_NUMBER, 0, Ballot(1, _ID), 500))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes on the wire.

    Data of one peer: `mean`, the average of all that it sends; `most`, the maximum that any of the slowest peers sends;
    `scatter`, its own contribution; `last`, the last result that it sends to all others. Messages to one peer: `ready`,
    `record`, `vote`, and `led`, those of the leader.
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
    ids = tuple(at.to_bytes(32, "big") for at in range(peers))
    entries = tuple(Contribution(peer, _NUMBER, _NUMBER, _ID) for peer in ids)
    lives = bytes(LIFE * peers)
    proposal = Proposal(
        _NUMBER, 0, ballot, ids, ids, entries, (), None, (), lives=lives, electorate=_ID, seal=bytes(64)
    )
    commit = compact(Commit(proposal, _ID, tuple(Proof(peer, bytes(64)) for peer in ids[: peers // 2 + 1])))
    vote = wire(Vote(_NUMBER, 0, ballot, _ID, _ID))
    spans = (Span(bytes(SPAN_PREFIX), 100, 0),) * min(MAX_SPANS, peers - 1)
    mean = most = scatter = last = 0.0
    ready = record = 0
    for cut in fragments:
        count = len(cut)
        chunk, result = _of_data(cut, codec)
        # Some peers own one chunk more than others: probability that one of the slowest is among them.
        odd = count % peers
        owned = count // peers + 1 - comb(peers - slow, odd) / comb(peers, odd)
        mean += (count * (peers - 1) / peers) * (chunk + result)
        most += (count - owned) * chunk + owned * (peers - 1) * result
        scatter += (count - owned) * chunk
        last = (peers - 1) * result
        ready += wire(Ready(_NUMBER, 0, _NUMBER, _ID, _ID, _NUMBER, bytes(32 * count), True, 0.0, 0.0, spans=spans))
        mine = tuple(range(500, 500 + -(-count // peers)))
        record += wire(ResultRecord(_NUMBER, 0, ballot, mine, bytes(32 * len(mine))))
    led = len(fragments) * (wire(Propose(proposal)) + wire(commit))
    return _Sizes(mean, most, scatter, last, ready, record, vote * len(fragments), led)


def wire(message: Message) -> int:
    """Return the bytes of a message's frame without its payload."""
    return HEADER_BYTES + len(wire_form.encode(message)) + (SIGNATURE_BYTES if message.signed else 0)
