"""Schedule of one fragment: tokens that it still has to send."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from thinwire.node.methods.fragments.fragment_schedule import FragmentSchedule, ModelLock
from thinwire.swarm.manifest.parser import parse

CODEC = "topk(k=64,chunk=4096)|2bit|rice"
MANIFEST = parse(
    f'[outer]\nmethod = "streaming"\nsync_every = 12\nfragments = 3\noverlap = 6\n[exchange]\ncodec = "{CODEC}"'
)


def test_forfeited_training_counts_up_to_the_read_of_the_model():
    """A round has ended without us. Training since `begin` is in the residual, too, so no later weight has its tokens."""
    schedule = FragmentSchedule(MANIFEST, ModelLock(), last=0)

    async def forfeit():
        pass

    replica = SimpleNamespace(error_feedback=True, owes_forfeit=bool)
    schedule.attach(SimpleNamespace(replica=replica, forfeit=forfeit))
    schedule.owed = schedule.sent = 100
    schedule.owed += 20
    asyncio.run(schedule.late(100))
    schedule.owed += 7
    schedule.conclude(0)
    assert schedule.owed == 7


def test_forfeited_training_of_the_turn_in_progress_counts_in_no_later_turn():
    """The residual has the steps that overlap the exchange, too, which are booked with the next turn."""
    schedule = FragmentSchedule(MANIFEST, ModelLock(), last=0)

    async def forfeit():
        pass

    replica = SimpleNamespace(error_feedback=True, owes_forfeit=bool)
    schedule.attach(SimpleNamespace(replica=replica, forfeit=forfeit))
    schedule.owed = schedule.sent = 100
    schedule.unbooked = 20
    asyncio.run(schedule.late(100))
    schedule.conclude(0)
    schedule.owed += 60  # the whole turn
    assert schedule.owed == 40
