"""Plan as text for a terminal: question, round of this version, methods and recommendation."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from thinwire.collectives.costs.access_links import MBIT
from thinwire.collectives.costs.cost_question import Question
from thinwire.collectives.costs.plan_outcome import Comparison, RunOutcome, Unit
from thinwire.node.runtime.console import bytes_text
from thinwire.sims.planner.pipeline_costs import PipelineCosts
from thinwire.sims.planner.plan import BandwidthNeed, MethodRow, Plan
from thinwire.sims.planner.site_bytes import SiteBytes

WIDE = 150
"""Minimum width of a terminal, in columns, for descriptions of the methods."""


def show(plan: Plan) -> None:
    """Print the plan to stdout. The output is wide if stdout is no terminal, so that a pipe gets no wraps."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(Group(*_parts(plan, console.width >= WIDE)), highlight=False)


def show_comparison(outcome: RunOutcome, rows: Sequence[Comparison]) -> None:
    """Print plan and outcome side by side."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    print(f"Medians of {outcome.rounds} rounds of {outcome.steps:g} steps with {outcome.peers} contributors")
    table = _table("", ("",), ("planned", "measured", "ratio"))
    for row in rows:
        planned, measured = (_figure(row.unit, value) for value in (row.planned, row.measured))
        table.add_row(row.name, planned, measured, "-" if row.ratio is None else f"{row.ratio:.2f}")
    console.print(table, highlight=False)


def _figure(unit: Unit, value: float) -> str:
    match unit:
        case "seconds":
            return seconds_text(value)
        case "bytes":
            return bytes_text(value)
        case _:
            return percent(value)


def _parts(plan: Plan, wide: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [_facts(plan), "", _rows(plan.methods, plan.targets, wide), ""]
    parts += [_needs(plan.needs, plan.targets), ""]
    if plan.pipeline is not None:
        parts += [_pipeline(plan.pipeline), ""]
    parts += [Text(f"note: {note}") for note in plan.notes]
    return parts


def _facts(plan: Plan) -> Text:
    asked, now = plan.question, plan.round
    best, here = plan.best, plan.best_here
    paired = asked.paired
    method, agreement = (
        ("noloco, " + ("pairs" if asked.group == 2 else f"groups of {asked.group}"), "asking")
        if paired
        else (asked.method, "agreeing")
    )
    spec = asked.codecs.spec if paired else asked.own_codec or asked.codec
    chunks = "" if asked.own_codec else f", {now.chunks} chunks"
    exchange = f"{seconds_text(now.agreement)} {agreement} + {seconds_text(now.data)} data"
    computing = f"{seconds_text(now.computing)} computing"
    frozen = f" beside {size_text(asked.frozen)} frozen ones" if asked.frozen else ""
    facts = [
        ("model", f"{size_text(asked.parameters)} parameters{frozen}, {asked.layers} layers of width {asked.width:,}"),
        ("peers", f"{_peers(asked)}, {asked.rtt * 1e3:g} ms round trip"),
        (
            "memory",
            f"{bytes_text(plan.memory.model)} for model and optimizer, {bytes_text(plan.memory.rounds)} for rounds",
        ),
        (
            "",
            f"(per peer, fp32, without activations; a checkpoint takes at most {bytes_text(plan.memory.copy)} more "
            "while it is written, and nothing where that exceeds half of the memory left)",
        ),
        ("round", f"{method}, H = {asked.every}, {spec}: {plan.bits:.4g} bits per parameter{chunks}"),
        (
            "",
            f"{computing}, at the same time {exchange}" if asked.hidden else f"{computing} + {exchange}",
        ),
        ("", f"{bytes_text(now.sent)} sent and {bytes_text(now.received)} received per peer (mean)"),
        ("", f"peers compute {percent(now.utilisation)} of the time"),
        ("best", f"{best.method}, H = {best.every}: {percent(best.utilisation)}; {best.why}"),
    ]
    if plan.sites is not None:
        facts += _sites(plan.sites)
    if here != best:
        facts.append(("best here", f"{here.method}, H = {here.every}: {percent(here.utilisation)}; {here.why}"))
    return Text("\n".join(f"{name:<11}{value}" for name, value in facts))


def _sites(found: SiteBytes) -> list[tuple[str, str]]:
    line = f"{found.down / MBIT:g}/{found.up / MBIT:g} Mbit/s"
    flat = f"{bytes_text(found.flat)} in {seconds_text(found.flat_seconds)} as a butterfly"
    tall = f"{bytes_text(found.tall)} in {seconds_text(found.tall_seconds)} as a hierarchy"
    advice = 'set exchange.topology = "hierarchy", and in node.toml of all peers of a site the same `site`'
    return [
        (
            "sites",
            f"{found.sites} of up to {found.members} peers behind one line of {line}; in each direction a round sends over it",
        ),
        ("", f"{flat}, {tall}: {found.factor:.1f} times as fast"),
        ("", f"so {advice}" if found.factor > 1 else "so leave exchange.topology as it is"),
    ]


def _peers(asked: Question) -> str:
    return ", ".join(
        f"{machine.count} × {machine.down / MBIT:g}/{machine.up / MBIT:g} Mbit/s down/up at {machine.step:.3g} s a step"
        for machine in asked.machines
    )


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...], last: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="bold", pad_edge=False)
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    for name in last:
        table.add_column(name)
    return table


def _rows(rows: tuple[MethodRow, ...], targets: tuple[float, ...], wide: bool) -> Table:
    table = _table(
        "Ways to train (in brackets: to compare only), and the H that reaches a utilisation",
        ("method",),
        ("H", "each way", "exchange", "computing", "memory", *(percent(target) for target in targets)),
        ("data exchanged",) if wide else (),
    )
    for row in rows:
        table.add_row(
            row.method if row.here else f"({row.method})",
            str(row.every),
            bytes_text(row.moved),
            seconds_text(row.seconds),
            percent(row.utilisation),
            bytes_text(row.memory),
            *("-" if every is None else str(every) for every in row.reaching),
            *((row.about,) if wide else ()),
        )
    return table


def _needs(needs: tuple[BandwidthNeed, ...], targets: tuple[float, ...]) -> Table:
    table = _table(
        "Bandwidth of every peer, each way, for a utilisation",
        ("method",),
        ("H", *(percent(target) for target in targets)),
    )
    for need in needs:
        table.add_row(need.method, str(need.every), *map(rate_text, need.mbits))
    return table


def _pipeline(found: PipelineCosts) -> Table:
    table = _table(
        f"A pipeline of {found.stages} stages, {bytes_text(found.memory)} each: filling it takes {percent(found.bubble)}, "
        "outer rounds are additional",
        ("boundary",),
        ("bytes a token", "keeps up at", "computing"),
        ("",),
    )
    for boundary in found.boundaries:
        table.add_row(
            boundary.name,
            f"{boundary.per_token:,.0f}",
            rate_text(boundary.mbits),
            percent(boundary.utilisation),
            Text(boundary.remark),
        )
    return table


def percent(part: float) -> str:
    """Format a fraction: 0.0981 -> "9.8 %", 0.95 -> "95 %"."""
    return f"{100 * part:.2g} %" if part < 0.0995 else f"{100 * part:.0f} %"


def seconds_text(seconds: float) -> str:
    """Format a time: 0.398 -> "0.40 s", 200 -> "200 s", 7300 -> "2.0 h"."""
    if seconds < 9.95:
        return f"{seconds:.2f} s"
    return f"{seconds:.0f} s" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def rate_text(mbits: float | None) -> str:
    """Format a rate: 43.65 -> "44 Mbit/s", 5754 -> "5.8 Gbit/s", None -> "-"."""
    if mbits is None:
        return "-"
    value, unit = (mbits, "Mbit/s") if mbits < 999.5 else (mbits / 1e3, "Gbit/s")
    return f"{value:.2g} {unit}" if value < 99.5 else f"{value:.0f} {unit}"


def size_text(count: int) -> str:
    """Format a count: 1300000000 -> "1.3B", 426368 -> "426k"."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * limit:
            return f"{count / limit:.3g}{unit}"
    return str(count)
