"""`thinwire plan`: predicts the traffic, round times and best training method of a swarm."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from thinwire.collectives.costs.cost_question import PlanError, Question
from thinwire.collectives.costs.method_costs import (
    MethodCosts,
    bits,
    bits_both_ways,
    methods,
    pair_bits,
    rounds,
    row_of,
)
from thinwire.collectives.costs.round_costs import RoundCosts, round_costs
from thinwire.collectives.costs.round_time import grids, largest_fragment
from thinwire.collectives.costs.utilisation import TrainingWorkload, needed, utilisation
from thinwire.collectives.topology.shards import Sized
from thinwire.compression.registry import dense as dense_codec
from thinwire.sims.planner.pipeline_costs import PipelineCosts, pipeline
from thinwire.sims.planner.site_bytes import SiteBytes, sites
from thinwire.swarm.messages.registry import MAX_GROUP
from thinwire.swarm.method_specs.registry import METHODS

TARGETS = (0.8, 0.9, 0.95, 0.99)
WANTED = 0.9
"""Utilisation that a method should reach to be recommended."""

LADDER = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, 5000)
"""Values of H that are tried."""

ALIKE = 0.05
"""Times that differ by less than this fraction count as equal: the model is no more exact."""

MBITS = np.logspace(-1, 6, 176)
"""Bandwidths that are tried, in Mbit/s: 25 per decade."""


class MethodRow(msgspec.Struct, frozen=True):
    """Result for one method.

    moved: bytes per peer and direction of an exchange. seconds: time of an exchange. utilisation: with the requested H.
    memory: total bytes of a peer. reaching: for each target the smallest H that reaches it (None: no H does).
    """

    method: str
    about: str
    here: bool
    every: int
    moved: float
    seconds: float
    utilisation: float
    memory: float
    reaching: tuple[int | None, ...]


class Memory(msgspec.Struct, frozen=True):
    """Memory of a peer in rounds of this version in bytes, without activations.

    model: parameters, gradients and moments. rounds: addition by rounds. copy: addition by a checkpoint that is being
    written, at most; nothing is copied on a machine with less than twice that left.
    """

    model: float
    rounds: float
    copy: float


class BandwidthNeed(msgspec.Struct, frozen=True):
    """Bandwidth of every peer in each direction, in Mbit/s, with which a method reaches the targets.

    None: no bandwidth does, because latency is the limit.
    """

    method: str
    every: int
    mbits: tuple[float | None, ...]


class Recommendation(msgspec.Struct, frozen=True):
    """Recommendation: a method, an H, the resulting utilisation, and the reason."""

    method: str
    every: int
    utilisation: float
    why: str


class Plan(msgspec.Struct, frozen=True):
    """Answer to a Question. Utilisations are fractions, sizes are in bytes, times in seconds.

    bits: bits per parameter with the requested codec. best: recommendation among all methods; best_here: among those of
    this version.
    """

    question: Question
    bits: float
    round: RoundCosts
    memory: Memory
    targets: tuple[float, ...]
    methods: tuple[MethodRow, ...]
    best: Recommendation
    best_here: Recommendation
    needs: tuple[BandwidthNeed, ...]
    pipeline: PipelineCosts | None
    notes: tuple[str, ...]
    sites: SiteBytes | None = None


def plan(question: Question) -> Plan:
    """Compute the plan. Raises PlanError."""
    if question.peers < 2:
        raise PlanError("one peer has no partner to exchange with", "give --peers 2 or more")
    model = question.parameters * 4.0 * (2 + question.moments) + question.frozen * 4.0
    found = methods(question)
    rows = tuple(_row(question, method, model) for method in found)
    paired, own = question.paired, row_of(question, found)
    cut = grids(question.parameters, _sized(question))
    round = round_costs(question, own, chunks=sum(map(len, cut)), fragments=len(cut))
    held = model + own.memory
    chain = pipeline(question, held)
    return Plan(
        question=question,
        bits=pair_bits(question) if paired else question.own_bits or bits(question),
        round=round,
        memory=Memory(model, held - model, question.parameters * 4.0 * (2 + question.moments)),
        targets=TARGETS,
        methods=rows,
        best=_best(question, found, rows, chain),
        best_here=_best(question, [m for m in found if m.here], [row for row in rows if row.here], None),
        needs=_needs(question),
        pipeline=chain,
        notes=tuple(_notes(question, round.late, len(cut), held, chain)),
        sites=_sites(question),
    )


def _sites(question: Question) -> SiteBytes | None:
    """Return the traffic through lines that peers share; None for pairs, which have no choice of topology."""
    line = question.line
    if line is None or question.paired:
        return None
    nbytes = bits(question) * question.parameters / 8
    own = min(min(machine.down, machine.up) for machine in question.machines)
    return sites(nbytes, question.peers, line.count, (line.down, line.up), own, question.latency)


def _sized(question: Question) -> Sized:
    """Return the codec of the chunks with the manifest's method."""
    return question.codecs if question.paired else dense_codec(question.codec)


