"""The pace of an actor: steps of a given duration that end when the others have committed."""

import asyncio
import math

import pytest
from thinwire.node.training.learner import StepReport
from thinwire.sims.engine import virtual_loop
from thinwire.sims.processes.peer_process import ActorPart, PacedLearner


class Quick:
    """Learner whose steps take `seconds` and lower the loss by 1 each."""

    def __init__(self, seconds):
        self.seconds, self.made = seconds, 0

    async def steps(self, n, stop):
        await asyncio.sleep(n * self.seconds)
        self.made += n
        return StepReport(n, 10.0 - self.made, 10.0 - self.made, 7 * n, n * self.seconds)


@pytest.mark.parametrize(("own", "lasts"), [(0.1, 2.0), (0.75, 3.0)])
def test_actor_step_lasts_at_least_its_given_time(own, lasts):
    async def main():
        began = virtual_loop.current().time()
        report = await PacedLearner(Quick(own), 0.5).steps(4, asyncio.Event())
        assert virtual_loop.current().time() - began == pytest.approx(lasts) == report.seconds
        assert (report.steps, report.loss, report.last, report.tokens) == (4, 7.5, 6.0, 28)

    virtual_loop.run(main(), seed=1)


def test_actor_stop_ends_the_wait():
    async def main():
        loop, stop, quick = virtual_loop.current(), asyncio.Event(), Quick(0.1)
        loop.call_later(1.2, stop.set)
        report = await PacedLearner(quick, 0.5).steps(9, stop)
        assert loop.time() == pytest.approx(1.2) and report.steps == quick.made == 3
        nothing = await PacedLearner(quick, 0.5).steps(9, stop)
        assert nothing.steps == 0 and math.isnan(nothing.loss) and quick.made == 3

    virtual_loop.run(main(), seed=1)


def test_actor_shares_no_memory_because_its_links_are_emulated(tmp_path):
    part = ActorPart(
        "a", str(tmp_path), "run.toml", "text", "127.0.0.1", 1, (2, 3), "127.0.0.1:9", 0.1, "stub", 10, 1, 2
    )
    assert part.config().shared_memory is False
