"""The time for which training waits for a checkpoint."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from thinwire.node.peer.checkpoint_schedule import SAVE_SECONDS, CheckpointSchedule
from thinwire.node.runtime.asyncio_extra import at_once


class Keeper:
    """A checkpointer that writes the private state when `private` is set, and the rest when `rest` is."""

    digest = None

    def __init__(self, *, waits, fails=False):
        self.waits, self.fails = waits, fails
        self.private, self.rest = asyncio.Event(), asyncio.Event()

    def begin(self, replica, layout, private):
        return True

    async def write(self, layout, private_written):
        await self.private.wait()
        if self.fails:
            raise OSError("the disk is gone")
        private_written()
        await self.rest.wait()


def schedule(keeper, events, *, now=lambda: 0.0, replica=None):
    replica = replica or SimpleNamespace(round=1)
    peer = SimpleNamespace(environment=SimpleNamespace(now=now), checkpointer=keeper, replica=replica, layout=None)
    report = SimpleNamespace(emit=lambda name, fields: events.append(fields["detail"]))
    return CheckpointSchedule(peer, report, at_once)


async def turns(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("waits", [False, True])
def test_training_waits_until_the_private_state_is_written_if_that_is_not_copied(waits):
    async def main():
        keeper, events = Keeper(waits=waits), []
        here = schedule(keeper, events)
        task = asyncio.create_task(here.begin_if_due(lambda: None))
        await turns()
        assert task.done() is not waits
        keeper.private.set()
        await task
        written = asyncio.create_task(here.written())
        await turns()
        assert not written.done(), "the rest is being written"
        keeper.rest.set()
        await written
        assert ["until the private state is written" in one for one in events] == [True] * waits

    asyncio.run(main())


def test_training_does_not_wait_for_a_writer_that_has_failed():
    async def main():
        keeper = Keeper(waits=True, fails=True)
        here = schedule(keeper, [])
        keeper.private.set()
        await here.begin_if_due(lambda: None)
        with pytest.raises(OSError):
            await here.written()

    asyncio.run(main())


def test_checkpoint_is_due_after_a_return_to_an_earlier_round():
    async def main():
        keeper, now, begun, replica = Keeper(waits=False), [0.0], [], SimpleNamespace(round=300)
        keeper.begin = lambda *given: begun.append(replica.round) or True
        keeper.private.set()
        keeper.rest.set()
        here = schedule(keeper, [], now=lambda: now[0], replica=replica)
        await here.begin_if_due(lambda: None)
        for round in (305, 20, 25, 30):
            now[0] += SAVE_SECONDS + 1
            replica.round = round
            await here.begin_if_due(lambda: None)
            await turns()
        assert begun == [300, 20, 30]

    asyncio.run(main())
