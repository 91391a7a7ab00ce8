"""`thinwire plan`: what a swarm would move, how long its rounds would take and which way to train suits it, beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from thinwire.collectives.shards import Sized
from thinwire.compression.registry import dense as dense_codec
from thinwire.sims.methods import Method, bits, bits_both_ways, methods, pair_bits, pair_rounds, rounds
from thinwire.sims.pipelines import Pipeline, pipeline
from thinwire.sims.question import PlanError, Question
from thinwire.sims.roundtime import grids, largest_fragment
from thinwire.sims.sites import Sites, sites
from thinwire.sims.utilisation import Workload, needed, utilisation
from thinwire.swarm.protocol import MAX_GROUP

TARGETS = (0.8, 0.9, 0.95, 0.99)
WANTED = 0.9
"""The utilisation that a method should reach to be the best."""

LADDER = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, 5000)
"""The H that are tried."""

MBITS = np.logspace(-1, 6, 176)
"""The bandwidths that are tried, Mbit/s: 25 to the decade."""


class Row(msgspec.Struct, frozen=True):
    """One method: bytes per peer and direction of an exchange, seconds, utilisation with the H asked for, memory of a peer in
    all, and for each target the smallest H that reaches it (None: none does).
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


class Round(msgspec.Struct, frozen=True):
    """The round of this version: seconds computing, agreeing and moving data; bytes sent and received per peer."""

    computing: float
    agreement: float
    data: float
    sent: float
    received: float
    chunks: int
    fragments: int
    late: int
    utilisation: float


class Memory(msgspec.Struct, frozen=True):
    """Bytes of a peer in rounds of this version, activations left out: parameters, gradients and moments; what rounds add."""

    model: float
    rounds: float


class Need(msgspec.Struct, frozen=True):
    """Mbit/s each way, of every peer, with which a method reaches the targets (None: no bandwidth does, latency binds)."""

    method: str
    every: int
    mbits: tuple[float | None, ...]


class Best(msgspec.Struct, frozen=True):
    """What to do: a method, an H, the utilisation it gives, and why."""

    method: str
    every: int
    utilisation: float
    why: str


class Plan(msgspec.Struct, frozen=True):
    """The answer. `bits`: of one parameter with the codec asked for. Utilisations are fractions, sizes bytes, times seconds."""

    question: Question
    bits: float
    round: Round
    memory: Memory
    targets: tuple[float, ...]
    methods: tuple[Row, ...]
    best: Best
    best_here: Best
    needs: tuple[Need, ...]
    pipeline: Pipeline | None
    notes: tuple[str, ...]
    sites: Sites | None = None


def plan(question: Question) -> Plan:
    """Work it all out. Raises PlanError."""
    if question.peers < 2:
        raise PlanError("one peer has nobody to exchange with", "give --peers 2 or more")
    model = question.parameters * 4.0 * (2 + question.moments)
    found = methods(question)
    rows = tuple(_row(question, method, model) for method in found)
    paired = question.method == "noloco"
    now = (pair_rounds if paired else rounds)(question, question.every)
    how = _sized(question)
    cut = grids(question.parameters, how)
    held = next(row.memory for row in rows if row.method == ("gossip" if paired else "DiLoCo"))
    chain = pipeline(question, held)
    return Plan(
        question=question,
        bits=pair_bits(question) if paired else bits(question),
        round=Round(
            now.waiting,
            now.agreement,
            now.data,
            now.sent,
            now.received,
            sum(map(len, cut)),
            len(cut),
            now.late,
            now.busy,
        ),
        memory=Memory(model, held - model),
        targets=TARGETS,
        methods=rows,
        best=_best(question, found, rows, chain),
        best_here=_best(question, [m for m in found if m.here], [row for row in rows if row.here], None),
        needs=_needs(question),
        pipeline=chain,
        notes=tuple(_notes(question, now.late, len(cut), held, chain)),
        sites=_sites(question),
    )


def _sites(question: Question) -> Sites | None:
    """What a round moves through the lines that peers share; of pairs there is nothing to choose."""
    line = question.line
    if line is None or question.method == "noloco":
        return None
    nbytes = bits(question) * question.parameters / 8
    own = min(min(machine.down, machine.up) for machine in question.machines)
    return sites(nbytes, question.peers, line.count, (line.down, line.up), own, question.latency)


def _sized(question: Question) -> Sized:
    """What the chunks of the manifest's method are encoded with."""
    return question.halves if question.method == "noloco" else dense_codec(question.codec)


