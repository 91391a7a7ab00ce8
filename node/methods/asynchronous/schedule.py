"""Schedule of asynchronous methods: a round takes the peers that are ready, and the others train on and follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from thinwire.collectives.consensus.proposal import FAULTS
from thinwire.collectives.outcome import Outcome
from thinwire.node.methods.asynchronous.fedbuff import FedBuffReplica
from thinwire.node.outer.outer_loop import Schedule
from thinwire.node.outer.round_loop import Meanwhile
from thinwire.node.runtime.asyncio_extra import cancelled, whole
from thinwire.swarm.messages.registry import Commit


class Asynchronous(Schedule):
    """Run rounds until one has our contribution. Between `follow` and `rest` follow the rounds of others while training.

    The model is touched in `sync` only. `last`: number of the run's last round. `staleness`: whole steps after which a
    contribution is given up.
    """

    follows = True

    def __init__(self, *, last: int, staleness: float) -> None:
        self._last, self._oldest = last, staleness
        self._told: Callable[[Outcome], None] | None = None
        self._background: asyncio.Task[None] | None = None
        self._sound = True

    @property
    def _replica(self) -> FedBuffReplica:
        return cast(FedBuffReplica, self.loop.replica)

    def follow(self, told: Callable[[Outcome], None]) -> None:
        """Follow the rounds of others from now on, and report them to `told`."""
        self._told = told
        self.resume()

    def resume(self) -> None:
        """Follow again."""
        self._sound = True
        if self._told is not None and self._background is None:
            self._background = asyncio.ensure_future(self._follow(self._told))

    async def rest(self) -> None:
        """Stop following. Raises what has gone wrong in it."""
        following, self._background = self._background, None
        if following is not None:
            if not following.done():
                await cancelled(following)
            if not following.cancelled():
                following.result()

    async def sync(self, weight: int, loss: float, speed: float, meanwhile: Meanwhile | None) -> Outcome:
        """Run rounds until our contribution is in one, or is found to be too old, or comes to nothing."""
        await self.rest()
        try:
            return await self._deliver(weight, loss, speed)
        finally:
            self.resume()

    async def _deliver(self, weight: int, loss: float, speed: float) -> Outcome:
        while self._replica.age <= self._oldest:
            self._sound = True
            outcome = await self.loop.round(weight, loss, speed)
            if outcome.commit is None:
                return outcome if self._sound else replace(outcome, dropped=True)
            if not self._replica.age:
                return outcome
            if self._told is not None:
                self._told(replace(outcome, results=()))
        age = self._replica.age
        self.loop.session.report("unsent", f"begun {age:.1f} steps ago, and outer.staleness is {self._oldest}")
        await self.loop.work(self.loop.start_over)
        return Outcome(dropped=True)

    def replaced(self) -> None:
        """Our contribution was measured from a state that is replaced."""
        self._sound = False

    def not_finite(self) -> None:
        """Start over from the outer parameters."""
        self._sound = False
        self.loop.start_over()

    def trains_on(self, commit: Commit) -> bool:
        """Whether a commit leaves our model as it is: our work is neither in it nor found unfit, and a round is to follow."""
        opened, me = commit.opened, self.loop.session.me
        unfit = any(entry.peer == me and entry.reason in FAULTS for entry in opened.excluded)
        return not unfit and opened.round != self._last and all(entry.peer != me for entry in opened.contributors)

    async def _follow(self, told: Callable[[Outcome], None]) -> None:
        while True:
            outcome = await self.loop.session.outcome()
            commit = outcome.commit
            if commit is None or not self.trains_on(commit):
                return  # the next call sees to it
            await whole(self._pass(outcome, told))

    async def _pass(self, outcome: Outcome, told: Callable[[Outcome], None]) -> None:
        await self.commit(outcome)
        told(replace(outcome, results=()))

    async def commit(self, outcome: Outcome) -> None:
        """Make the outer step. The model starts anew if our work was in it, or will be in no round."""
        assert outcome.commit is not None
        await self.loop.step(outcome)
        if not self._sound or not self.trains_on(outcome.commit):
            await self.loop.work(self.loop.start_over)
        self.loop.session.advance()
