"""Text of a comparison of plan and outcome; it loads nothing of the model of the costs."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.collectives.costs.plan_outcome import Comparison
from thinwire.node.runtime.console import bytes_text


def comparison_text(rows: Sequence[Comparison]) -> str:
    """Return the measured figure beside each planned one: "a round 2.4 s (planned 2.3 s), …"."""
    return ", ".join(f"{row.name} {_figure(row, row.measured)} (planned {_figure(row, row.planned)})" for row in rows)


def _figure(row: Comparison, value: float) -> str:
    match row.unit:
        case "seconds":
            return f"{value:.3g} s"
        case "bytes":
            return bytes_text(value)
        case _:
            return f"{100 * value:.0f} %"
