"""Schedule of methods that train while a round is under way.

The outer state moves as soon as a round commits, everywhere at once as without overlap, so that a joiner is offered one state
and the next round can begin. The model moves later, when its inner steps allow. If the round has not committed by then,
training waits for it, because the next contribution is measured from its result. If that wait is given up, training continues,
the announcement stays, and the round is applied whenever it commits.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from thinwire.collectives.outcome import Outcome
from thinwire.node.outer.outer_loop import Average, Schedule
from thinwire.node.outer.round_loop import Meanwhile
from thinwire.node.runtime.asyncio_extra import cancelled, whole


class Overlap(Schedule):
    """Train while a round is under way. The replica's `next_start` sets the model when its contribution has been read.

    `last`: number of the run's last round, 0 for none. After it the model is the outer parameters; nothing is trained while it
    is under way, because no later round would take that.
    """

    def __init__(self, *, last: int) -> None:
        self._last = last
        self._meanwhile: Meanwhile | None = None
        self._given = self._told = self._kept = 0
        """Weight of this call; the part of it that is announced in the round in progress; and the part that is not, when a
        commit of an earlier announcement is applied.
        """
        self._ahead: Outcome | None = None
        """A round that the outer state has followed already, and the model not yet."""

    async def sync(self, weight: int, loss: float, speed: float, meanwhile: Meanwhile | None) -> Outcome:
        """Run one round; report what of `weight` is not in it but still in the model as `kept`."""
        self._given, self._kept, self._meanwhile = weight, 0, meanwhile
        outcome = self._ahead
        if outcome is not None:
            # The call before was cancelled when the outer state had moved: this one reports that round, as one that came late.
            await self.late(weight)
            await whole(self.commit(outcome))
        else:
            outcome = await self.loop.round(self._weight(weight), loss, speed)
        return replace(outcome, kept=self._kept)

    def _weight(self, weight: int) -> int:
        """Weight of the next contribution when the caller counts `weight`."""
        return weight

    @property
    def _trains_on(self) -> bool:
        """Whether training continues while the next round is under way."""
        return self.loop.replica.round + 1 != self._last

    def not_finite(self) -> None:
        """Start over: no commit would set all of the model."""
        self.loop.start_over()

    async def average(self, average: Average) -> Outcome:
        """Train while the round is under way, then wait for it as long as without overlap."""
        self._told = self._given
        if self._meanwhile is None or not self._trains_on:
            return await super().average(average)
        settling = asyncio.ensure_future(self._fly(average))
        try:
            await self._meanwhile()
            await asyncio.wait((settling,), timeout=self.loop.give_up)
            if settling.done():
                return settling.result()
        finally:
            await cancelled(settling)
        return self._ahead or Outcome()  # a step that has begun is made

    async def _fly(self, average: Average) -> Outcome:
        outcome = await average(None)
        if outcome.commit is not None:
            self._ahead = outcome
            await whole(self._move(outcome))
        return outcome

    async def _move(self, outcome: Outcome) -> None:
        """Move the outer state and begin the next round."""
        await self.loop.step(outcome)
        self.loop.session.advance()

    async def late(self, weight: int) -> None:
        """What was trained since the announcement stays in the model. Work that was not announced at all is lost."""
        if self.loop.replica.error_feedback:
            await super().late(weight)
        else:
            self._kept = max(0, self._given - self._told) if self._told else 0

    def replaced(self) -> None:
        """Nothing of what was announced is in the model any more."""
        self._ahead, self._told = None, 0

    async def commit(self, outcome: Outcome) -> None:
        """Move the outer state, unless it has moved already; then let the model follow."""
        if self._ahead is None:
            await self._move(outcome)
        self._ahead, self._told = None, 0
        await self._model_follows()

    async def _model_follows(self) -> None:
        """Change the model after an outer step: only the run's last one."""
        if self.loop.replica.round == self._last:
            await self.loop.write_theta()
