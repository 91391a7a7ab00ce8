"""Summary of a simulation in figures, computed from its journal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from thinwire.sims.results.journal import WORLD, Event, Journal
from thinwire.sims.scenario.scenario import Scenario

MODELLED = "model of a loss, no real training"
"""Description of the losses of a scenario with `compute = "stub"`."""


class ReportedViolation(Protocol):
    """Violation of an invariant, in virtual time (`Violation`) or in real time (`SeenViolation`)."""

    @property
    def at(self) -> float: ...
    @property
    def oracle(self) -> str: ...
    @property
    def peer(self) -> int: ...
    @property
    def detail(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PlayResult:
    """Data of a run. `level`: "L0" virtual time, "L1" proxies, "L2" namespaces. `seconds`: real ones.

    `trace`: hash of everything that happened in virtual time, "" in real time. `command`: the command that repeats the
    run. `finished`: False if it was interrupted.
    """

    level: str
    seconds: float
    trace: str = ""
    command: str = ""
    finished: bool = True
    violations: Sequence[ReportedViolation] = ()


def summarize(scenario: Scenario, journal: Journal, play: PlayResult) -> dict[str, Any]:
    """Return the summary as JSON values: times in scenario seconds, bytes as totals since a peer's start.

    "round_seconds" are between two commits, each counted when the first peer has it; "utilisation" is the fraction of
    their presence in which peers computed, without the computing of those in "never_contributed". "loss_unit": "nats per
    token", or MODELLED.
    """
    liars = {peer.index for peer in scenario.peers if peer.liar}
    commits = committed(journal)
    walls = list(commits.values())
    gaps = [b - a for a, b in zip(walls, walls[1:], strict=False)]
    losses = loss_by_round(journal, liars)
    totals = [pair for pair in carried(journal) if any(pair)]
    now = journal.now
    return {
        "scenario": scenario.name,
        "about": scenario.about,
        "level": play.level,
        "seed": scenario.seed,
        "peers": len(scenario.peers),
        "finished": play.finished,
        "seconds": round(now, 3),
        "real_seconds": round(play.seconds, 3),
        "factor": round(now / play.seconds, 2) if play.seconds > 0 else None,
        "trace": play.trace,
        "rounds": len(commits),
        "loss_first": _rounded(losses[0][1]) if losses else None,
        "loss_last": _rounded(losses[-1][1]) if losses else None,
        "loss_unit": loss_unit(scenario),
        "round_seconds": {"median": _rounded(quantile(gaps, 0.5)), "p95": _rounded(quantile(gaps, 0.95))},
        "sync_seconds": {
            name: _rounded(quantile([e.fields.get("sync_seconds", 0.0) for e in journal.of("round")], part))
            for name, part in (("median", 0.5), ("p95", 0.95))
        },
        "bytes_up": _spread([up for up, _ in totals]),
        "bytes_down": _spread([down for _, down in totals]),
        "utilisation": _rounded(utilisation(journal)),
        "never_contributed": [journal.names[index] for index in sorted(never_contributed(journal))],
        "membership": [
            {"at": round(e.at, 3), "peer": journal.names[e.peer], "change": e.name, **e.fields}
            for e in journal.events
            if e.name in ("up", "down") and e.peer != WORLD
        ],
        "faults": [{"at": round(e.at, 3), **e.fields} for e in journal.of("fault") if not e.fields.get("over")],
        "not_played": [{"at": round(e.at, 3), **e.fields} for e in journal.of("unplayed")],
        "violations": _violations(journal, play),
        "command": play.command,
    }


def _violations(journal: Journal, play: PlayResult) -> list[dict[str, Any]]:
    """Return the violations; of an interrupted run those up to the interruption."""
    seen = [(one.at, one.oracle, one.peer, one.detail) for one in play.violations]
    if not seen:
        seen = [(e.at, e.fields["oracle"], e.peer, e.fields["detail"]) for e in journal.of("violation")]
    return [{"at": round(at, 3), "oracle": name, "peer": peer, "detail": text} for at, name, peer, text in seen]


def committed(journal: Journal) -> dict[int, float]:
    """Return round -> time at which the first peer had applied it, in order of rounds."""
    first: dict[int, float] = {}
    for event in journal.of("round"):
        first.setdefault(event.fields["round"], event.at)
    return dict(sorted(first.items()))


def loss_unit(scenario: Scenario) -> str:
    """Return the unit of the losses of a scenario, or that a formula makes them."""
    return MODELLED if scenario.compute == "stub" else "nats per token"


def loss_of(event: Event) -> float | None:
    """Return the loss of a "round" event; None if the peer had made no step."""
    loss = event.fields.get("loss")
    return loss if isinstance(loss, float | int) and math.isfinite(loss) else None


def loss_by_round(journal: Journal, without: Iterable[int] = ()) -> list[tuple[float, float]]:
    """Return (time of the commit, mean loss of contributors) of each round, except peers in `without`."""
    losses: dict[int, list[float]] = {}
    left_out = set(without)
    for event in journal.of("round"):
        loss = loss_of(event)
        if loss is not None and event.peer not in left_out:
            losses.setdefault(event.fields["round"], []).append(loss)
    return [(at, statistics.fmean(losses[number])) for number, at in committed(journal).items() if number in losses]


def carried(journal: Journal) -> list[tuple[int, int]]:
    """Return the bytes that each peer has sent and received in all its processes, by index."""
    ended = [(0, 0)] * len(journal.names)
    before = [(0, 0)] * len(journal.names)
    for sample in journal.samples:
        for index, one in enumerate(sample.peers):
            now = (one.up, one.down) if one is not None else (0, 0)
            if now < before[index]:  # Another process counts from 0.
                ended[index] = (ended[index][0] + before[index][0], ended[index][1] + before[index][1])
            before[index] = now
    return [(old[0] + new[0], old[1] + new[1]) for old, new in zip(ended, before, strict=True)]


def never_contributed(journal: Journal) -> set[int]:
    """Return the peers that were present and whose work went into no round."""
    useful = {event.peer for event in journal.of("round") if event.fields.get("tokens", 1)}
    seen = {index for sample in journal.samples for index, one in enumerate(sample.peers) if one is not None}
    return seen - useful


def busy_parts(journal: Journal) -> list[tuple[float, list[float | None]]]:
    """Return (time of a sample, utilisation of each peer since the last one; None: absent).

    The computing of a peer that never contributed was useless, so it counts as 0.
    """
    useless = never_contributed(journal)
    parts: list[tuple[float, list[float | None]]] = []
    for before, after in zip(journal.samples, journal.samples[1:], strict=False):
        seconds = after.at - before.at
        row: list[float | None] = []
        for index, (old, new) in enumerate(zip(before.peers, after.peers, strict=True)):
            there = old is not None and new is not None and new.busy >= old.busy and seconds > 0
            busy = (new.busy - old.busy) / seconds if there and new is not None and old is not None else None
            row.append(0.0 if busy is not None and index in useless else busy)
        parts.append((after.at, row))
    return parts


def utilisation(journal: Journal) -> float | None:
    """Return the utilisation of all peers over the whole run; None without samples."""
    busy = there = 0.0
    last = journal.samples[0].at if journal.samples else 0.0
    for at, row in busy_parts(journal):
        known = [part for part in row if part is not None]
        busy += math.fsum(known) * (at - last)
        there += len(known) * (at - last)
        last = at
    return busy / there if there else None


def quantile(values: Sequence[float], part: float) -> float | None:
    """Return the smallest value that is not below the fraction `part` of the values; None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else None


def _spread(values: Sequence[int]) -> dict[str, float]:
    if not values:
        return {"mean": 0, "most": 0, "total": 0}
    return {"mean": round(statistics.fmean(values)), "most": max(values), "total": sum(values)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
