"""A life beside rounds that go as the test says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from thinwire.collectives.outcome import Outcome
from thinwire.node.learner import StepReport
from thinwire.node.life import Life


def test_tokens_that_a_late_round_has_not_are_due_with_the_next():
    """Nothing of the first two came to a round; the third call applies what the first announced."""
    weights, commit = [], SimpleNamespace()
    outcomes = iter([Outcome(), Outcome(), Outcome(commit=commit, kept=20), Outcome(commit=commit), Outcome()])

    async def exchange(*, steps, weight, loss):
        weights.append(weight)
        return next(outcomes), 0.0

    async def steps(count, stop):
        return StepReport(count, 1.0, 1.0, 10, 1.0)

    async def settled():
        pass

    peer = SimpleNamespace(
        doors=SimpleNamespace(now=lambda: 0.0),
        steps=lambda speed: 1,
        position=lambda: 0,
        lease=lambda: None,
        place=tuple,
        identity=SimpleNamespace(peer_id=bytes(32)),
        manifest=SimpleNamespace(asynchronous=False),
        replica=SimpleNamespace(round=0, newest=(0, b"")),
        session=SimpleNamespace(overtaken=False),
        idle_weight=0,
        rounds=SimpleNamespace(settled=settled),
    )
    life = Life(peer, SimpleNamespace(speed=0.0, loss=None), begin=None, learn=None, work=None)
    life._duties = SimpleNamespace(exchange=exchange)
    learner = SimpleNamespace(assign=lambda share: None, steps=steps)

    async def live():
        for _ in range(5):
            await life._round(learner)

    asyncio.run(live())
    assert weights == [10, 20, 30, 30, 10]