def _row(question: Question, method: MethodCosts, model: float) -> MethodRow:
    every = min(question.every, method.trust) if method.trust == 1 else question.every
    by_h = [(h, method.busy(h)) for h in LADDER if method.trust > 1 or h == 1]
    reaching = tuple(next((h for h, busy in by_h if busy >= target), None) for target in TARGETS)
    return MethodRow(
        method.name,
        method.about,
        method.here,
        every,
        method.moved,
        method.seconds,
        method.busy(every),
        model + method.memory,
        reaching,
    )


def _best(
    question: Question, found: Sequence[MethodCosts], rows: Sequence[MethodRow], chain: PipelineCosts | None
) -> Recommendation:
    """Return the simplest method that computes enough with an H known to train well, else the busiest one.

    Only methods that fit into a peer's memory are considered. If none fits, the one that needs least is returned, and
    `why` has the reason.
    """
    fits = [row for row in rows if not question.memory or row.memory <= question.memory]
    if not fits and chain is not None:
        return Recommendation(
            f"pipeline of {chain.stages} stages, {chain.best.name}",
            question.every,
            chain.best.utilisation,
            f"the model does not fit one peer; {chain.stages} hold it together",
        )
    if not fits:
        least = min(rows, key=lambda row: row.memory)
        room, taken = question.memory / (1 << 30), least.memory / (1 << 30)
        why = f"no method fits into {room:.3g} GiB; this one needs least, {taken:.3g} GiB"
        return Recommendation(least.method, least.every, least.utilisation, why)
    at = TARGETS.index(WANTED)
    trust = {method.name: method.trust for method in found}
    for row in fits:
        every = row.reaching[at]
        if every is not None and every <= trust[row.method]:
            busy = next(method for method in found if method.name == row.method).busy(every)
            return Recommendation(
                row.method, every, busy, f"the simplest method that computes {100 * WANTED:.0f} % of the time"
            )
    names = {row.method for row in fits}
    able = [(method, method.busy(method.trust)) for method in found if method.name in names]
    most = max(able, key=lambda pair: pair[1])
    why = f"no method computes {100 * WANTED:.0f} % of the time with an H known to train well; this one computes most"
    return Recommendation(most[0].name, most[0].trust, most[1], why)


def _needs(question: Question) -> tuple[BandwidthNeed, ...]:
    """Return the bandwidths by the model of published tables, with this swarm's bytes and latency."""
    step = max(machine.step for machine in question.machines)
    work = TrainingWorkload(question.parameters, question.layers, step)
    result = []
    for name, (schedule, both_ways) in bits_both_ways(question).items():
        transfer = question.parameters / question.layers * both_ways / (MBITS * 1e6)
        latency = (3 if name == "noloco" else 6) * question.latency
        result.append(
            BandwidthNeed(
                name, schedule.every, tuple(needed(utilisation(work, schedule, transfer, latency), MBITS, TARGETS))
            )
        )
    return tuple(result)


def _topology_note(question: Question) -> str:
    """Compare the topologies of a dense round in a note."""
    straight, ring = (rounds(question, question.every, topology).data for topology in ("butterfly", "ring"))
    if abs(ring - straight) <= ALIKE * straight:
        return (
            f"as a ring the data would take as long as with owners, {straight:.3g} s: leave exchange.topology as it is"
        )
    if ring < straight:
        return f"as a ring the data would take {ring:.3g} s, with owners {straight:.3g} s: exchange.topology = 'ring' suits"
    hops = 2 * (question.peers - 1)
    return (
        f"as a ring the data would take {ring:.3g} s ({hops} hops), with owners {straight:.3g} s: a ring is for "
        "swarms in which some pairs of peers have much slower links than others"
    )


def _notes(question: Question, late: int, fragments: int, held: float, chain: PipelineCosts | None) -> list[str]:
    notes = [f"assumed: {text}" for text in question.assumed]
    dense = not question.paired and not question.own_bits
    if dense:
        sized, equal = (rounds(msgspec.structs.replace(question, sized=how), question.every) for how in (True, False))
        if sized.exchange < 0.95 * equal.exchange:
            takes = "takes" if question.sized else "of a plain butterfly would take"
            times = (
                f"{sized.exchange:.3g} s with chunks dealt out by bandwidth, {equal.exchange:.3g} s with equal parts"
            )
            notes.append(f"an exchange {takes} {times}")
    if late:
        notes.append(
            f"{late} peers are so slow that rounds would continue without them {question.grace:g} s after the others: "
            "raise exchange.straggler_timeout, or lower outer.sync_every"
        )
    if fragments > 1:
        most = largest_fragment(_sized(question))
        notes.append(f"this version averages at most {most:,} parameters at once; this model needs {fragments} parts")
    if question.peers > MAX_GROUP and not question.paired:
        notes.append(f'this version has at most {MAX_GROUP} peers in a round: more need outer.method = "noloco"')
    if dense:
        notes.append(_topology_note(question))
    if METHODS[question.method].asynchronous:
        notes.append("the round is one with all peers: asynchronous rounds, which wait for no peer, are not modelled")
    if question.memory and held > question.memory:
        help_ = f"; {chain.stages} in a pipeline would" if chain else ""
        notes.append(f"one peer cannot hold the model, its optimizer and a round{help_}")
    if chain is None:
        notes.append("pipelines are left out: --tokens is not known, or there are not enough layers or peers")
    return notes
