"""Training methods as a plan compares them: traffic and time of an exchange, utilisation of the peers.

"diloco" and "noloco" come from `round_time` and `gossip_time`, exact to the message for this version. The others are
estimates: bytes over the slowest link involved, latencies, and the simulation of `utilisation` if computing hides the
exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from thinwire.collectives.costs.cost_question import Question
from thinwire.collectives.costs.exchange_bytes import (
    SPARSE_BITS,
    butterfly_bytes,
    gather_bytes,
    sparse_butterfly_bytes,
)
from thinwire.collectives.costs.gossip_time import pair_time, usual_bytes
from thinwire.collectives.costs.round_time import PlannedPeer, RoundTime, round_time
from thinwire.collectives.costs.utilisation import FRAGMENT, ExchangeSchedule, TrainingWorkload, utilisation
from thinwire.collectives.gossip.owner_group import MESH
from thinwire.collectives.gossip.pair_codec import PairCodec
from thinwire.collectives.topology import relay_plan
from thinwire.collectives.topology.bandwidth_shares import PeerLoad
from thinwire.compression.registry import dense as dense_codec
from thinwire.swarm.choices import Topology

KEPT = 64
"""Number of values of 4096 that a sparse exchange sends."""

SUMMED = 384
"""Number of values of 4096 of the sum that an owner sends in a sparse butterfly."""

HOPS = 6
"""Consecutive one-way latencies of a round: Ready, Propose, Chunk, Result, Vote, Commit."""


@dataclass(frozen=True, slots=True)
class MethodCosts:
    """One training method.

    trust: the largest H with which it is known to train well (published; 0: unknown). moved: bytes per peer and
    direction of one exchange. seconds: time that the network needs for it. memory: bytes of a peer in addition to model
    and inner optimizer. busy(H): fraction of the time that peers compute. here: this version implements it.
    """

    name: str
    about: str
    trust: int
    moved: float
    seconds: float
    memory: float
    busy: Callable[[int], float]
    here: bool = False


def methods(question: Question) -> list[MethodCosts]:
    """Return all methods, simplest first."""
    return [
        _data_parallel(question),
        _diloco(question),
        _streaming(question, 0),
        _streaming(question, 1),
        _eager(question),
        _sparse(question),
        *([_powersgd(question)] if question.row == "powersgd" else []),
        _gossip(question),
    ]


def row_of(question: Question, found: list[MethodCosts]) -> MethodCosts:
    """Return the costs of the manifest's method; for asynchronous ones those of a round with all peers."""
    name = f"streaming, overlap {int(question.hidden)}" if question.row == "streaming" else question.row
    return next(method for method in found if method.name == name)


def bits(question: Question, codec: str = "") -> float:
    """Return the bits per parameter on the wire with the question's codec, or another."""
    found = dense_codec(codec or question.codec)
    return 8 * found.nbytes(1 << 19) / (1 << 19)


def pair_bits(question: Question) -> float:
    """Return the bits per parameter that one partner of a pair sends: two vectors for a lossy codec."""
    return sum(_pair_bits(question.codecs))


def _pair_bits(how: PairCodec) -> tuple[float, float]:
    """Return the bits per parameter of Δ and of the slow weights, the mean of a round's part."""
    slow = 8 * how.slow.nbytes(1 << 19) / (1 << 19) / how.parts if how.slow is not None else 0.0
    return 8 * usual_bytes(how.fast, 1 << 19) / (1 << 19), slow


def gossip_bits(question: Question) -> float:
    """Return the bits per parameter that a peer sends in a round: its contributions, and means."""
    how, size = question.codecs, min(question.group, question.peers)
    fast, slow = _pair_bits(how)
    if question.group <= MESH:
        return (size - 1) * (fast + slow)
    owned = butterfly_bytes(1, 8, size)
    return (owned if how.averaged else size - 1) * fast + owned * slow


def bits_both_ways(question: Question) -> dict[str, tuple[ExchangeSchedule, float]]:
    """Return schedule and bits per parameter in each direction of one exchange, by method name."""
    peers, every, dense = question.peers, question.every, bits(question)
    around = butterfly_bytes(8, 1, peers)
    return {
        "data parallel, fp32": (ExchangeSchedule(), around * 32),
        "diloco": (ExchangeSchedule(every), around * dense),
        "streaming, overlap 0": (ExchangeSchedule(every, streaming=True), around * dense),
        "streaming, overlap 1": (ExchangeSchedule(every, streaming=True, overlap=1), around * dense),
        "sparseloco": (ExchangeSchedule(every), _sparse_bytes(8, peers, _kept_bits(question))[0]),
        "noloco": (ExchangeSchedule(every), gossip_bits(question)),
    }


