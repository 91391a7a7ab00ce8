"""Hosts that take part in a group's steps, and hosts that steps wait for; an origin without a network."""

from __future__ import annotations

import asyncio

import pytest
from kit.rounds.round_harness import FakeSendQueue
from thinwire.node.pipeline.groups.host_readiness import MOMENT, SETTLED, HostReadiness
from thinwire.node.pipeline.step.stage_holders import StageHolders
from thinwire.node.pipeline.step.step_context import StepContext
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import StageAssignment

ME, FIRST, SECOND, OTHER = (bytes([i]) * 32 for i in range(4))
WAIT = 30.0


class Origin:
    """Stub of an origin for HostReadiness."""

    def __init__(self):
        self.next_step, self.stage_holders, self.told = 0, StageHolders({}), []

    def catch_up(self, peer):
        """Report the round of the others."""

    def on_link_down(self, peer, *, gone):
        """Report the loss of a link."""


def play(work):
    async def main():
        origin = Origin()
        now, emit = virtual_loop.current().time, lambda name, _: origin.told.append(name)
        readiness = HostReadiness(StepContext(ME, FakeSendQueue(), now, at_once, emit), origin, 3, wait=WAIT)
        await work(readiness, origin)

    virtual_loop.run(main(), seed=1)


def post(readiness, peer, step, until, stage):
    readiness.on_frame(peer, Frame(StageAssignment(step, until, stage)))


async def turn(readiness, origin, *lagging):
    """Play a turn of four steps that waits for two hosts; return whether there are steps, and the seconds."""
    began = virtual_loop.current().time()
    for peer, stage in ((FIRST, 1), (SECOND, 2)):
        post(readiness, peer, origin.next_step, origin.next_step + 4, stage)
    for peer in lagging:
        post(readiness, peer, 0, 0, 1)
    found = await readiness.gather(asyncio.Event())
    origin.next_step += 4
    return found, virtual_loop.current().time() - began


def test_repeatedly_late_host_is_waited_for_less():
    async def work(readiness, origin):
        turns = [await turn(readiness, origin, OTHER) for _ in range(40)]
        assert all(found for found, _ in turns)
        assert [number for number, (_, seconds) in enumerate(turns) if seconds] == [0, 3, 8, 17, 34]
        assert all(seconds in (0.0, pytest.approx(WAIT)) for _, seconds in turns)
        # It becomes ready nevertheless when it announces it.
        post(readiness, OTHER, origin.next_step, origin.next_step + 4, 1)
        assert await turn(readiness, origin) == (True, 0.0) and origin.stage_holders.holders[1] == [FIRST, OTHER]

    play(work)


def test_only_host_of_a_stage_is_always_waited_for():
    async def work(readiness, origin):
        for seconds in (2 * WAIT, WAIT / 2, 2 * WAIT, WAIT / 2):
            post(readiness, FIRST, origin.next_step, origin.next_step + 4, 1)
            post(readiness, OTHER, origin.next_step, origin.next_step, 2)
            later = virtual_loop.current().call_later(
                seconds, post, readiness, OTHER, origin.next_step, origin.next_step + 4, 2
            )
            assert await readiness.gather(asyncio.Event()) == (seconds < WAIT)
            later.cancel()
            origin.next_step += 4

    play(work)


def test_host_past_our_step_is_not_waited_for():
    """It cannot go back: with another host of its stage there are steps at once, otherwise none."""

    async def work(readiness, origin):
        post(readiness, OTHER, 100, 104, 1)
        assert await turn(readiness, origin) == (True, 0.0) and origin.stage_holders.holders[1] == [FIRST]
        readiness.on_link_down(FIRST, gone=True)
        post(readiness, SECOND, origin.next_step, origin.next_step + 4, 2)
        began = virtual_loop.current().time()
        assert not await readiness.gather(asyncio.Event()) and virtual_loop.current().time() - began <= MOMENT

    play(work)


def test_host_that_changes_its_stage_often_is_rate_limited():
    async def work(readiness, origin):
        post(readiness, FIRST, 0, 4, 1)
        for number in range(100):
            post(readiness, FIRST, 0, 4, 2 - number % 2)
        assert readiness.hosts == {1: [FIRST], 2: []} and origin.told == ["host_joined"]
        await asyncio.sleep(SETTLED)
        post(readiness, FIRST, 0, 4, 2)
        assert readiness.hosts == {1: [], 2: [FIRST]} and origin.told == ["host_joined", "host_lost", "host_joined"]
        readiness.on_link_down(FIRST, gone=True)
        post(readiness, FIRST, 0, 4, 1)
        assert readiness.hosts == {1: [FIRST], 2: []}

    play(work)
