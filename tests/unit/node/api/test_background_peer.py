"""Speed measurement of a background peer whose rounds are scripted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from thinwire.collectives.outcome import Outcome
from thinwire.node.api.background_peer import BackgroundPeer

COMMIT = SimpleNamespace(opened=SimpleNamespace(contributors=()))


@pytest.mark.parametrize("overlap", [0, 2])
def test_speed_counts_weight_without_round_once(overlap):
    """The loop passes the weight again with later training; the speed is that of the later steps."""
    clock, speeds = SimpleNamespace(now=0.0), []
    replica = SimpleNamespace(contents=(0, 0), round=0)
    outcomes = iter([None, None, COMMIT, None, "adopted", None])

    async def exchange(*, steps, weight, loss):
        speeds.append(background_peer._report.speed)
        if overlap:
            await background_peer._until_due()
        outcome = next(outcomes)
        if outcome is not None:
            replica.contents = (0, replica.contents[1] + 1)
        return Outcome(commit=outcome if outcome != "adopted" else None), 0.0

    async def settled():
        pass

    background_peer = BackgroundPeer.__new__(BackgroundPeer)
    background_peer.peer = SimpleNamespace(
        replica=replica,
        environment=SimpleNamespace(now=lambda: clock.now),
        manifest=SimpleNamespace(overlap=overlap),
        workload=SimpleNamespace(steps=lambda speed: 4),
        traffic=lambda: (0, 0),
        rounds=SimpleNamespace(settled=settled, follows=False),
    )
    background_peer._report, background_peer._traffic = SimpleNamespace(speed=0.0), (0, 0)
    background_peer._services = SimpleNamespace(exchange=exchange)
    background_peer._begun, background_peer._due = asyncio.Event(), asyncio.Event()
    background_peer._due.set()
    background_peer._exchanged_at, background_peer._carried = 0.0, 0

    async def live():
        for weight in (40, 80, 120, 40, 80, 40):  # 40 samples in every 4 seconds
            clock.now += 4.0
            await background_peer._exchange(4, weight, None)

    asyncio.run(live())
    assert speeds == [10.0] * 6
