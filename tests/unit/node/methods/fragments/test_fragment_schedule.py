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


def forfeited(trained: int, unbooked: int = 0) -> FragmentSchedule:
    """Return a schedule whose round has ended without us. `trained`: tokens since `begin`, beside 100 before it."""
    schedule = FragmentSchedule(MANIFEST, ModelLock(), last=0)

    async def forfeit() -> None:
        pass

    replica = SimpleNamespace(error_feedback=True, owes_forfeit=bool)
    schedule.attach(SimpleNamespace(replica=replica, forfeit=forfeit))
    schedule.owed = schedule.sent = 100
    schedule.owed += trained
    schedule.unbooked = unbooked
    asyncio.run(schedule.late(100))
    return schedule


def test_forfeited_training_counts_up_to_the_read_of_the_model():
    """Training since `begin` is in the residual, too, so no later weight has its tokens."""
    schedule = forfeited(20)
    schedule.owed += 7
    schedule.conclude(0)
    assert schedule.owed == 7


def test_forfeited_training_of_the_turn_in_progress_counts_in_no_later_turn():
    """The residual has the steps that overlap the exchange, too, which are booked with the next turn."""
    schedule = forfeited(0, unbooked=20)
    schedule.conclude(0)
    schedule.owed += 60  # the whole turn
    assert schedule.owed == 40
