"""An actor's pace: steps that last as long as they are told, and end when the others have gone on."""

import asyncio
import math

import pytest
from thinwire.node.learner import StepReport
from thinwire.sims import clock
from thinwire.sims.actor import Paced


class Quick:
    """A learner whose steps take `seconds` and lose 1 each."""

    def __init__(self, seconds):
        self.seconds, self.made = seconds, 0

    async def steps(self, n, stop):
        await asyncio.sleep(n * self.seconds)
        self.made += n
        return StepReport(n, 10.0 - self.made, 10.0 - self.made, 7 * n, n * self.seconds)


@pytest.mark.parametrize(("own", "lasts"), [(0.1, 2.0), (0.75, 3.0)])
def test_a_step_lasts_as_long_as_told_or_as_it_needs(own, lasts):
    async def main():
        began = clock.current().time()
        report = await Paced(Quick(own), 0.5).steps(4, asyncio.Event())
        assert clock.current().time() - began == pytest.approx(lasts) == report.seconds
        assert (report.steps, report.loss, report.last, report.tokens) == (4, 7.5, 6.0, 28)

    clock.run(main(), seed=1)


def test_a_stop_cuts_the_wait_short():
    async def main():
        loop, stop, quick = clock.current(), asyncio.Event(), Quick(0.1)
        loop.call_later(1.2, stop.set)
        report = await Paced(quick, 0.5).steps(9, stop)
        assert loop.time() == pytest.approx(1.2) and report.steps == quick.made == 3
        nothing = await Paced(quick, 0.5).steps(9, stop)
        assert nothing.steps == 0 and math.isnan(nothing.loss) and quick.made == 3

    clock.run(main(), seed=1)
