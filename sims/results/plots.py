"""Plots of a simulation: loss, round time, bytes, utilisation and membership, with the faults marked."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from thinwire.node.runtime.plotting import check
from thinwire.sims.results.journal import WORLD, Journal
from thinwire.sims.results.report import busy_parts, carried, committed, loss_by_round, loss_of, loss_unit, quantile
from thinwire.sims.scenario.scenario import Scenario

FEW = 40
"""Largest number of peers with a line each; more are shown as a band with the median."""

Axes: TypeAlias = Any
"""matplotlib.axes.Axes, which has no types."""

_MOMENT = 0.2
"""Faults of at most this duration are drawn as a line."""


def draw_all(directory: Path, scenario: Scenario, journal: Journal) -> tuple[Path, ...]:
    """Write five PNGs. Raises NotInstalled without matplotlib; OSError."""
    check()
    drawn = []
    for name, draw in _PICTURES.items():
        path = directory / f"{name}.png"
        _picture(path, scenario, journal, draw)
        drawn.append(path)
    return tuple(drawn)


def _picture(path: Path, scenario: Scenario, journal: Journal, draw: Callable[[Axes, Scenario, Journal], None]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes, scenario, journal)
    if axes.get_xlabel() == _TIME:
        axes.set_xlim(0, max(journal.now, 1e-9))
        _mark_faults(axes, journal)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside lower center", ncols=7, fontsize=8)
    figure.savefig(path, format="png")


def _mark_faults(axes: Axes, journal: Journal) -> None:
    """Mark each fault from start to end; one colour and one legend entry for each kind."""
    colours: dict[str, str] = {}
    for event in journal.of("fault"):
        kind, seconds = event.fields["fault"], event.fields["seconds"]
        if event.fields["over"]:
            continue
        label = kind if kind not in colours else None
        colour = colours.setdefault(kind, f"C{1 + len(colours) % 9}")
        if seconds > _MOMENT and kind != "kill":
            axes.axvspan(event.at, event.at + seconds, color=colour, alpha=0.15, label=label)
        else:
            axes.axvline(event.at, color=colour, ls="--", lw=1.0, label=label)


_DECADES = 30
"""Losses with a larger ratio are drawn on a logarithmic axis."""

_TIME = "seconds since the start"


def _loss(axes: Axes, scenario: Scenario, journal: Journal) -> None:
    liars = {peer.index for peer in scenario.peers if peer.liar}
    of_peer: dict[int, tuple[list[float], list[float]]] = {}
    for event in journal.of("round"):
        loss = loss_of(event)
        if loss is not None and event.peer not in liars:
            times, losses = of_peer.setdefault(event.peer, ([], []))
            times.append(event.at)
            losses.append(loss)
    if len(of_peer) <= FEW:
        for index, (times, losses) in sorted(of_peer.items()):
            axes.plot(times, losses, lw=0.8, alpha=0.6, label=journal.names[index] if len(of_peer) <= 10 else None)
    mean = loss_by_round(journal, liars)
    axes.plot([at for at, _ in mean], [loss for _, loss in mean], "k", lw=1.6, label="mean")
    losses = [loss for _, losses in of_peer.values() for loss in losses]
    if losses and min(losses) > 0 and max(losses) > _DECADES * min(losses):
        axes.set_yscale("log")
    axes.set(title=f"{scenario.name}: loss", xlabel=_TIME, ylabel=f"loss ({loss_unit(scenario)})")


def _rounds(axes: Axes, scenario: Scenario, journal: Journal) -> None:
    commits = list(committed(journal).values())
    gaps = [b - a for a, b in zip(commits, commits[1:], strict=False)]
    axes.plot(commits[1:], gaps, ".-", lw=1.0, label="between two commits")
    syncs = list(journal.of("round"))
    axes.plot(
        [e.at for e in syncs], [e.fields.get("sync_seconds", 0.0) for e in syncs], ".", ms=2, label="of it, exchanging"
    )
    axes.set(title=f"{scenario.name}: round time", xlabel=_TIME, ylabel="seconds")
    axes.set_ylim(bottom=0)


def _bytes(axes: Axes, scenario: Scenario, journal: Journal) -> None:
    totals = carried(journal)
    places = range(len(totals))
    up, down = [up / 1e6 for up, _ in totals], [down / 1e6 for _, down in totals]
    axes.bar([place - 0.2 for place in places], up, 0.4, label="up")
    axes.bar([place + 0.2 for place in places], down, 0.4, label="down")
    if len(totals) <= FEW:
        axes.set_xticks(list(places), journal.names, rotation=90, fontsize=7)
    axes.set(title=f"{scenario.name}: bytes per peer", xlabel="peer", ylabel="MB")


def _utilisation(axes: Axes, scenario: Scenario, journal: Journal) -> None:
    commits = list(committed(journal).values())
    usual = quantile([b - a for a, b in zip(commits, commits[1:], strict=False)], 0.5) or 0.0
    # In a window shorter than a round, a peer would be fully busy or idle.
    window = max(usual, 2 * scenario.interval)
    _band(axes, [(at, [100 * part for part in parts]) for at, parts in _smooth(busy_parts(journal), window) if parts])
    axes.set(
        title=f"{scenario.name}: compute utilisation", xlabel=_TIME, ylabel=f"% of the time, over {window:.0f} s each"
    )
    axes.set_ylim(0, 105)


def _smooth(rows: Sequence[tuple[float, list[float | None]]], window: float) -> list[tuple[float, list[float]]]:
    """Return for each row the means of every peer over the `window` seconds before it."""
    smooth = []
    first = 0
    for place, (at, _) in enumerate(rows):
        while rows[first][0] <= at - window:
            first += 1
        known = [
            [part for part in column if part is not None]
            for column in zip(*(row for _, row in rows[first : place + 1]), strict=True)
        ]
        smooth.append((at, [min(1.0, statistics.fmean(parts)) for parts in known if parts]))
    return smooth


def _band(axes: Axes, rows: Sequence[tuple[float, list[float]]]) -> None:
    times = [at for at, _ in rows]
    low = [quantile(values, 0.1) for _, values in rows]
    high = [quantile(values, 0.9) for _, values in rows]
    axes.fill_between(times, low, high, alpha=0.2, lw=0, label="10 to 90 % of the peers")
    axes.plot(times, [statistics.fmean(values) for _, values in rows], lw=1.6, label="mean")


def _membership(axes: Axes, scenario: Scenario, journal: Journal) -> None:
    """Draw a bar for each peer's presence, or with many peers the number of present ones."""
    if len(journal.names) > FEW:
        there = [(sample.at, sum(one is not None for one in sample.peers)) for sample in journal.samples]
        axes.step([at for at, _ in there], [count for _, count in there], where="post", label="peers that run")
        axes.set(title=f"{scenario.name}: membership", xlabel=_TIME, ylabel="peers")
        return
    since: dict[int, float] = {}
    for event in [event for event in journal.events if event.name in ("up", "down") and event.peer != WORLD]:
        if event.name == "up":
            since.setdefault(event.peer, event.at)
        elif event.peer in since:
            begin = since.pop(event.peer)
            axes.barh(event.peer, event.at - begin, left=begin, height=0.7, color="C0")
            if event.fields.get("reason") != "the end":
                dead = event.fields.get("reason") != "left"
                axes.plot([event.at], [event.peer], "x" if dead else "|", color="tab:red" if dead else "black")
    for index, begin in since.items():
        axes.barh(index, journal.now - begin, left=begin, height=0.7, color="C0")
    axes.set_yticks(range(len(journal.names)), journal.names, fontsize=7)
    axes.set_ylim(len(journal.names) - 0.5, -0.5)
    axes.set(title=f"{scenario.name}: present peers", xlabel=_TIME)


_PICTURES: dict[str, Callable[[Axes, Scenario, Journal], None]] = {
    "loss": _loss,
    "rounds": _rounds,
    "bytes": _bytes,
    "utilisation": _utilisation,
    "membership": _membership,
}
