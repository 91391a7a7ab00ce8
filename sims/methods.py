"""Ways to train together, as a plan compares them: what one exchange moves, how long it takes, how much peers compute.

"DiLoCo" and "gossip" come from `roundtime` and `pairtime`, the rounds of this version to the message. The others are estimates:
bytes over the slowest link that they meet, latencies, and the lanes of `utilisation` where computing hides the exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from thinwire.collectives import handing
from thinwire.collectives.allotment import Load
from thinwire.compression.registry import dense as dense_codec
from thinwire.sims.costs import SPARSE_BITS, butterfly_bytes, gather_bytes, sieve_bytes
from thinwire.sims.pairtime import pair_time
from thinwire.sims.question import Question
from thinwire.sims.roundtime import Place, RoundTime, round_time
from thinwire.sims.utilisation import FRAGMENT, Schedule, Workload, utilisation

KEPT = 64
"""Values of 4096 that a sparse exchange sends."""

SUMMED = 384
"""And where chunks have owners, those that an owner sends of the sum."""

HOPS = 6
"""Latencies of a round that wait for each other: Ready, Open, Chunk, Result, Vote, Commit."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train.

    `trust`: the largest H with which it is known to train well (published; 0: it has none). `moved`: bytes per peer and
    direction of one exchange; `seconds` that the network needs for it; `memory`: bytes of a peer beyond model and inner
    optimizer; `busy(H)`: the fraction of the time that peers compute. `here`: whether this version can do it.
    """

    name: str
    about: str
    trust: int
    moved: float
    seconds: float
    memory: float
    busy: Callable[[int], float]
    here: bool = False


def methods(question: Question) -> list[Method]:
    """All of them, the plainest first."""
    return [
        _data_parallel(question),
        _diloco(question),
        _streaming(question, 0),
        _streaming(question, 1),
        _eager(question),
        _sparse(question),
        _gossip(question),
    ]


def bits(question: Question, codec: str = "") -> float:
    """Bits per parameter on the wire with the question's codec, or another."""
    found = dense_codec(codec or question.codec)
    return 8 * found.nbytes(1 << 19) / (1 << 19)


def pair_bits(question: Question) -> float:
    """Bits per parameter that one of a pair sends: with a codec that loses something, two vectors."""
    return 8 * question.halves.nbytes(1 << 19) / (1 << 19)


def bits_both_ways(question: Question) -> dict[str, tuple[Schedule, float]]:
    """Name -> schedule and bits per parameter through a peer's link in each direction, over all of one exchange."""
    peers, every, dense = question.peers, question.every, bits(question)
    around = butterfly_bytes(8, 1, peers)
    return {
        "data parallel, fp32": (Schedule(), around * 32),
        "DiLoCo": (Schedule(every), around * dense),
        "streaming": (Schedule(every, streaming=True), around * dense),
        "streaming, overlapped": (Schedule(every, streaming=True, overlap=1), around * dense),
        "sparse": (Schedule(every), _sparse_bytes(8, peers)[0]),
        "gossip": (Schedule(every), (question.group - 1) * pair_bits(question)),
    }


def rounds(question: Question, every: int, topology: str = "") -> RoundTime:
    """The round of this version with H = `every`, in the question's topology or another."""
    places = [
        Place(machine.down, machine.up, every * machine.step)
        for machine in question.machines
        for _ in range(machine.count)
    ]
    return round_time(
        question.parameters,
        dense_codec(question.codec),
        places,
        question.latency,
        grace=question.grace,
        quorum=question.quorum,
        sized=question.sized,
        topology=topology or question.topology,
    )


def pair_rounds(question: Question, every: int) -> RoundTime:
    """The round of pairs of this version with H = `every`."""
    kinds = [(machine.count, Place(machine.down, machine.up, every * machine.step)) for machine in question.machines]
    return pair_time(question.parameters, question.halves, kinds, question.latency, question.group)


def _slowest(question: Question) -> float:
    """Bytes/s of the slowest uplink or downlink."""
    return min(min(machine.down, machine.up) for machine in question.machines)


def _steps(question: Question) -> tuple[float, float]:
    """Seconds of an inner step: the mean, and the slowest, for which everybody waits."""
    total = sum(machine.count * machine.step for machine in question.machines)
    return total / question.peers, max(machine.step for machine in question.machines)


def _lanes(question: Question, schedule: Schedule, seconds: float) -> float:
    """Utilisation where a full exchange needs `seconds` of the network."""
    mean, slowest = _steps(question)
    work = Workload(question.parameters, question.layers, slowest)
    transfer = np.array([seconds / question.layers])
    return float(utilisation(work, schedule, transfer, HOPS * question.latency)[0]) * mean / slowest