def rounds(question: Question, every: int, topology: Topology | None = None) -> RoundTime:
    """Return the round of this version with H = `every`, in the question's topology or another."""
    places = [
        PlannedPeer(machine.down, machine.up, every * machine.step)
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
    """Return the round of pairs of this version with H = `every`."""
    kinds = [
        (machine.count, PlannedPeer(machine.down, machine.up, every * machine.step)) for machine in question.machines
    ]
    return pair_time(question.parameters, question.codecs, kinds, question.latency, question.group)


def _slowest(question: Question) -> float:
    """Return the rate of the slowest uplink or downlink in bytes/s."""
    return min(min(machine.down, machine.up) for machine in question.machines)


def _steps(question: Question) -> tuple[float, float]:
    """Return the seconds of an inner step: the mean, and the slowest, for which all peers wait."""
    total = sum(machine.count * machine.step for machine in question.machines)
    return total / question.peers, max(machine.step for machine in question.machines)


def _overlapped(question: Question, schedule: ExchangeSchedule, seconds: float) -> float:
    """Return the utilisation if a full exchange needs `seconds` of the network while computing continues."""
    mean, slowest = _steps(question)
    work = TrainingWorkload(question.parameters, question.layers, slowest)
    transfer = np.array([seconds / question.layers])
    return float(utilisation(work, schedule, transfer, HOPS * question.latency)[0]) * mean / slowest


def _blocking(question: Question, seconds: float) -> Callable[[int], float]:
    mean, slowest = _steps(question)
    return lambda every: every * mean / (every * slowest + seconds)


def _data_parallel(question: Question) -> MethodCosts:
    moved = butterfly_bytes(question.parameters, 32, question.peers)
    seconds = moved / _slowest(question)
    return MethodCosts(
        "data parallel, fp32",
        "gradients after every step",
        1,
        moved,
        seconds + HOPS * question.latency,
        4.0 * question.parameters,
        lambda every: _overlapped(question, ExchangeSchedule(), seconds),
    )


def _diloco(question: Question) -> MethodCosts:
    once = rounds(question, question.every)
    payload = question.parameters * bits(question) / 8
    return MethodCosts(
        "diloco",
        "pseudo-gradients after H steps, everyone waits",
        500,
        once.sent,
        once.exchange,
        8.0 * question.parameters + 3 * payload,
        lambda every: rounds(question, every).busy,
        here=True,
    )


def _streaming(question: Question, overlap: int) -> MethodCosts:
    moved = butterfly_bytes(question.parameters, bits(question), question.peers)
    seconds = moved / _slowest(question)
    fragments = -(-question.layers // FRAGMENT)
    return MethodCosts(
        f"streaming, overlap {overlap}",
        (f"{fragments} parts one by one" if fragments > 1 else "one part")
        + (", results are needed a step later" if overlap else ""),
        100,
        moved,
        seconds + HOPS * question.latency,
        8.0 * question.parameters + 3 * question.parameters * bits(question) / 8 / fragments,
        lambda every: _overlapped(question, ExchangeSchedule(every, True, overlap), seconds),
        here=True,
    )


def _eager(question: Question) -> MethodCosts:
    """Return the eager method: the inner steps of the next round hide the exchange.

    The pace is that of the slowest peer or of the network.
    """
    once = rounds(question, question.every)
    payload = question.parameters * bits(question) / 8
    mean, slowest = _steps(question)
    return MethodCosts(
        "eager",
        "results are needed H steps later, and each puts in its own newest work",
        30,
        once.sent,
        once.exchange,
        24.0 * question.parameters + 3 * payload,
        lambda every: every * mean / max(every * slowest, once.exchange),
        here=True,
    )


def _kept_bits(question: Question) -> float:
    """Return the bits per parameter of a sparse contribution, with the manifest's codec or a usual one."""
    return question.own_bits if question.row == "sparseloco" else SPARSE_BITS[KEPT]


def _sparse_bytes(parameters: float, peers: int, bits: float) -> tuple[float, bool]:
    """Return the bytes of a sparse exchange, and whether it is an all-gather, cheap for few peers only."""
    gather = gather_bytes(parameters, bits, peers)
    owners = sparse_butterfly_bytes(parameters, bits, SPARSE_BITS[SUMMED], peers)
    return (gather, True) if gather <= owners else (owners, False)


def _sparse(question: Question) -> MethodCosts:
    """Return the sparse method. Peers whose uplinks have spare capacity relay payloads (see `relay_plan`)."""
    peers, payload = question.peers, question.parameters * _kept_bits(question) / 8
    moved, gather = _sparse_bytes(question.parameters, peers, _kept_bits(question))
    seconds = moved / _slowest(question)
    if gather:
        down = min(machine.down for machine in question.machines)
        seconds = max(moved / down, payload * _uplinks(question))
    seconds += HOPS * question.latency
    return MethodCosts(
        "sparseloco",
        (question.own_codec or f"{KEPT} of 4096 values")
        + (", everyone's to everyone" if gather else ", summed and sparsified again by owners"),
        250,
        moved,
        seconds,
        8.0 * question.parameters + (peers if gather else 7) * payload,
        _blocking(question, seconds),
        here=True,
    )


def _powersgd(question: Question) -> MethodCosts:
    """Return PowerSGD: two butterflies one after the other, of the two factors of each matrix."""
    moved = butterfly_bytes(question.parameters, question.own_bits, question.peers)
    seconds = moved / _slowest(question) + 2 * HOPS * question.latency
    return MethodCosts(
        "powersgd",
        f"{question.own_codec} of matrices as wide as the model",
        0,
        moved,
        seconds,
        12.0 * question.parameters,
        _blocking(question, seconds),
        here=True,
    )


def _uplinks(question: Question) -> float:
    """Return the seconds per byte of a payload until all uplinks have carried their part of an all-gather."""
    ups = [int(machine.up) for machine in question.machines for _ in range(machine.count)]
    everyone = [True] * len(ups)
    handed = bool(relay_plan.shares([PeerLoad(up, up) for up in ups]))
    return max(
        relay_plan.seconds(ups, everyone, relay_plan.deal(ups, everyone, everyone) if handed else [{} for _ in ups])
    )


def _gossip(question: Question) -> MethodCosts:
    """Return the gossip method: random pairs or groups, in which peers wait for their partners only."""
    once, group = pair_rounds(question, question.every), question.group
    data = question.parameters * (pair_bits(question) + gossip_bits(question)) / 8
    who = "pairs" if group == 2 else f"groups of {group}"
    return MethodCosts(
        "noloco",
        f"random {who}, no barrier, replicas stay a little apart",
        100,
        once.sent,
        once.exchange,
        (8.0 if question.codecs.exact else 12.0) * question.parameters + data,
        lambda every: pair_rounds(question, every).busy,
        here=True,
    )
