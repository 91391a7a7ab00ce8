"""Comparison of a plan with the rounds of a run: seconds, bytes and utilisation, from its event log."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from thinwire.sims.planner.plan import Plan
from thinwire.sims.planner.question import PlanError

Unit: TypeAlias = Literal["seconds", "bytes", "part"]

FEWEST = 3
"""Rounds that a comparison needs, besides the first one of each process."""


class Outcome(msgspec.Struct, frozen=True):
    """Medians of the rounds of one peer: seconds of round and exchange, bytes, inner steps, contributors."""

    rounds: int
    seconds: float
    exchange: float
    sent: float
    received: float
    steps: float
    peers: int

    @property
    def step(self) -> float:
        """Seconds of one inner step."""
        return max(1e-9, self.seconds - self.exchange) / max(1.0, self.steps)

    @property
    def utilisation(self) -> float:
        """Part of a round in which the peer computed."""
        return max(0.0, self.seconds - self.exchange) / self.seconds


class Comparison(msgspec.Struct, frozen=True):
    """Figure of a plan, figure of the outcome, and their ratio (None if the plan has zero)."""

    name: str
    unit: Unit
    planned: float
    came: float
    ratio: float | None


def outcome_of(events: Iterable[Mapping[str, Any]]) -> Outcome:
    """Return the outcome of a run from its events.

    Rounds count if the round before is from the same process, so that no start is in them. Raises PlanError if there are
    too few.
    """
    before: Mapping[str, Any] | None = None
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for event in events:
        if event["kind"] == "start":
            before = None
        elif event["kind"] == "round" and event.get("fragment", 0) == 0:
            if before is not None and event["at"] > before["at"] and event["contributors"] > 1:
                pairs.append((before, event))
            before = event
    if len(pairs) < FEWEST:
        raise PlanError(
            f"{len(pairs)} rounds can be compared, and {FEWEST} are needed",
            "train longer; a round counts if another peer contributed and the same process made the round before",
        )

    def median(values: Sequence[float]) -> float:
        return float(statistics.median(values))

    return Outcome(
        rounds=len(pairs),
        seconds=median([event["at"] - last["at"] for last, event in pairs]),
        exchange=median([event["sync_seconds"] for _, event in pairs]),
        sent=median([event["bytes_up"] - last["bytes_up"] for last, event in pairs]),
        received=median([event["bytes_down"] - last["bytes_down"] for last, event in pairs]),
        steps=median([event["steps"] for _, event in pairs]),
        peers=round(median([event["contributors"] for _, event in pairs])),
    )


def comparison(plan: Plan, outcome: Outcome) -> list[Comparison]:
    """Return plan and outcome side by side: seconds, bytes per peer, and utilisation."""
    planned = plan.round
    exchange = planned.agreement + planned.data
    total = max(planned.computing, exchange) if plan.question.hidden else planned.computing + exchange
    figures: list[tuple[str, Unit, float, float]] = [
        ("a round", "seconds", total, outcome.seconds),
        ("its exchange", "seconds", exchange, outcome.exchange),
        ("sent in it", "bytes", planned.sent, outcome.sent),
        ("received in it", "bytes", planned.received, outcome.received),
        ("utilisation", "part", planned.utilisation, outcome.utilisation),
    ]
    return [Comparison(name, unit, said, came, came / said if said else None) for name, unit, said, came in figures]