def _blocking(question: Question, seconds: float) -> Callable[[int], float]:
    mean, slowest = _steps(question)
    return lambda every: every * mean / (every * slowest + seconds)


def _data_parallel(question: Question) -> Method:
    moved = butterfly_bytes(question.parameters, 32, question.peers)
    seconds = moved / _slowest(question)
    return Method(
        "data parallel, fp32",
        "gradients after every step",
        1,
        moved,
        seconds + HOPS * question.latency,
        4.0 * question.parameters,
        lambda every: _lanes(question, Schedule(), seconds),
    )


def _diloco(question: Question) -> Method:
    once = rounds(question, question.every)
    payload = question.parameters * bits(question) / 8
    return Method(
        "DiLoCo",
        "pseudo-gradients after H steps, everyone waits",
        500,
        once.sent,
        once.exchange,
        8.0 * question.parameters + 3 * payload,
        lambda every: rounds(question, every).busy,
        here=True,
    )


def _streaming(question: Question, overlap: int) -> Method:
    moved = butterfly_bytes(question.parameters, bits(question), question.peers)
    seconds = moved / _slowest(question)
    fragments = -(-question.layers // FRAGMENT)
    return Method(
        "streaming, overlapped" if overlap else "streaming",
        (f"{fragments} parts one by one" if fragments > 1 else "one part")
        + (", results are needed a step later" if overlap else ""),
        100,
        moved,
        seconds + HOPS * question.latency,
        8.0 * question.parameters + 3 * question.parameters * bits(question) / 8 / fragments,
        lambda every: _lanes(question, Schedule(every, True, overlap), seconds),
        here=True,
    )


def _eager(question: Question) -> Method:
    """All of the next round's steps hide the exchange; the slowest sets the pace, or the network does."""
    once = rounds(question, question.every)
    payload = question.parameters * bits(question) / 8
    mean, slowest = _steps(question)
    return Method(
        "eager",
        "results are needed H steps later, and each puts in its own newest work",
        30,
        once.sent,
        once.exchange,
        24.0 * question.parameters + 3 * payload,
        lambda every: every * mean / max(every * slowest, once.exchange),
        here=True,
    )


def _sparse_bytes(parameters: float, peers: int) -> tuple[float, bool]:
    """Bytes of a sparse exchange, and whether everyone gets everything: cheap among few peers only."""
    gather, owners = gather_bytes(parameters, SPARSE_BITS[KEPT], peers), sieve_bytes(parameters, KEPT, SUMMED, peers)
    return (gather, True) if gather <= owners else (owners, False)


def _sparse(question: Question) -> Method:
    """Payloads are handed on by those whose uplinks have room (see `handing`)."""
    peers, payload = question.peers, question.parameters * SPARSE_BITS[KEPT] / 8
    moved, gather = _sparse_bytes(question.parameters, peers)
    seconds = moved / _slowest(question)
    if gather:
        down = min(machine.down for machine in question.machines)
        seconds = max(moved / down, payload * _uplinks(question))
    seconds += HOPS * question.latency
    return Method(
        "sparse",
        f"{KEPT} of 4096 values, " + ("everyone's to everyone" if gather else "summed and thinned out again by owners"),
        250,
        moved,
        seconds,
        8.0 * question.parameters + (peers if gather else 7) * payload,
        _blocking(question, seconds),
        here=True,
    )


def _uplinks(question: Question) -> float:
    """Seconds for each byte of a payload until all uplinks have carried what is theirs in a gather."""
    ups = [int(machine.up) for machine in question.machines for _ in range(machine.count)]
    everyone = [True] * len(ups)
    handed = bool(handing.shares([Load(up, up) for up in ups]))
    return max(handing.seconds(ups, everyone, handing.deal(ups, everyone, everyone) if handed else [{} for _ in ups]))


def _gossip(question: Question) -> Method:
    """Random pairs or groups; nobody waits for a third."""
    once, group = pair_rounds(question, question.every), question.group
    payload = question.parameters * pair_bits(question) / 8
    who = "pairs" if group == 2 else f"groups of {group}"
    return Method(
        "gossip",
        f"NoLoCo: random {who}, no barrier, replicas stay a little apart",
        100,
        once.sent,
        once.exchange,
        (8.0 if question.halves.exact else 12.0) * question.parameters + group * payload,
        lambda every: pair_rounds(question, every).busy,
        here=True,
    )
