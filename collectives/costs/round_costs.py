"""Costs of one round of the manifest's method."""

from __future__ import annotations

import msgspec
from thinwire.collectives.costs.cost_question import Question
from thinwire.collectives.costs.method_costs import HOPS, MethodCosts, pair_rounds, rounds


class RoundCosts(msgspec.Struct, frozen=True):
    """Round of this version: seconds of computing, agreement and data; bytes sent and received per peer."""

    computing: float
    agreement: float
    data: float
    sent: float
    received: float
    chunks: int
    fragments: int
    late: int
    utilisation: float


def round_costs(question: Question, own: MethodCosts, *, chunks: int, fragments: int) -> RoundCosts:
    """Return the round of the manifest's method: modelled to the message, or the estimate of its row."""
    if own.name in ("diloco", "eager", "noloco"):
        now = (pair_rounds if own.name == "noloco" else rounds)(question, question.every)
        busy, late = (own.busy(question.every), 0) if own.name == "eager" else (now.busy, now.late)
        return RoundCosts(now.waiting, now.agreement, now.data, now.sent, now.received, chunks, fragments, late, busy)
    slowest = max(machine.step for machine in question.machines)
    agreeing = (2 if own.name == "powersgd" else 1) * HOPS * question.latency
    return RoundCosts(
        question.every * slowest,
        agreeing,
        own.seconds - agreeing,
        own.moved,
        own.moved,
        chunks,
        fragments,
        0,
        own.busy(question.every),
    )
