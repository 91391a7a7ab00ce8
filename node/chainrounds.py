"""Rounds of one fragment, where each has its own: a round is a task beside training, and the model follows when it is due.

The model is touched between inner steps only: see `Floor`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from thinwire.collectives.outcome import Outcome
from thinwire.collectives.statesync import Fetched
from thinwire.node.outer import Read, Write
from thinwire.node.overlap import OverlappedRounds
from thinwire.node.session import Session
from thinwire.node.waiting import Work, whole
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import Commit


class Floor:
    """Whose the model is: of who trains, or of rounds that read or set it, which do so while training rests."""

    def __init__(self) -> None:
        self._free, self._left, self._visitors = asyncio.Event(), asyncio.Event(), 0
        self._free.set()
        self._left.set()

    async def take(self) -> None:
        """Training goes on, as soon as those have left who are there."""
        self._free.clear()
        await self._left.wait()

    def leave(self) -> None:
        """Training rests."""
        self._free.set()

    async def visit(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do something with the model while training rests."""
        while not self._free.is_set():
            await self._free.wait()
        self._visitors += 1
        self._left.clear()
        try:
            await work()
        finally:
            self._visitors -= 1
            if not self._visitors:
                self._left.set()


class ChainRounds(OverlappedRounds):
    """Rounds of one fragment, one call of `sync` for each. `aired`: the model is not read any more; `due`: it shall follow;
    `moved`: the outer state has made its step. `last`: the number of the run's last round of this fragment, 0: none. `owed`:
    tokens since what was last sent of it and counts; of these, `sent` are in the round under way.
    """

    def __init__(
        self, session: Session, manifest: Manifest, *, read: Read, write: Write, work: Work, floor: Floor, last: int
    ) -> None:
        super().__init__(session, manifest, read=read, write=write, work=work)
        self.session, self.last, self.owed, self.sent = session, last, 0, 0
        self._alpha, self._most, self._floor = manifest.outer.alpha, manifest.max_weight, floor
        self._overlaps = manifest.overlap > 0
        self.aired, self.due, self.moved = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.meanwhile = self._until_due
        self.late = self.forgoes = self.fetched = self._unsent = False
        """Whether the others have had the round without us; whether what was trained up to now will be in no round; and whether
        the state was fetched since `begin`.
        """

    def begin(self) -> None:
        """Before `sync`."""
        self.late = self.fetched = self._unsent = False
        for event in (self.aired, self.due, self.moved):
            event.clear()

    async def _until_due(self) -> None:
        await self.due.wait()

    async def sync(self, *, weight: int, loss: float, speed: float) -> Outcome:
        """See Rounds.sync. `weight`: the tokens since what was last sent of this fragment."""
        current, behind = self.session.current, self.session.following.behind
        if self._settled is not None or current.agreement.commit is not None or behind.is_set():
            self.late = True
            self.aired.set()
        return await super().sync(weight=weight, loss=loss, speed=speed)

    def _weight(self, weight: int) -> int:
        return min(self._most, weight)

    async def _average(self, average: Callable[[float | None], Coroutine[Any, Any, Outcome]]) -> Outcome:
        self.aired.set()
        return await super()._average(average)

    async def _step(self, outcome: Outcome, commit: Commit) -> None:
        await super()._step(outcome, commit)
        self.moved.set()

    async def _late(self, weight: int) -> None:
        """See OverlappedRounds. Training may go on before the model follows: nobody knows how much of it what came since is."""
        await super()._late(weight)
        self._unsent = not self._told

    async def _take_over(self, fetched: Fetched) -> None:
        await super()._take_over(fetched)
        self.fetched = True
        self._start_over()

    def _start_over(self) -> None:
        """Nothing of what was trained is in the model any more; with overlap not all of what comes next will be."""
        self.owed = self.sent = 0
        self.forgoes = self._overlaps

    def land(self, kept: int) -> None:
        """The round is over and counts. `kept`: tokens that it was about and that have to be sent once more."""
        self.owed = max(0, self.owed - self.sent + kept * self._overlaps)
        self.sent = 0

    async def end(self) -> None:
        """The run is over: the model is the outer parameters."""
        await self._work(lambda: self._write(self.session.replica.theta))

    async def keep_up(self) -> None:
        """Follow the rounds of others, without a contribution to any, until it is cancelled. Nothing is trained meanwhile."""
        session = self.session
        session.take_part()
        while True:
            outcome = await session.outcome()
            if outcome.commit is not None:
                await whole(self._go_along(outcome, outcome.commit))
            elif not await self._catch_up():
                session.again()
                await session.pause()
            session.take_part()

    async def _go_along(self, outcome: Outcome, commit: Commit) -> None:
        await self._apply(outcome, commit)
        await self._adopt()

    async def _adopt(self) -> None:
        """See Rounds. The model follows when training rests; the next round does not wait for that."""
        self.session.advance()

        async def write() -> None:
            await self._work(lambda: self._write(self.session.replica.theta))

        await self._floor.visit(write)

    async def _follow(self) -> None:
        replica = self.session.replica
        keep = 0.0 if replica.round == self.last else self._alpha

        async def mix() -> None:
            await self._work(lambda: self._write(replica.theta, keep=keep))

        await self._floor.visit(mix)
        if (
            self._unsent or not self._overlaps
        ):  # without overlap all that was counted was trained before the model follows
            self._start_over()
