"""Loss curves of `speedup.py`, and the table of speed-ups at equal loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

ALONE, ALONE_MUON, TOGETHER = "one peer alone", "one peer, Muon", "synchronous"
"""Names of the trainings without an outer method."""

PARTS = (0.5, 0.75, 1.0)
"""Parts of the steps of one peer alone after which its loss is a target."""


@dataclass(frozen=True)
class Result:
    """Curve of one training: pairs of inner steps and held-out loss. failure: the error that ended it, if any."""

    method: str
    peers: int
    seed: int
    curve: Sequence[tuple[int, float]]
    failure: str = ""

    @property
    def base(self) -> str:
        """Method of one peer alone with the same inner optimizer."""
        return ALONE_MUON if self.method in ("muloco", ALONE_MUON) else ALONE


def reached(curve: Sequence[tuple[int, float]], loss: float) -> float:
    """Return the inner steps after which the lowest value so far is at most `loss`; infinite if it never is."""
    before, lowest = 0.0, math.inf
    for step, value in curve:
        if value <= loss:
            part = (lowest - loss) / (lowest - value) if math.isfinite(lowest) and lowest > value else 1.0
            return before + part * (step - before)
        before, lowest = float(step), min(lowest, value)
    return math.inf


def targets(curve: Sequence[tuple[int, float]]) -> list[float]:
    """Return the lowest losses of one peer alone within parts of its steps."""
    return [min(loss for step, loss in curve if step <= max(part * curve[-1][0], curve[0][0])) for part in PARTS]


def speedups(alone: Sequence[tuple[int, float]], curve: Sequence[tuple[int, float]]) -> list[float]:
    """Return the ratios of inner steps at each target; 0 where the curve does not reach it."""
    return [reached(alone, loss) / reached(curve, loss) for loss in targets(alone)]


def cut(results: Sequence[Result]) -> list[Result]:
    """Return the results up to the last step that every seed of one peer alone has reached."""
    end = min(one.curve[-1][0] for one in results if one.method == ALONE)
    return [replace(one, curve=[point for point in one.curve if point[0] <= end]) for one in results]


def table(results: Sequence[Result], step_tokens: int) -> str:
    """Return one line for each method and number of peers: losses and speed-ups, mean and range over the seeds."""
    by_kind: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        by_kind.setdefault((result.method, result.peers), []).append(result)
    alone = {(one.method, one.seed): one for one in results}
    header = "".join(f"{f'at {part:.0%}':>20}" for part in PARTS)
    lines = [f"{'':<20}{'peers':>5}{'M tokens':>10}{'final loss':>24}{header}"]
    for (name, count), same in by_kind.items():
        failed = [one.failure or "no round" for one in same if one.failure or not one.curve]
        if failed:
            lines.append(f"{name:<20}{count:>5}  failed: {failed[0]}")
            continue
        bases = [alone[one.base, one.seed] for one in same]
        final, base = ([one.curve[-1][1] for one in many] for many in (same, bases))
        tokens = same[0].curve[-1][0] * step_tokens * count / 1e6
        line = f"{name:<20}{count:>5}{tokens:>10.1f}{_range(final, 4):>24}"
        if count > 1:
            ratios = zip(*(speedups(one.curve, two.curve) for one, two in zip(bases, same, strict=True)), strict=True)
            line += "".join(f"{_reached(each):>20}" for each in ratios)
            line += "  WORSE than one peer alone" if not np.mean(final) <= np.mean(base) else ""
        lines.append(line)
    return "\n".join(lines)


def _range(values: Sequence[float], digits: int) -> str:
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def _reached(ratios: Sequence[float]) -> str:
    """Return the speed-ups of the seeds that reach a loss, and how many do so if not all do."""
    found = [ratio for ratio in ratios if ratio]
    if not found:
        return "not reached"
    return _range(found, 2) if len(found) == len(ratios) else f"{np.mean(found):.2f}, {len(found)} of {len(ratios)}"
