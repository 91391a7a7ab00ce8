"""Plot of a local swarm's losses, with the kill and the joiner marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.node.local_swarm.event_analysis import EventAnalysis
from thinwire.node.runtime.plotting import check


@dataclass(frozen=True, slots=True)
class Marker:
    """An event at a position on the axis of rounds."""

    at: float
    text: str
    colour: str


def draw(
    path: Path,
    *,
    title: str,
    analyses: Sequence[EventAnalysis],
    alone: EventAnalysis | None,
    held_out: Sequence[tuple[float, float]],
    marks: Sequence[Marker],
) -> None:
    """Write a PNG with the losses of a local swarm.

    It shows the training loss of every peer and of the baseline by round, and `held_out`: losses of the swarm's model as
    points (round, nats per token). Raises NotInstalled; OSError if the file cannot be written.
    """
    check()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for analysis in analyses:
        events = [event for event in analysis.of("round") if event["loss"] is not None]
        axes.plot([e["round"] for e in events], [e["loss"] for e in events], lw=1.0, alpha=0.8, label=analysis.name)
    if alone is not None:
        events = list(alone.of("alone"))
        axes.plot([e["round"] for e in events], [e["loss"] for e in events], "k:", lw=1.0, label="one peer alone")
        looks = list(alone.of("held_out"))
        axes.plot([e["round"] for e in looks], [e["loss"] for e in looks], "kx", label="alone, held out")
    if held_out:
        rounds, losses = zip(*held_out, strict=True)
        axes.plot(rounds, losses, "*", ms=13, color="tab:red", mec="black", label="swarm, held out", zorder=5)
    for place, mark in enumerate(marks):
        axes.axvline(mark.at, color=mark.colour, ls="--", lw=1.2)
        axes.text(
            mark.at,
            0.98 - 0.27 * place,
            f" {mark.text}",
            color=mark.colour,
            rotation=90,
            va="top",
            transform=axes.get_xaxis_transform(),
        )
    axes.set(title=title, xlabel="round", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, format="png")
