"""Plot of a plan: a lane for every peer, a colour for every path."""

from __future__ import annotations

from pathlib import Path

from thinwire.node.pipeline.planner.makespan import Timeline
from thinwire.node.pipeline.planner.plan_summary import PlanSummary
from thinwire.node.pipeline.planner.problem import Problem
from thinwire.node.runtime.console import plain
from thinwire.node.runtime.plotting import check


def draw(path: Path, instance: Problem, timeline: Timeline, summary: PlanSummary) -> None:
    """Write a PNG: forwards pale, backwards full, losses black. Raises NotInstalled, OSError."""
    check()
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    order = [peer for stage in instance.stages for peer in stage]
    row = {peer: place for place, peer in enumerate(order)}
    figure = Figure(figsize=(11, 1.6 + 0.28 * len(order)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    palette = colormaps["tab20"]
    for op in timeline.operations:
        colour = "black" if op.kind == "loss" else palette(op.path % 20)
        fade = 0.45 if op.kind == "forward" else 1.0
        axes.barh(row[op.peer], op.end - op.start, left=op.start, height=0.8, color=colour, alpha=fade, lw=0)
    border = -0.5
    for stage in instance.stages[:-1]:
        border += len(stage)
        axes.axhline(border, color="0.6", lw=0.8)
    axes.set_yticks(
        range(len(order)), [f"{_name(instance.label(p))}  ({instance.stage[p]})" for p in order], fontsize=8
    )
    axes.set(
        xlim=(0, timeline.makespan),
        ylim=(len(order) - 0.5, -0.5),
        xlabel="seconds",
        ylabel="peer (stage)",
        title=f"{_name(instance.name) or 'pipeline'}: {summary.makespan:.1f} s a step; "
        f"{summary.full:.1f} s when nothing is skipped",
    )
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, format="png")


def _name(text: str) -> str:
    """Return text that the library prints as it is, not as a formula."""
    return plain(text).replace("$", r"\$")
