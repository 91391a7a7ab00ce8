"""What a companion measures, beside a peer whose rounds go as the test says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from thinwire.collectives.outcome import Outcome
from thinwire.node.companion import Companion

COMMIT = SimpleNamespace(opened=SimpleNamespace(contributors=()))


@pytest.mark.parametrize("overlap", [0, 2])
def test_weight_that_came_to_no_round_is_measured_once(overlap):
    """The loop gives it again with what it has trained since; the speed is that of the steps since."""
    clock, speeds = SimpleNamespace(now=0.0), []
    replica = SimpleNamespace(newest=(0, b""), round=0)
    outcomes = iter([None, None, COMMIT, None, "adopted", None])

    async def exchange(*, steps, weight, loss):
        speeds.append(companion._report.speed)
        if overlap:
            await companion._until_due()
        outcome = next(outcomes)
        if outcome is not None:
            replica.newest = (0, replica.newest[1] + b"x")
        return Outcome(commit=outcome if outcome != "adopted" else None), 0.0

    async def settled():
        pass

    companion = Companion.__new__(Companion)
    companion.peer = SimpleNamespace(
        replica=replica,
        doors=SimpleNamespace(now=lambda: clock.now),
        manifest=SimpleNamespace(overlap=overlap, asynchronous=False),
        steps=lambda speed: 4,
        traffic=lambda: (0, 0),
        rounds=SimpleNamespace(settled=settled),
    )
    companion._report, companion._traffic = SimpleNamespace(speed=0.0), (0, 0)
    companion._duties = SimpleNamespace(exchange=exchange)
    companion._begun, companion._due = asyncio.Event(), asyncio.Event()
    companion._due.set()
    companion._exchanged_at, companion._carried = 0.0, 0

    async def live():
        for weight in (40, 80, 120, 40, 80, 40):  # 40 samples in every 4 seconds
            clock.now += 4.0
            await companion._exchange(4, weight, None)

    asyncio.run(live())
    assert speeds == [10.0] * 6
