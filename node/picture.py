"""A picture of a local swarm's losses, with the kill and the newcomer marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from thinwire.swarm.errors import HintedError

from .diary import Diary


class NoPlots(HintedError):
    """Drawing needs a library that is not installed."""

    exit_code: ClassVar[int] = 1


def check() -> None:
    """Raises NoPlots when no picture can be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NoPlots(
            "there will be no picture: matplotlib is not installed", "pip install 'thinwire[plots]'"
        ) from None


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened, at a point of the rounds' axis."""

    at: float
    text: str
    colour: str


def draw(
    path: Path,
    *,
    title: str,
    diaries: Sequence[Diary],
    alone: Diary | None,
    held_out: Sequence[tuple[float, float]],
    marks: Sequence[Mark],
) -> None:
    """Write a PNG: training loss by round of every peer and of the one alone, `held_out` losses of the swarm as points
    (round, nats per token). Raises NoPlots; OSError when the file cannot be written.
    """
    check()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for diary in diaries:
        events = [event for event in diary.of("round") if event["loss"] is not None]
        axes.plot([e["round"] for e in events], [e["loss"] for e in events], lw=1.0, alpha=0.8, label=diary.name)
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
