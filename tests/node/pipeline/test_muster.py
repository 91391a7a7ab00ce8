"""Who takes part in a group's steps, and for whom it waits: an origin without a network, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from aids.tray import Tray
from thinwire.node.pipeline.crew import Crew
from thinwire.node.pipeline.muster import MOMENT, SETTLED, Muster
from thinwire.sims import clock
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import Post

ME, FIRST, SECOND, OTHER = (bytes([i]) * 32 for i in range(4))
WAIT = 30.0


class Origin:
    """What a muster needs of an origin."""

    def __init__(self):
        self.next_step, self.crew, self.told = 0, Crew({}), []

    def catch_up(self, peer):
        """Tell it where the others are."""

    def lost(self, peer, *, gone):
        """See Handler."""


def play(work):
    async def main():
        origin = Origin()
        muster = Muster(
            ME,
            origin,
            3,
            outbox=Tray(),
            now=clock.current().time,
            wait=WAIT,
            emit=lambda name, _: origin.told.append(name),
        )
        await work(muster, origin)

    clock.run(main(), seed=1)


def post(muster, peer, step, until, stage):
    muster.routed(peer, Frame(Post(step, until, stage)))


async def turn(muster, origin, *lagging):
    """A turn of four steps for which two hosts are ready; whether there are steps, and the seconds that it took."""
    began = clock.current().time()
    for peer, stage in ((FIRST, 1), (SECOND, 2)):
        post(muster, peer, origin.next_step, origin.next_step + 4, stage)
    for peer in lagging:
        post(muster, peer, 0, 0, 1)
    found = await muster.gather(asyncio.Event())
    origin.next_step += 4
    return found, clock.current().time() - began


def test_who_is_late_time_and_again_is_waited_for_ever_less():
    async def work(muster, origin):
        turns = [await turn(muster, origin, OTHER) for _ in range(40)]
        assert all(found for found, _ in turns)
        assert [number for number, (_, seconds) in enumerate(turns) if seconds] == [0, 3, 8, 17, 34]
        assert all(seconds in (0.0, pytest.approx(WAIT)) for _, seconds in turns)
        # It is ready all the same when it says so.
        post(muster, OTHER, origin.next_step, origin.next_step + 4, 1)
        assert await turn(muster, origin) == (True, 0.0) and origin.crew.holders[1] == [FIRST, OTHER]

    play(work)


def test_the_only_one_of_its_stage_is_waited_for_however_late_it_was():
    async def work(muster, origin):
        for seconds in (2 * WAIT, WAIT / 2, 2 * WAIT, WAIT / 2):
            post(muster, FIRST, origin.next_step, origin.next_step + 4, 1)
            post(muster, OTHER, origin.next_step, origin.next_step, 2)
            later = clock.current().call_later(seconds, post, muster, OTHER, origin.next_step, origin.next_step + 4, 2)
            assert await muster.gather(asyncio.Event()) == (seconds < WAIT)
            later.cancel()
            origin.next_step += 4

    play(work)


def test_who_is_past_our_step_is_not_waited_for():
    """It cannot go back: with another of its stage there are steps at once, without one there are none."""

    async def work(muster, origin):
        post(muster, OTHER, 100, 104, 1)
        assert await turn(muster, origin) == (True, 0.0) and origin.crew.holders[1] == [FIRST]
        muster.lost(FIRST, gone=True)
        post(muster, SECOND, origin.next_step, origin.next_step + 4, 2)
        began = clock.current().time()
        assert not await muster.gather(asyncio.Event()) and clock.current().time() - began <= MOMENT

    play(work)


def test_who_says_now_this_stage_now_that_is_heard_once_in_a_while():
    async def work(muster, origin):
        post(muster, FIRST, 0, 4, 1)
        for number in range(100):
            post(muster, FIRST, 0, 4, 2 - number % 2)
        assert muster.hosts == {1: [FIRST], 2: []} and origin.told == ["host"]
        await asyncio.sleep(SETTLED)
        post(muster, FIRST, 0, 4, 2)
        assert muster.hosts == {1: [], 2: [FIRST]} and origin.told == ["host", "host lost", "host"]
        muster.lost(FIRST, gone=True)
        post(muster, FIRST, 0, 4, 1)
        assert muster.hosts == {1: [FIRST], 2: []}

    play(work)
