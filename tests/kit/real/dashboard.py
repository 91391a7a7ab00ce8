"""Queries of the Grafana dashboard (examples/grafana.json), and what they need of the text of `/metrics`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[3] / "examples" / "grafana.json"
Metrics = dict[str, set[str]]
"""Labels by name of a metric."""

ADDED = {"instance", "job"}
"""Labels that Prometheus itself adds."""


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    return dict(json.loads(DASHBOARD.read_text()))


def asked(board: dict[str, Any]) -> Metrics:
    """Return the metrics that the dashboard's queries name, with the labels that selectors, groups and legends need."""
    needed: Metrics = {}
    texts = [(target["expr"], target["legendFormat"]) for panel in board["panels"] for target in panel["targets"]]
    for expression, legend in texts:
        groups = ",".join(re.findall(r"\b(?:by|without|on|ignoring) \(([^)]*)\)", expression))
        wanted = {*re.findall(r"\w+", groups), *re.findall(r"\{\{(\w+)\}\}", legend)} - ADDED
        for name, selector in re.findall(r"(thinwire_\w+)(?:\{([^}]*)\})?", expression):
            needed.setdefault(name, set()).update(wanted, re.findall(r"(\w+)\s*[=!]", selector))
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            needed.setdefault(name, set()).add(label)
    return needed


def exported(text: str) -> Metrics:
    """Return the metrics of an exposition."""
    found: Metrics = {}
    for name, labels in re.findall(r"^(thinwire_\w+)(?:\{(.*)\})? ", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def lacking(text: str) -> list[str]:
    """Return what the dashboard asks for and an exposition does not have, as texts."""
    found = exported(text)
    return sorted(
        f"{name}: {', '.join(sorted(labels - found[name]))}" if name in found else name
        for name, labels in asked(dashboard()).items()
        if not labels <= found.get(name, set()) or name not in found
    )
