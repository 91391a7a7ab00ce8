"""Schedule of asynchronous methods: peers without a contribution in a round train and follow it."""

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
from thinwire.node.runtime.asyncio_extra import cancelled, uninterrupted
from thinwire.swarm.messages.registry import Commit


class Asynchronous(Schedule):
    """Run rounds until one has our contribution; follow the rounds of other peers while training.

    Only `sync` touches the model. `last`: number of the run's last round. `staleness`: maximum age of a contribution in
    whole steps.
    """

    follows = True
    merges = False

    def __init__(self, *, last: int, staleness: float) -> None:
        self._last, self._oldest = last, staleness
        self._report: Callable[[Outcome], None] | None = None
        self._background: asyncio.Task[None] | None = None
        self._start_valid = True
        """False if `start` of the replica belongs to a state or a model that was replaced."""

    @property
    def _replica(self) -> FedBuffReplica:
        return cast(FedBuffReplica, self.loop.replica)

    def follow(self, report: Callable[[Outcome], None]) -> None:
        """Start to follow the rounds of other peers, and report them to `report`."""
        self._report = report
        self.resume()

    def resume(self) -> None:
        self._start_valid = True
        if self._report is not None and self._background is None:
            self._background = asyncio.ensure_future(self._follow(self._report))

    async def rest(self) -> None:
        """Stop following. Raises the error that ended it, if any."""
        following, self._background = self._background, None
        if following is not None:
            if not following.done():
                await cancelled(following)
            if not following.cancelled():
                following.result()

    async def sync(self, weight: int, loss: float, speed: float, meanwhile: Meanwhile | None) -> Outcome:
        """Run rounds until one has our contribution, or the contribution is too old or fails."""
        await self.rest()
        try:
            return await self._deliver(weight, loss, speed)
        finally:
            self.resume()

    async def _deliver(self, weight: int, loss: float, speed: float) -> Outcome:
        while self._replica.age <= self._oldest:
            self._start_valid = True
            outcome = await self.loop.round(weight, loss, speed)
            if outcome.commit is None:
                return outcome if self._start_valid else replace(outcome, dropped=True)
            if not self._replica.age:
                return outcome
            if self._report is not None:
                self._report(replace(outcome, results=()))
        age = self._replica.age
        self.loop.session.report("unsent", f"begun {age:.1f} steps ago, and outer.staleness is {self._oldest}")
        await self.loop.work(self.loop.start_over)
        return Outcome(dropped=True)

    def replaced(self) -> None:
        """Note that `start` belongs to the replaced state."""
        self._start_valid = False

    def not_finite(self) -> None:
        self._start_valid = False
        self.loop.start_over()

    def trains_on(self, commit: Commit) -> bool:
        """Return True if our work is neither named nor rejected by the commit, and another round follows."""
        proposal, me = commit.proposal, self.loop.session.me
        unfit = any(entry.peer == me and entry.reason in FAULTS for entry in proposal.excluded)
        return not unfit and proposal.round != self._last and all(entry.peer != me for entry in proposal.contributors)

    async def _follow(self, report: Callable[[Outcome], None]) -> None:
        while True:
            outcome = await self.loop.session.outcome()
            commit = outcome.commit
            if commit is None or not self.trains_on(commit):
                return  # the next call of `sync` handles it
            await uninterrupted(self._commit_and_report(outcome, report))

    async def _commit_and_report(self, outcome: Outcome, report: Callable[[Outcome], None]) -> None:
        await self.commit(outcome)
        report(replace(outcome, results=()))

    async def commit(self, outcome: Outcome) -> None:
        """Make the outer step. The model starts from θ̄ if our work was in the round, or can be in none."""
        assert outcome.commit is not None
        await self.loop.step(outcome)
        if not self._start_valid or not self.trains_on(outcome.commit):
            await self.loop.work(self.loop.start_over)
        self.loop.session.advance()
