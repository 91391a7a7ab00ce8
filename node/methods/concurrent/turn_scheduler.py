"""Rounds of several fragments at once: each is a task of its own, and training goes on meanwhile.

In its turn a fragment's Δ is announced; τ inner steps later its verdict is waited for, and the model follows. With H / P steps
between two turns that is `lag` turns later, and `overlap` steps into the last of them. A fragment whose verdict is late does
not hold the others: once one that was sent after it is done it is given a patience more, and is then left behind; the model
follows it between two later steps. It is not sent again before its last round is over.

Nobody waits for who comes to its turns late, and whoever is would stay so: all make as many steps in a turn. So who finds the
round of its turn begun without it leaves out as many of the next steps as make up for that, once; it counts by its tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from thinwire.collectives.outcome import Outcome
from thinwire.collectives.timing import TICK
from thinwire.node.methods.concurrent.fragment_replicas import rounds_of, turn_of
from thinwire.node.methods.concurrent.fragment_schedule import FragmentSchedule, ModelLock
from thinwire.node.methods.concurrent.fragment_sessions import FragmentSessions
from thinwire.node.outer.outer_loop import OuterLoop
from thinwire.node.outer.round_loop import Lost, Meanwhile, RoundLoop
from thinwire.node.runtime.asyncio_extra import Work, cancelled
from thinwire.node.state.replica import ParameterWrite, Read
from thinwire.swarm.identity.identity import short
from thinwire.swarm.manifest.manifest import Manifest

SLACK = 0.1
"""Part of a turn by which one may be late without leaving out steps."""

TURNS = 5
"""Last turns from which is told how long one takes."""


@dataclass(slots=True)
class _PendingRound:
    """A round under way: sent in `turn`, at a time. `left`: the others have gone on without waiting for it."""

    link: FragmentSchedule
    turn: int
    task: asyncio.Task[Outcome]
    at: float
    left: bool = False


class TurnScheduler(RoundLoop):
    """Loop over the fragments' turns: a call of `sync` is a turn."""

    overlaps_calls = True

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
        self._told: Callable[[Outcome], None] = lambda outcome: None
        self.links: dict[int, FragmentSchedule] = {}
        for number, link in session.links.items():
            chain, last = session.replica.chains[number], rounds_of(number, manifest.run.rounds, self._count)
            self.links[number] = schedule = FragmentSchedule(manifest, self._lock, last=last)
            OuterLoop(link, schedule, read=chain.reader(read), write=chain.writer(write), work=work)
        self._bounded = manifest.run.rounds > 0
        self._flights: dict[int, _PendingRound] = {}
        # In a group all peers make the steps of its origin.
        self._most, self._pace, self._sent_at = (
            0 if manifest.pipeline.stages else manifest.pace - 1,
            manifest.pace,
            math.nan,
        )
        self._took: deque[float] = deque(maxlen=TURNS)
        self._late, self._mended = (
            0.0,
            -1,
        )  # seconds that we are known to be late by, and the turn in which we last made up

    # --- RoundLoop

    def follow(self, told: Callable[[Outcome], None]) -> None:
        """`told` of the rounds that end beside the one that `sync` returns."""
        self._told = told

    async def rest(self) -> None:
        """Give up what is under way."""
        self._lock.leave()
        flights, self._flights = self._flights, {}
        for flight in flights.values():
            if not flight.task.done():
                await cancelled(flight.task)

    async def catch_up(self) -> bool:
        """Take over the newer states of all held fragments; return whether there was one."""
        found = [await link.loop.catch_up() for link in self.links.values()]
        return any(found)

    async def adopt(self) -> None:
        """Set the model to the outer parameters of all held fragments, and begin their next rounds."""
        for link in self.links.values():
            await link.loop.adopt()

    async def enter(self, *, tries: int = 0, alone: int = 0, lost: Lost | None = None) -> bool:
        """Enter the rounds of all held fragments side by side, see `RoundLoop.enter`.

        Rounds of fragments that are entered already are followed meanwhile: a peer that offers an old state keeps others from
        the new one, and a peer that takes part in a round and does not continue holds it up.
        """
        catch_up: list[asyncio.Task[None]] = []

        async def into(link: FragmentSchedule) -> bool:
            if not await link.loop.enter(tries=tries, alone=alone, lost=lost):
                return False
            catch_up.append(asyncio.ensure_future(link.keep_up()))
            return True

        entering = [asyncio.ensure_future(into(link)) for link in self.links.values()]
        try:
            if not all(await asyncio.gather(*entering)):
                return False
            for task in catch_up:
                if task.done():
                    task.result()
        finally:
            for each in (*entering, *catch_up):
                await cancelled(each)
        for link in self.links.values():
            link.owed, link.forgoes = 0, False  # nothing was trained yet
        self._look_ahead()
        return True

    async def sync(self, *, weight: int, loss: float, speed: float, meanwhile: Meanwhile | None = None) -> Outcome:
        """Run a turn: send its fragment, train on, wait for the one that is due. `weight`: tokens since the last turn.

        The outcome is that of the fragment that was due, `taken` in any case: the weight is booked here until it counts.
        Without a commit none was due, or it is not over yet.
        """
        for link in self.links.values():
            link.owed, link.forgoes = link.owed + weight * (not link.forgoes), False
        self._lock.leave()
        try:
            turn = self._clock()
            if await self._send(turn, loss, speed) and meanwhile is not None:
                await self._lock.take()
                await meanwhile()
                self._lock.leave()
            outcome = await self._settle(turn)
            self._turn = turn + (not self._is_still(turn))
        finally:
            self._look_ahead()
            await self._lock.take()
        return replace(outcome, taken=True, kept=0)

    # --- turns

    @property
    def turn(self) -> int:
        """The next one."""
        return self._clock()

    def _is_over(self, number: int) -> bool:
        """Whether nothing of a fragment is to be sent any more."""
        link, flies = self.links[number], number in self._flights
        return self._bounded and link.loop.session.replica.round + (flies and not link.moved.is_set()) >= link.last

    def _clock(self) -> int:
        """The next turn that is not over. One whose fragment is not held here passes, so that all keep time alike."""
        catch_up = {
            number: turn_of(number, link.loop.session.replica.round, self._count)
            for number, link in self.links.items()
            if number not in self._flights
        }
        turn = self._turn
        if len(catch_up) == len(self.links):
            turn = max(turn, min(catch_up.values()) - self._count + 1)
        rest = any(not self._is_over(number) for number in catch_up)
        while (number := turn % self._count) in catch_up and (
            catch_up[number] > turn or (rest and self._is_over(number))
        ):
            turn += 1
        return turn

    def _is_still(self, turn: int) -> bool:
        """Whether a turn was spent on fetching the state that it begins with. Who holds one fragment has it then as the others
        do; who holds more would be late with those.
        """
        link, number = self.links.get(turn % self._count), turn % self._count
        if link is None or len(self.links) > 1 or not link.fetched:
            return False
        link.fetched = False
        return turn_of(number, link.loop.session.replica.round, self._count) == turn

    def _look_ahead(self) -> None:
        number = self._clock() % self._count
        if number in self.links:
            self._session.ahead = self.links[number].loop.session

    async def _send(self, turn: int, loss: float, speed: float) -> bool:
        """Send the fragment whose turn it is; whether training may go on meanwhile."""
        number = turn % self._count
        link, before = self.links.get(number), self._flights.get(number)
        self._pass()
        if before is not None:
            await self._wait(before)
            self._land(before)
        if link is None or number in self._flights or self._is_over(number):
            await asyncio.sleep(0)  # for who waits to touch the model
            return not all(self._is_over(one) for one in self.links)
        if not link.owed and link.loop.session.catch_up.lone:
            await asyncio.sleep(TICK)
            return True
        self.next_cut = self._behind(turn, link)
        link.begin()
        link.sent = link.owed
        task = asyncio.ensure_future(link.loop.sync(weight=link.owed, loss=loss, speed=speed))
        self._flights[number] = flight = _PendingRound(link, turn, task, self._sent_at)
        await self._first(task, link.aired)
        if link.late_for:
            await self._wait(flight)
        return not link.late_for

    def _pass(self) -> None:
        """A turn begins."""
        now, self.next_cut = self._session.now(), 0
        if now > self._sent_at:
            self._took.append(now - self._sent_at)
        self._sent_at = now

    def _behind(self, turn: int, link: FragmentSchedule) -> int:
        """Inner steps that make up for what we come late to this turn, or did to one since we last left out some."""
        agreement, usual = link.loop.session.current.agreement, median(self._took) if self._took else math.inf
        opened = agreement.opened if agreement.commit is None else agreement.commit.opened
        late = self._late if opened is None else self._session.late(opened, self._sent_at)
        if late <= SLACK * usual:
            return 0
        self._late, self._mended = 0.0, turn
        return min(self._most, math.ceil(self._pace * late / usual))

    async def _settle(self, turn: int) -> Outcome:
        """Wait for what is due, the oldest first; at the end of the run for all."""
        ends = all(self._is_over(number) for number in self.links)
        due = [one for one in self._flights.values() if ends or (not one.left and one.turn <= turn - self._lag)]
        found = Outcome()
        for flight in sorted(due, key=lambda one: one.turn):
            if ends:  # there are no others to be held up
                flight.link.due.set()
                await asyncio.wait((flight.task,))
            else:
                await self._wait(flight)
        for flight in list(self._flights.values()):
            outcome = self._land(flight, told=False)
            if outcome.commit is not None:
                if found.commit is not None:
                    self._told(found)
                found = outcome
        if self._bounded and all(link.loop.session.replica.round >= link.last for link in self.links.values()):
            for link in self.links.values():
                await link.loop.write_theta()  # training went on when a fragment had had its last round
        return found

    async def _wait(self, flight: _PendingRound) -> None:
        """Until a flight is over, or others are not to be held up by it any more."""
        flight.link.due.set()
        later = [one.link.moved for one in self._flights.values() if one.turn > flight.turn]
        if not (flight.left or flight.link.late_for):
            await self._first(flight.task, *later)
        if not flight.task.done():
            await asyncio.wait((flight.task,), timeout=flight.link.loop.session.patience)
        flight.left = not flight.task.done()

    @staticmethod
    async def _first(task: asyncio.Task[Outcome], *events: asyncio.Event) -> None:
        """Until a task is done or one of these has happened."""
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait((task, *waits), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _land(self, flight: _PendingRound, *, told: bool = True) -> Outcome:
        """Book a flight that is over. Raises what has gone wrong in it."""
        if not flight.task.done():
            return Outcome()
        link, outcome = flight.link, flight.task.result()
        del self._flights[flight.turn % self._count]
        if outcome.commit is not None:
            if flight.turn > self._mended:
                self._late = self._session.late(outcome.commit.opened, flight.at)
            link.land(outcome.kept)
            if told:
                self._told(outcome)
        else:
            absent = ", ".join(short(peer) for peer in link.loop.session.waiting_for())
            link.loop.session.report("uncommitted", f"waiting for {absent or 'a quorum'}")
        return outcome
