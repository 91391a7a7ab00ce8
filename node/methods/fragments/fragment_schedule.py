"""Schedule of one fragment's rounds, each a task beside training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from thinwire.collectives.outcome import Outcome
from thinwire.node.methods.overlapped.schedule import Overlap
from thinwire.node.outer.outer_loop import Average
from thinwire.node.outer.round_loop import Meanwhile
from thinwire.node.runtime.asyncio_extra import uninterrupted
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.method_specs.streaming import Streaming


class ModelLock:
    """Lock of the model between training and rounds, which visit it while training rests."""

    def __init__(self) -> None:
        self._free, self._left, self._visitors = asyncio.Event(), asyncio.Event(), 0
        self._free.set()
        self._left.set()

    async def take(self) -> None:
        """Wait until no visitor is left, then let training continue."""
        self._free.clear()
        await self._left.wait()

    def leave(self) -> None:
        """Let training rest, so that visitors may enter."""
        self._free.set()

    async def visit(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` on the model while training rests."""
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


class FragmentSchedule(Overlap):
    """Rounds of one fragment, one for each call of `OuterLoop.sync`.

    `was_read`: set after the model has been read. `due`: set when the model is to follow. `stepped`: set after the outer
    step of the replica. `last`: number of this fragment's last round in the run, 0 for none. `owed`: tokens trained
    since the fragment was last sent. `sent`: the part of them that is in the round in progress. `unbooked`: tokens trained
    in this turn, which the next turn adds to `owed`; until then `owed` may lack them, and be negative.
    """

    def __init__(self, manifest: Manifest, lock: ModelLock, *, last: int) -> None:
        super().__init__(last=last)
        self.last, self.owed, self.sent, self.unbooked = last, 0, 0, 0
        self._alpha, self._most, self._lock = manifest.method(Streaming).local_mix, manifest.max_weight, lock
        self._overlaps = manifest.overlap > 0
        self.was_read, self.due, self.stepped = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.begun_without_us = self.forgoes = self.fetched = self._unsent = False
        """begun_without_us: the others have completed the round. fetched: a state came after `begin`.

        forgoes: the training up to now will be in no round.
        """

    def begin(self) -> None:
        """Prepare for the next round."""
        self.begun_without_us = self.fetched = self._unsent = False
        for event in (self.was_read, self.due, self.stepped):
            event.clear()

    async def until_due(self) -> None:
        await self.due.wait()

    async def sync(self, weight: int, loss: float, speed: float, meanwhile: Meanwhile | None) -> Outcome:
        """Run one round. `weight`: tokens since this fragment was last sent."""
        session = self.loop.session
        begun = session.current.agreement.commit is not None or session.catch_up.behind.is_set()
        if self._ahead is not None or begun:
            self.begun_without_us = True
            self.was_read.set()
        return await super().sync(weight, loss, speed, self.until_due)

    def _weight(self, weight: int) -> int:
        return min(self._most, weight)

    @property
    def _trains_on(self) -> bool:
        return True

    async def average(self, average: Average) -> Outcome:
        """Announce the round; the model has been read."""
        self.was_read.set()
        return await super().average(average)

    async def _outer_step(self, outcome: Outcome) -> None:
        await super()._outer_step(outcome)
        self.stepped.set()

    async def late(self, weight: int) -> None:
        """Account for a round without us; the tokens that training adds before the model follows are unknown."""
        if self.loop.replica.owes_forfeit(weight):
            await self._lock.visit(self._forfeit)
            return
        if not self.loop.replica.error_feedback:
            await super().late(weight)
        self._unsent = not self._announced

    async def _forfeit(self) -> None:
        await self.loop.forfeit()
        self.sent = self.owed + self.unbooked  # The residual has all training up to now, not only that before `begin`.

    def replaced(self) -> None:
        """Note that the model no longer has any training of this fragment."""
        super().replaced()
        self.fetched = True
        self._start_over()

    def _start_over(self) -> None:
        """Discard the owed tokens; with overlap, tokens trained until the model follows do not count either."""
        self.owed = self.sent = 0
        self.forgoes = self._overlaps

    def conclude(self, kept: int) -> None:
        """End a committed round. `kept`: tokens of it that have to be sent again."""
        self.owed += kept * self._overlaps - self.sent
        self.sent = 0

    async def keep_up(self) -> None:
        """Follow the rounds of other peers, without a contribution and without training, until cancelled."""
        session = self.loop.session
        session.take_part()
        while True:
            outcome = await session.outcome()
            if outcome.commit is not None:
                await uninterrupted(self._go_along(outcome))
            elif not await self.loop.catch_up():
                session.resume_round()
                await session.wait_before_retry()
            session.take_part()

    async def _go_along(self, outcome: Outcome) -> None:
        await self.loop.step(outcome)
        await self.adopt()

    async def adopt(self) -> None:
        """Begin the next round. The model follows when training rests; the round does not wait for that."""
        self.loop.session.advance()
        await self._lock.visit(self.loop.write_theta)

    async def _model_follows(self) -> None:
        """Mix the outer parameters into the model; after the run's last round they replace it."""
        loop = self.loop
        keep = 0.0 if loop.replica.round == self.last else self._alpha

        async def mix() -> None:
            await loop.work(lambda: loop.write(loop.replica.theta, keep=keep))

        await self._lock.visit(mix)
        if self._unsent or not self._overlaps:
            # Without overlap, all counted tokens were trained before the model follows.
            self._start_over()