def _row(question: Question, method: Method, model: float) -> Row:
    every = min(question.every, method.trust) if method.trust == 1 else question.every
    by_h = [(h, method.busy(h)) for h in LADDER if method.trust > 1 or h == 1]
    reaching = tuple(next((h for h, busy in by_h if busy >= target), None) for target in TARGETS)
    return Row(
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


def _best(question: Question, found: Sequence[Method], rows: Sequence[Row], chain: Pipeline | None) -> Best:
    """The plainest method that computes enough with an H it is known to train well with; else what computes most.

    Of those that a peer has the memory for. Where there are none it is the one that needs least, and `why` says so.
    """
    fits = [row for row in rows if not question.memory or row.memory <= question.memory]
    if not fits and chain is not None:
        return Best(
            f"pipeline of {chain.stages} stages, {chain.best.name}",
            question.every,
            chain.best.utilisation,
            f"the model does not fit one peer; {chain.stages} hold it together",
        )
    if not fits:
        least = min(rows, key=lambda row: row.memory)
        room, taken = question.memory / (1 << 30), least.memory / (1 << 30)
        why = f"none of them fits into {room:.3g} GiB; this one needs least, {taken:.3g} GiB"
        return Best(least.method, least.every, least.utilisation, why)
    at = TARGETS.index(WANTED)
    trust = {method.name: method.trust for method in found}
    for row in fits:
        every = row.reaching[at]
        if every is not None and every <= trust[row.method]:
            busy = next(method for method in found if method.name == row.method).busy(every)
            return Best(row.method, every, busy, f"the plainest that computes {100 * WANTED:.0f} % of the time")
    names = {row.method for row in fits}
    able = [(method, method.busy(method.trust)) for method in found if method.name in names]
    most = max(able, key=lambda pair: pair[1])
    why = f"nothing computes {100 * WANTED:.0f} % of the time with an H known to train well; this computes most"
    return Best(most[0].name, most[0].trust, most[1], why)


def _needs(question: Question) -> tuple[Need, ...]:
    """The model of published tables, with this swarm's bytes and latency."""
    step = max(machine.step for machine in question.machines)
    work = Workload(question.parameters, question.layers, step)
    result = []
    for name, (schedule, both_ways) in bits_both_ways(question).items():
        transfer = question.parameters / question.layers * both_ways / (MBITS * 1e6)
        latency = (3 if name == "gossip" else 6) * question.latency
        result.append(
            Need(name, schedule.every, tuple(needed(utilisation(work, schedule, transfer, latency), MBITS, TARGETS)))
        )
    return tuple(result)


def _ways(question: Question) -> str:
    """The topologies of a dense round beside each other."""
    straight, ring = (rounds(question, question.every, topology).data for topology in ("butterfly", "ring"))
    if ring <= straight:
        return f"as a ring the data would take {ring:.3g} s, with owners {straight:.3g} s: exchange.topology = 'ring' suits"
    hops = 2 * (question.peers - 1)
    return (
        f"as a ring the data would take {ring:.3g} s ({hops} hops), with owners {straight:.3g} s: a ring is for "
        "swarms in which some pairs of peers have much slower links than others"
    )


def _notes(question: Question, late: int, fragments: int, held: float, chain: Pipeline | None) -> list[str]:
    notes = [f"assumed: {text}" for text in question.assumed]
    if question.method != "noloco":
        sized, equal = (rounds(msgspec.structs.replace(question, sized=how), question.every) for how in (True, False))
        if sized.exchange < 0.95 * equal.exchange:
            takes = "takes" if question.sized else "of a plain butterfly would take"
            ways = f"{sized.exchange:.3g} s with chunks dealt out by bandwidth, {equal.exchange:.3g} s with equal parts"
            notes.append(f"an exchange {takes} {ways}")
    if late:
        notes.append(
            f"{late} peers are so slow that rounds would go on without them {question.grace:g} s after the others: "
            "raise exchange.grace, or lower outer.steps"
        )
    if fragments > 1:
        most = largest_fragment(_sized(question))
        notes.append(f"this version averages at most {most:,} parameters at once; this model needs {fragments} parts")
    if question.peers > MAX_GROUP and question.method != "noloco":
        notes.append(f"this version has at most {MAX_GROUP} peers in a round: more need gossip (outer.method noloco)")
    if question.method != "noloco":
        notes.append(_ways(question))
    if question.memory and held > question.memory:
        help_ = f"; {chain.stages} in a pipeline would" if chain else ""
        notes.append(f"one peer cannot hold the model, its optimizer and a round{help_}")
    if chain is None:
        notes.append("pipelines are left out: --tokens is not known, or there are not enough layers or peers")
    return notes
