"""Rounds that are under way while training goes on: what methods that overlap the two have in common.

The outer state moves as soon as a round commits, everywhere at once as without overlap, so that a joiner is offered one
state and the next round can begin. The model moves later, when its inner steps allow. Where no verdict has come by then
training waits for it, because the next contribution is measured from it. When that wait is over in vain training goes on, the
announcement stays, and the round is applied whenever it commits.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from thinwire.collectives.outcome import Outcome
from thinwire.collectives.statesync import Fetched
from thinwire.node.rounds import Rounds
from thinwire.node.waiting import cancelled, whole
from thinwire.swarm.protocol import Commit


class OverlappedRounds(Rounds, ABC):
    """What `Rounds` is where everybody waits for the verdict. See `meanwhile` there."""

    _given = _told = _kept = 0
    """Weight that the caller counts at this call; of it, what is announced in the round in progress, and what is not, when a
    commit of what was announced before is applied."""

    _settled: Outcome | None = None
    """A verdict that the outer state follows already, and the model not yet."""

    async def sync(self, *, weight: int, loss: float, speed: float) -> Outcome:
        """See Rounds.sync."""
        self._given, self._kept = weight, 0
        outcome = self._settled
        if outcome is not None and outcome.commit is not None:
            # The call before was cancelled when the outer state had moved: this one reports that round, as one that came late.
            await self._late(weight)
            await whole(self._settle(outcome, outcome.commit))
        else:
            outcome = await super().sync(weight=self._weight(weight), loss=loss, speed=speed)
        return replace(outcome, results=(), kept=self._kept)

    def _weight(self, weight: int) -> int:
        """Of the next contribution, when the caller counts so much."""
        return weight

    def _prepare(self) -> None:
        """What comes before a contribution is encoded. Raises FloatingPointError."""

    def _encode(self) -> tuple[list[memoryview], bytes]:
        try:
            self._prepare()
            return super()._encode()
        except FloatingPointError:
            # No verdict would set all of the model anew.
            self._session.replica.reset()
            self._write(self._session.replica.theta)
            raise

    async def _average(self, average: Callable[[float | None], Coroutine[Any, Any, Outcome]]) -> Outcome:
        """See Rounds: the outcome of what goes on while `meanwhile` does, and as long as without it thereafter."""
        self._told = self._given
        if self.meanwhile is None:
            return await super()._average(average)
        return await self._both(self._fly(average), self.meanwhile)

    async def _both(self, settle: Coroutine[Any, Any, Outcome], meanwhile: Callable[[], Awaitable[None]]) -> Outcome:
        settling = asyncio.ensure_future(settle)
        try:
            await meanwhile()
            await asyncio.wait((settling,), timeout=self._give_up)
            if settling.done():
                return settling.result()
        finally:
            await cancelled(settling)
        return self._settled or Outcome()  # a step that has begun is made

    async def _fly(self, average: Callable[[float | None], Coroutine[Any, Any, Outcome]]) -> Outcome:
        outcome = await average(None)
        if outcome.commit is not None:
            self._settled = outcome
            await whole(self._step(outcome, outcome.commit))
        return outcome

    async def _step(self, outcome: Outcome, commit: Commit) -> None:
        await self._apply(outcome, commit)
        self._session.advance()

    async def _late(self, weight: int) -> None:
        # What was trained since the announcement stays in the model. Who announced nothing forgoes what it has trained.
        self._kept = max(0, self._given - self._told) if self._told else 0

    async def _take_over(self, fetched: Fetched) -> None:
        await super()._take_over(fetched)
        self._settled, self._told = None, 0

    async def _commit(self, outcome: Outcome, commit: Commit) -> None:
        """Apply a commit, whole, as far as that is not done; then the model may follow."""
        if self._settled is None:
            await self._step(outcome, commit)
        self._settled, self._told = None, 0
        await self._follow()

    @abstractmethod
    async def _follow(self) -> None:
        """The replica has made its outer step: let the model do what the method wants."""
