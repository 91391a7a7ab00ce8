"""Comparison of a plan with the rounds of a run: seconds, bytes and utilisation, from its event log."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:  # a status has comparisons, and its readers need not load the model of the costs
    from thinwire.collectives.costs.cost_question import Question
    from thinwire.collectives.costs.round_costs import RoundCosts

Unit: TypeAlias = Literal["seconds", "bytes", "part"]

CONTROL = 500
"""Bytes of control messages that a peer sends, and receives, in a round for each of its peers.

Measured with 4 to 64 peers (docs/measured/swarms.md); most of it in tiny rounds only.
"""

FEWEST = 3
"""Rounds that a comparison needs, besides the first one of each process."""


class RunOutcome(msgspec.Struct, frozen=True):
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
    measured: float
    ratio: float | None


class _Cycle:
    """Rounds between two of one fragment: one of each fragment, or the only one of an undivided model."""

    def __init__(self, before: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> None:
        last = rounds[-1]
        self.seconds: float = last["at"] - before["at"]
        self.exchange: float = sum(one["sync_seconds"] for one in rounds)
        self.sent: float = last["bytes_up"] - before["bytes_up"]
        self.received: float = last["bytes_down"] - before["bytes_down"]
        self.steps: float = sum(one["steps"] for one in rounds)
        self.peers: float = statistics.median(one["contributors"] for one in rounds)


def outcome_of(events: Iterable[Mapping[str, Any]]) -> RunOutcome | None:
    """Return the outcome of a run from its events; None if there are too few rounds.

    Rounds count if the round before is from the same process, so that no start is in them. If fragments of the model have
    separate rounds, one of each of them is a round here.
    """
    before: Mapping[str, Any] | None = None
    rounds: list[Mapping[str, Any]] = []
    cycles: list[_Cycle] = []
    for event in events:
        if event["kind"] == "start":
            before = None
        elif event["kind"] == "round":
            rounds.append(event)
            if before is not None and event.get("fragment") != before.get("fragment"):
                continue
            if before is not None and event["at"] > before["at"] and event["contributors"] > 1:
                cycles.append(_Cycle(before, rounds))
            before, rounds = event, []
    if len(cycles) < FEWEST:
        return None

    def median(name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in cycles))

    return RunOutcome(
        rounds=len(cycles),
        seconds=median("seconds"),
        exchange=median("exchange"),
        sent=median("sent"),
        received=median("received"),
        steps=median("steps"),
        peers=round(median("peers")),
    )


def comparison(question: Question, planned: RoundCosts, outcome: RunOutcome) -> tuple[Comparison, ...]:
    """Return plan and outcome of a round side by side: seconds, bytes per peer, and utilisation.

    Fragments with separate rounds agree on each of them. The bytes are those of the plan and of control messages, which a
    plan leaves out; in gossip rounds the latter go to the peers of one group.
    """
    control = CONTROL * question.turns * (question.group if question.paired else question.peers)
    exchange = planned.agreement * question.turns + planned.data
    total = max(planned.computing, exchange) if question.hidden else planned.computing + exchange
    figures: list[tuple[str, Unit, float, float]] = [
        ("a round", "seconds", total, outcome.seconds),
        ("its exchange", "seconds", exchange, outcome.exchange),
        ("sent a round", "bytes", planned.sent + control, outcome.sent),
        ("received a round", "bytes", planned.received + control, outcome.received),
        ("utilisation", "part", planned.utilisation, outcome.utilisation),
    ]
    return tuple(
        Comparison(name, unit, expected, measured, measured / expected if expected else None)
        for name, unit, expected, measured in figures
    )
