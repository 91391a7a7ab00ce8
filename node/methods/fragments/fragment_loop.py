"""Loop over the rounds of several fragments; each round is a separate task while training continues.

In its turn a fragment's Δ is announced. τ inner steps later (`lag` turns and `overlap` steps, with H / P steps between
turns) the loop waits for the commit, and the model follows. While the round of a fragment is not over, the loop begins no
other round, until one patience after one of these events:

- the round of a fragment that was sent later is over;
- the other peers have completed a round of a fragment that was not sent here;
- a peer that this round waits for has announced a fragment that was not sent here: otherwise the two peers could wait for
  each other in two fragments.

A round without a quorum delays no other one, so several fragments may wait for a quorum at the same time. The model follows
a round that ends later between two inner steps; its fragment is not sent again before that.

No peer waits for a peer that is late in its turns. A peer whose round has begun without it skips as many of its next inner
steps as make up for the delay (lateness.py). Weights are tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from thinwire.collectives.outcome import Outcome
from thinwire.collectives.timing import TICK
from thinwire.node.methods.fragments.fragment_replicas import rounds_of, turn_of
from thinwire.node.methods.fragments.fragment_schedule import FragmentSchedule, ModelLock
from thinwire.node.methods.fragments.fragment_sessions import FragmentSessions
from thinwire.node.methods.fragments.lateness import Lateness
from thinwire.node.outer.outer_loop import OuterLoop
from thinwire.node.outer.round_loop import Lost, Meanwhile, RoundLoop
from thinwire.node.outer.round_session import RoundSession
from thinwire.node.runtime.asyncio_extra import Work, cancelled
from thinwire.node.state.replica_buffers import ParameterWrite, Read
from thinwire.swarm.identity.identity import short
from thinwire.swarm.manifest.manifest import Manifest


@dataclass(slots=True)
class _PendingRound:
    """A round in progress, sent in `turn` at time `at` (seconds). left: the others no longer wait for it."""

    schedule: FragmentSchedule
    turn: int
    task: asyncio.Task[Outcome]
    at: float
    left: bool = False


class FragmentLoop(RoundLoop):
    """Loop over the turns of the fragments; each call of `sync` is one turn."""

    overlaps_calls = True
    _session: FragmentSessions

    def __init__(
        self,
        session: FragmentSessions,
        manifest: Manifest,
        *,
        read: Read,
        write: ParameterWrite,
        work: Work,
        beside: Work | None = None,
    ) -> None:
        self._session, self._count, self._lag = session, manifest.outer.fragment_count, manifest.lag
        self._lock, self._turn = ModelLock(), 0
        self._report: Callable[[Outcome], None] = lambda outcome: None
        self.schedules: dict[int, FragmentSchedule] = {}
        for number, one in session.sessions.items():
            fragment, last = session.replica.fragments[number], rounds_of(number, manifest.run.rounds, self._count)
            self.schedules[number] = schedule = FragmentSchedule(manifest, self._lock, last=last)
            OuterLoop(one, schedule, read=fragment.reader(read), write=fragment.writer(write), work=work)
        self._bounded, self._overlap_tokens = manifest.run.rounds > 0, manifest.overlap * manifest.step_tokens
        self._pending: dict[int, _PendingRound] = {}
        # In a pipeline group all peers make the steps of the origin.
        most = 0 if manifest.pipeline.stages else manifest.pace - 1
        self._lateness = Lateness(steps=manifest.pace, most=most)

    # --- RoundLoop

    def follow(self, report: Callable[[Outcome], None]) -> None:
        """Report rounds that end beside the one that `sync` returns to `report`."""
        self._report = report

    async def rest(self) -> None:
        """Cancel the rounds in progress."""
        self._lock.leave()
        in_progress, self._pending = self._pending, {}
        for pending in in_progress.values():
            if not pending.task.done():
                await cancelled(pending.task)

    async def enter(self, *, tries: int = 0, alone: int = 0, lost: Lost | None = None) -> bool:
        """Enter the rounds of all held fragments in parallel, see `RoundLoop.enter`.

        Fragments that are entered already follow their rounds meanwhile. Otherwise this peer would offer an old state
        and delay rounds of which it is a member.
        """
        catch_up: list[asyncio.Task[None]] = []

        async def into(schedule: FragmentSchedule) -> bool:
            if not await schedule.loop.enter(tries=tries, alone=alone, lost=lost):
                return False
            catch_up.append(asyncio.ensure_future(schedule.keep_up()))
            return True

        entering = [asyncio.ensure_future(into(schedule)) for schedule in self.schedules.values()]
        try:
            if not all(await asyncio.gather(*entering)):
                return False
            for task in catch_up:
                if task.done():
                    task.result()
        finally:
            for each in (*entering, *catch_up):
                await cancelled(each)
        for schedule in self.schedules.values():
            schedule.owed, schedule.forgoes = 0, False  # no training has happened yet
        self._set_session_ahead()
        return True

    async def sync(self, *, weight: int, loss: float, speed: float, meanwhile: Meanwhile | None = None) -> Outcome:
        """Run one turn: send its fragment, train, then wait for the fragment that is due.

        `weight`: tokens since the last turn. Returns the outcome of the fragment that was due, always with `taken`,
        since each fragment counts the tokens until they are sent; without a commit if none was due, or if its round is
        not over.
        """
        for schedule in self.schedules.values():
            schedule.owed = max(0, schedule.owed + weight * (not schedule.forgoes))
            schedule.forgoes, schedule.unbooked = False, 0
        self._lock.leave()
        try:
            turn = self._next_turn()
            if await self._send(turn, loss, speed) and meanwhile is not None:
                await self._lock.take()
                await meanwhile()
                for schedule in self.schedules.values():
                    schedule.unbooked = self._overlap_tokens
                self._lock.leave()
            outcome = await self._settle(turn)
            if not weight and outcome.commit is None:
                # Nothing was trained or decided: training is interrupted by a round that has committed, and whose results are
                # still lacking. Turns without training must not follow each other at once.
                await asyncio.sleep(TICK)
            self._turn = turn + (not self._repeats(turn))
        finally:
            self._set_session_ahead()
            await self._lock.take()
        return replace(outcome, taken=True, kept=0)

    # --- turns

    @property
    def in_progress(self) -> int:
        """Number of fragments whose rounds are in progress."""
        return len(self._pending)

    @property
    def turn(self) -> int:
        return self._next_turn()

    def _is_over(self, number: int) -> bool:
        """Return True if a fragment needs no further round."""
        schedule, pending = self.schedules[number], number in self._pending
        return (
            self._bounded
            and schedule.loop.session.replica.round + (pending and not schedule.stepped.is_set()) >= schedule.last
        )

    def _next_turn(self) -> int:
        """Return the next turn that is not over. Turns of fragments that are not held pass idle."""
        catch_up = {
            number: turn_of(number, schedule.loop.session.replica.round, self._count)
            for number, schedule in self.schedules.items()
            if number not in self._pending
        }
        turn = self._turn
        if len(catch_up) == len(self.schedules):
            turn = max(turn, min(catch_up.values()) - self._count + 1)
        rest = any(not self._is_over(number) for number in catch_up)
        while (number := turn % self._count) in catch_up and (
            catch_up[number] > turn or (rest and self._is_over(number))
        ):
            turn += 1
        return turn

    def _repeats(self, turn: int) -> bool:
        """Return True if the turn was spent on fetching its state, and is repeated.

        Only a peer with one fragment repeats it: with more, it would be late for the others.
        """
        schedule, number = self.schedules.get(turn % self._count), turn % self._count
        if schedule is None or len(self.schedules) > 1 or not schedule.fetched:
            return False
        schedule.fetched = False
        return turn_of(number, schedule.loop.session.replica.round, self._count) == turn

    def _set_session_ahead(self) -> None:
        number = self._next_turn() % self._count
        if number in self.schedules:
            self._session.ahead = self.schedules[number].loop.session

    async def _send(self, turn: int, loss: float, speed: float) -> bool:
        """Send the fragment of this turn; return True if training may continue meanwhile."""
        number = turn % self._count
        schedule, before = self.schedules.get(number), self._pending.get(number)
        self.next_cut = 0
        self._lateness.begin_turn(self._session.now())
        if before is not None:
            await self._wait(before)
            self._conclude(before)
        if schedule is None or number in self._pending or self._is_over(number):
            await asyncio.sleep(0)  # let visitors of the model run
            return not all(self._is_over(one) for one in self.schedules)
        if not schedule.owed and schedule.loop.session.catch_up.alone_in_round:
            await asyncio.sleep(TICK)
            return True
        self.next_cut = self._steps_to_skip(turn, schedule)
        while True:
            schedule.begin()
            schedule.sent = schedule.owed
            task = asyncio.ensure_future(schedule.loop.sync(weight=schedule.owed, loss=loss, speed=speed))
            self._pending[number] = pending = _PendingRound(schedule, turn, task, self._lateness.turn_began)
            await self._wait_for_first(task, schedule.was_read.wait())
            if not schedule.begun_without_us:
                return True
            await self._wait(pending)
            if pending.left or task.result().commit is None or not await self._is_missed(schedule.loop.session):
                return False
            self._conclude(pending)

    async def _is_missed(self, session: RoundSession) -> bool:
        """Return True if the next round of a fragment has committed without us, too.

        With one round in each turn, as many as the others make, a peer would never catch up. If other peers claim to be
        further, wait for their proof at most one patience.
        """
        end = self._session.now() + session.patience
        while session.catch_up.claimed_over and not session.overtaken and self._session.now() < end:
            await asyncio.sleep(TICK)
        return session.overtaken

    def _steps_to_skip(self, turn: int, schedule: FragmentSchedule) -> int:
        agreement = schedule.loop.session.current.agreement
        proposal = agreement.proposal if agreement.commit is None else agreement.commit.proposal
        late = None if proposal is None else self._session.late(proposal, self._lateness.turn_began)
        return self._lateness.skip(turn, late)

    async def _settle(self, turn: int) -> Outcome:
        """Wait for the rounds that are due, oldest first; at the end of the run for all."""
        ends = all(self._is_over(number) for number in self.schedules)
        due = [one for one in self._pending.values() if ends or (not one.left and one.turn <= turn - self._lag)]
        found = Outcome()
        for pending in sorted(due, key=lambda one: one.turn):
            if ends:  # no other fragment can be delayed
                pending.schedule.due.set()
                await asyncio.wait((pending.task,))
            else:
                await self._wait(pending)
        for pending in list(self._pending.values()):
            outcome = self._conclude(pending, report=False)
            if outcome.commit is not None:
                if found.commit is not None:
                    self._report(found)
                found = outcome
        if self._bounded and all(
            schedule.loop.session.replica.round >= schedule.last for schedule in self.schedules.values()
        ):
            for schedule in self.schedules.values():
                await schedule.loop.write_theta()  # training continued after a fragment's last round
        return found

    async def _wait(self, pending: _PendingRound) -> None:
        """Wait until a round is over, or may delay the others no longer."""
        pending.schedule.due.set()
        if pending.left:
            return
        session = pending.schedule.loop.session
        stalled = session.quorum_wait.begun
        later = [one.schedule.stepped for one in self._pending.values() if one.turn > pending.turn]
        if not pending.schedule.begun_without_us:
            missed = [event for number, event in self._session.committed.items() if number not in self._pending]
            events = [event.wait() for event in (*later, *missed, stalled)]
            await self._wait_for_first(pending.task, *events, self._until_circular(session))
        if not (pending.task.done() or stalled.is_set()):
            await asyncio.wait((pending.task,), timeout=session.patience)
        pending.left = not pending.task.done()

    async def _until_circular(self, session: RoundSession) -> None:
        """Wait until a peer that this round waits for has announced another fragment, which we have not sent.

        It may wait for us there as we wait for it here.
        """
        while True:
            awaited, here = set(session.waiting_for()), self._session.sessions
            if any(awaited.intersection(one.ready) for number, one in here.items() if number not in self._pending):
                return
            await asyncio.sleep(TICK)

    @staticmethod
    async def _wait_for_first(task: asyncio.Task[Outcome], *others: Coroutine[Any, Any, object]) -> None:
        """Wait until a task is done, or one of the others, which are cancelled then."""
        waits = [asyncio.ensure_future(one) for one in others]
        try:
            await asyncio.wait((task, *waits), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _conclude(self, pending: _PendingRound, *, report: bool = True) -> Outcome:
        """Book a round if it is over. Raises the error of its task, if any."""
        if not pending.task.done():
            return Outcome()
        schedule, outcome = pending.schedule, pending.task.result()
        del self._pending[pending.turn % self._count]
        if outcome.commit is not None:
            self._lateness.note(pending.turn, self._session.late(outcome.commit.proposal, pending.at))
            schedule.conclude(outcome.kept)
            if report:
                self._report(outcome)
        else:
            absent = ", ".join(short(peer) for peer in schedule.loop.session.waiting_for())
            schedule.loop.session.report("uncommitted", f"waiting for {absent or 'a quorum'}")
        return outcome
