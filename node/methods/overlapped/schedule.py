"""Schedule of methods that train while a round is in progress.

The outer step is made when the round commits, so that a joiner is offered one state and the next round can begin. The
model follows when its inner steps allow. If the round has not committed by then, training waits, because the next
contribution is measured from its result. If that wait is given up, training continues, and the announced round is
applied when it commits.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from thinwire.collectives.outcome import Outcome
from thinwire.node.outer.outer_loop import Average, Schedule
from thinwire.node.outer.round_loop import Meanwhile
from thinwire.node.runtime.asyncio_extra import cancelled, uninterrupted


class Overlap(Schedule):
    """Train while a round is in progress; then the replica's `next_start` sets the model.

    `last`: number of the run's last round, 0 for none. No training overlaps that round, since no later round would take
    it; after it the model is set to the outer parameters.
    """

    merges = False

    def __init__(self, *, last: int) -> None:
        self._last = last
        self._meanwhile: Meanwhile | None = None
        self._given = self._announced = self._kept = 0
        """given: weight of this call. announced: its part that is announced in the round in progress.

        kept: its other part, if the commit of an earlier announcement is applied.
        """
        self._ahead: Outcome | None = None
        """Outcome of a round whose outer step has been made, but which the model has not followed."""

    async def sync(self, weight: int, loss: float, speed: float, meanwhile: Meanwhile | None) -> Outcome:
        """Run one round; `kept` of the outcome is the part of `weight` that is only in the model."""
        self._given, self._kept, self._meanwhile = weight, 0, meanwhile
        outcome = self._ahead
        if outcome is not None:
            # The previous call was cancelled after the outer step: report that round now.
            await self.late(weight)
            await uninterrupted(self.commit(outcome))
        else:
            outcome = await self.loop.round(self._weight(weight), loss, speed)
        return replace(outcome, kept=self._kept)

    def _weight(self, weight: int) -> int:
        """Return the weight of the next contribution, given that of the call."""
        return weight

    @property
    def _trains_on(self) -> bool:
        """True if training continues while the next round is in progress."""
        return self.loop.replica.round + 1 != self._last

    def not_finite(self) -> None:
        """Start from the outer parameters: no commit would set all of the model."""
        self.loop.start_over()

    async def average(self, average: Average) -> Outcome:
        """Train while the round is in progress, then wait for it as long as without overlap."""
        self._announced = self._given
        if self._meanwhile is None or not self._trains_on:
            return await super().average(average)
        settling = asyncio.ensure_future(self._average_and_step(average))
        try:
            await self._meanwhile()
            await self.loop.session.until_given_up((settling,), self.loop.give_up)
            if settling.done():
                return settling.result()
        finally:
            await cancelled(settling)
        return self._ahead or Outcome()  # a step that has begun is completed

    async def _average_and_step(self, average: Average) -> Outcome:
        outcome = await average(None)
        if outcome.commit is not None:
            self._ahead = outcome
            await uninterrupted(self._outer_step(outcome))
        return outcome

    async def _outer_step(self, outcome: Outcome) -> None:
        """Make the outer step and begin the next round."""
        await self.loop.step(outcome)
        self.loop.session.advance()

    async def late(self, weight: int) -> None:
        """Leave the training since the announcement in the model.

        Training that was never announced is lost.
        """
        if self.loop.replica.error_feedback:
            await super().late(weight)
        else:
            self._kept = max(0, self._given - self._announced) if self._announced else 0

    def replaced(self) -> None:
        """Note that the model no longer has the announced training."""
        self._ahead, self._announced = None, 0

    async def commit(self, outcome: Outcome) -> None:
        """Make the outer step, unless it has been made already; then let the model follow."""
        if self._ahead is None:
            await self._outer_step(outcome)
        self._ahead, self._announced = None, 0
        await self._model_follows()

    async def _model_follows(self) -> None:
        """Set the model after an outer step: only after the last of the run."""
        if self.loop.replica.round == self._last:
            await self.loop.write_theta()
