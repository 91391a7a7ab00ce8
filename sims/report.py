"""What a simulation came to: a summary in numbers, read from its journal, and a run directory with all of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec
from thinwire.swarm.errors import HintedError

from .journal import WORLD, Event, Journal
from .scenario import Scenario


class OutputError(HintedError):
    """Nowhere to write the report."""

    exit_code: ClassVar[int] = 3


class Broken(Protocol):
    """A promise that was broken, as an oracle saw it."""

    @property
    def at(self) -> float: ...
    @property
    def oracle(self) -> str: ...
    @property
    def peer(self) -> int: ...
    @property
    def detail(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Play:
    """How it was played. `level`: "L0" virtual time, "L1" processes and proxies, "L2" namespaces. `seconds`: real ones.

    `trace`: hash of all that happened in virtual time, "" where time is real. `command`: what a person types to see it again.
    `finished`: False when it was interrupted.
    """

    level: str
    seconds: float
    trace: str = ""
    command: str = ""
    finished: bool = True
    violations: Sequence[Broken] = ()


def summarize(scenario: Scenario, journal: Journal, play: Play) -> dict[str, Any]:
    """The summary as JSON values. Times are seconds of the scenario, bytes are totals of a peer since its start.

    "round_seconds" are between two commits, each counted when the first peer has it; "utilisation" is the part of their
    presence in which peers computed.
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
        "round_seconds": {"median": _rounded(quantile(gaps, 0.5)), "p95": _rounded(quantile(gaps, 0.95))},
        "sync_seconds": {
            name: _rounded(quantile([e.fields.get("sync_seconds", 0.0) for e in journal.of("round")], part))
            for name, part in (("median", 0.5), ("p95", 0.95))
        },
        "bytes_up": _spread([up for up, _ in totals]),
        "bytes_down": _spread([down for _, down in totals]),
        "utilisation": _rounded(utilisation(journal)),
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


def _violations(journal: Journal, play: Play) -> list[dict[str, Any]]:
    """As they were seen; when the play was interrupted, those that had been seen by then."""
    seen = [(one.at, one.oracle, one.peer, one.detail) for one in play.violations]
    if not seen:
        seen = [(e.at, e.fields["oracle"], e.peer, e.fields["detail"]) for e in journal.of("violation")]
    return [{"at": round(at, 3), "oracle": name, "peer": peer, "detail": text} for at, name, peer, text in seen]


def committed(journal: Journal) -> dict[int, float]:
    """Round -> time at which the first peer had applied it, in order of rounds."""
    first: dict[int, float] = {}
    for event in journal.of("round"):
        first.setdefault(event.fields["round"], event.at)
    return dict(sorted(first.items()))


def loss_of(event: Event) -> float | None:
    """What a "round" event says of the loss; None when the peer had made no step."""
    loss = event.fields.get("loss")
    return loss if isinstance(loss, float | int) and math.isfinite(loss) else None


def loss_by_round(journal: Journal, without: Iterable[int] = ()) -> list[tuple[float, float]]:
    """(time of the commit, mean loss of the peers that took part) of each round, but for the peers `without`."""
    said: dict[int, list[float]] = {}
    left_out = set(without)
    for event in journal.of("round"):
        loss = loss_of(event)
        if loss is not None and event.peer not in left_out:
            said.setdefault(event.fields["round"], []).append(loss)
    return [(at, statistics.fmean(said[number])) for number, at in committed(journal).items() if number in said]


def carried(journal: Journal) -> list[tuple[int, int]]:
    """Bytes that each peer has sent and received over all its lives, by index."""
    whole = [(0, 0)] * len(journal.names)
    before = [(0, 0)] * len(journal.names)
    for sample in journal.samples:
        for index, one in enumerate(sample.peers):
            now = (one.up, one.down) if one is not None else (0, 0)
            if now < before[index]:  # another life counts from 0
                whole[index] = (whole[index][0] + before[index][0], whole[index][1] + before[index][1])
            before[index] = now
    return [(old[0] + new[0], old[1] + new[1]) for old, new in zip(whole, before, strict=True)]


def busy_parts(journal: Journal) -> list[tuple[float, list[float | None]]]:
    """(time of a sample, for each peer the part of the time since the last one in which it computed; None: not there)."""
    parts: list[tuple[float, list[float | None]]] = []
    for before, after in zip(journal.samples, journal.samples[1:], strict=False):
        seconds = after.at - before.at
        row: list[float | None] = []
        for old, new in zip(before.peers, after.peers, strict=True):
            there = old is not None and new is not None and new.busy >= old.busy and seconds > 0
            row.append((new.busy - old.busy) / seconds if there and new is not None and old is not None else None)
        parts.append((after.at, row))
    return parts


def utilisation(journal: Journal) -> float | None:
    """Of all peers, over the whole run; None when nothing was sampled."""
    busy = there = 0.0
    last = journal.samples[0].at if journal.samples else 0.0
    for at, row in busy_parts(journal):
        known = [part for part in row if part is not None]
        busy += math.fsum(known) * (at - last)
        there += len(known) * (at - last)
        last = at
    return busy / there if there else None


def quantile(values: Sequence[float], part: float) -> float | None:
    """The smallest value that is not below `part` of them; None of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else None


def _spread(values: Sequence[int]) -> dict[str, float]:
    if not values:
        return {"mean": 0, "most": 0, "total": 0}
    return {"mean": round(statistics.fmean(values)), "most": max(values), "total": sum(values)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


# --- the run directory


def prepare(directory: Path) -> None:
    """Make the run directory, before hours are spent. Raises OutputError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "summary.json").unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write to {directory}: {error.strerror}", "name another place with --out") from None


def write(directory: Path, scenario: Scenario, journal: Journal, summary: dict[str, Any]) -> bool:
    """Write summary.json, events.jsonl, samples.jsonl and the pictures. Whether there are pictures (matplotlib is optional).

    Raises OutputError.
    """
    from thinwire.node.picture import NoPlots

    from .plots import draw_all

    try:
        journal.write(directory)
        text = msgspec.json.format(msgspec.json.encode(summary, enc_hook=str))
        (directory / "summary.json").write_bytes(text + b"\n")
        draw_all(directory, scenario, journal)
    except OSError as error:
        raise OutputError(f"cannot write to {directory}: {error.strerror}", "name another place with --out") from None
    except NoPlots:
        return False
    return True
