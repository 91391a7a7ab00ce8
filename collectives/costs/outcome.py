"""Comparison of a plan with the rounds of a run: seconds, bytes and utilisation, from its event log."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:  # a status has comparisons, and its readers need not load the model of the costs
    from thinwire.collectives.costs.question import Question
    from thinwire.collectives.costs.round_costs import RoundCosts

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


def outcome_of(events: Iterable[Mapping[str, Any]]) -> Outcome | None:
    """Return the outcome of a run from its events; None if there are too few rounds.

    Rounds count if the round before is from the same process, so that no start is in them.
    """
    before: Mapping[str, Any] | None = None
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for event in events:
        if event["kind"] == "start":
            before = None
        elif event["kind"] == "round":
            if before is not None and event["at"] > before["at"] and event["contributors"] > 1:
                pairs.append((before, event))
            before = event
    if len(pairs) < FEWEST:
        return None

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


def comparison(question: Question, planned: RoundCosts, outcome: Outcome) -> tuple[Comparison, ...]:
    """Return plan and outcome of a round side by side: seconds, bytes per peer, and utilisation.

    A model of several fragments with separate rounds is exchanged in as many rounds, each with a part of its costs.
    """
    computing, data = planned.computing / question.turns, planned.data / question.turns
    exchange = planned.agreement + data
    total = max(computing, exchange) if question.hidden else computing + exchange
    figures: list[tuple[str, Unit, float, float]] = [
        ("a round", "seconds", total, outcome.seconds),
        ("its exchange", "seconds", exchange, outcome.exchange),
        ("sent in it", "bytes", planned.sent / question.turns, outcome.sent),
        ("received in it", "bytes", planned.received / question.turns, outcome.received),
        ("utilisation", "part", planned.utilisation, outcome.utilisation),
    ]
    return tuple(
        Comparison(name, unit, said, came, came / said if said else None) for name, unit, said, came in figures
    )
