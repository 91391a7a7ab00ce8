"""The time for which training waits for a checkpoint."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from thinwire.node.peer.checkpoint_schedule import CheckpointSchedule
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


def schedule(keeper, events):
    environment = SimpleNamespace(now=lambda: 0.0)
    peer = SimpleNamespace(environment=environment, checkpointer=keeper, replica=SimpleNamespace(round=1), layout=None)
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
