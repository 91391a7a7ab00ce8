"""The lifecycle of a peer with scripted rounds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from thinwire.collectives.outcome import Outcome
from thinwire.node.peer.lifecycle import PeerLifecycle
from thinwire.node.training.learner import StepReport, WorkShare


def test_tokens_missing_in_late_round_count_in_the_next():
    """The first two calls reach no round; the third one applies the announcement of the first."""
    weights, commit = [], SimpleNamespace()
    outcomes = iter([Outcome(), Outcome(), Outcome(commit=commit, kept=20), Outcome(commit=commit), Outcome()])

    async def exchange(*, steps, weight, loss):
        weights.append(weight)
        return next(outcomes), 0.0

    async def steps(count, stop):
        return StepReport(count, 1.0, 1.0, 10, 1.0)

    async def settled():
        pass

    async def judge(score):
        pass

    peer = SimpleNamespace(
        environment=SimpleNamespace(now=lambda: 0.0),
        workload=SimpleNamespace(steps=lambda speed: 1, share=lambda made: WorkShare((), bytes(32), 0), idle_weight=0),
        replica=SimpleNamespace(round=0, newest=(0, b""), contents=(0, b"")),
        rounds=SimpleNamespace(settled=settled, judge=judge, follows=False, overtaken=False),
    )
    life = PeerLifecycle(peer, SimpleNamespace(speed=0.0, loss=None), begin=None, learn=None, work=None)
    life._services = SimpleNamespace(exchange=exchange)
    learner = SimpleNamespace(assign=lambda share: None, score=None, steps=steps)

    async def live():
        for _ in range(5):
            await life._round(learner)

    asyncio.run(live())
    assert weights == [10, 20, 30, 30, 10]
