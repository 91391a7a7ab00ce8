"""The origin of a replica in stages: data, embedding, its own layers, head and loss; and it drives all the others.

A step: every micro-batch goes origin → stages → origin, and its gradient the same way back; then the origin asks everybody to
close the step with the micro-batches that should count there, and all make their inner step. Message by message:

    Route       origin → every peer on the way
    Activation  from peer to peer along the way, and its gradient back
    Passed      every peer → origin: passed on, or why not
    Close       origin → everybody: your gradient should be of these micro-batches
    Tally       its squared norm and tokens, or why it is given up
    Apply       divisor, and the factor that clips the whole model's gradient

The origin keeps what it sent until a micro-batch is done. Whatever fails on the way, that micro-batch is tried once more from
the start, by another peer of the stage in question, or past it. Who has counted it already does not count it twice, and while
somebody in reach may have counted it nobody else of the stage does: so at worst a stage goes without the gradient of a
micro-batch that failed on its way back. What a dead peer had added up is lost, and the step's outcome says so.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from thinwire.collectives.outbox import Outbox
from thinwire.compression.codec import CodecError
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import MAX_MICROS, Activation, Apply, Close, Hop, Outdated, Passed, PeerId, Route, Tally

from ..data import Batch
from ..presence import Emit
from ..waiting import Work
from .account import Account, Outcome
from .boundary import Boundary
from .crew import Crew, Visits
from .ends import Ends
from .flight import Failure, Flight
from .parcel import pieces
from .patience import Patience
from .pilot import Pilot
from .section import Section
from .survey import Survey
from .update import Update, clipping

ATTEMPTS = 8
"""Tries of a micro-batch after which it is given up."""


class Origin:
    """See the module. A Handler of Presence; `step` makes one inner step.

    `window`: micro-batches on their way at a time; as many as stages is 1F1B, all of them GPipe. `clip`: largest norm of the
    whole model's gradient, 0 any. `by_visits`: a stage's gradient is divided by the micro-batches that went through it
    instead of by all. `recompute`: see Stage. `pilot`: plans the ways of micro-batches; without one they visit all stages.
    """

    def __init__(
        self,
        section: Section,
        update: Update,
        boundary: Boundary,
        crew: Crew,
        *,
        outbox: Outbox,
        work: Work,
        now: Callable[[], float],
        patience: Patience,
        emit: Emit,
        window: int,
        pilot: Pilot | None = None,
        clip: float = 0.0,
        by_visits: bool = False,
        recompute: bool = False,
        step: int = 0,
    ) -> None:
        self.crew, self.update, self.next_step = crew, update, step
        self.norms: dict[int, float] = {}
        """By stage, the norm of its last gradient, before it was clipped."""
        self._ends = Ends(section, boundary, recompute=recompute)
        self._boundary, self._outbox, self._work, self._now, self._emit = boundary, outbox, work, now, emit
        self._patience, self._window, self._clip, self._by_visits = patience, window, clip, by_visits
        self._pilot, self.survey = pilot, pilot.survey if pilot is not None else Survey(now)
        self._flights: dict[int, Flight] = {}
        self._account = Account()
        self._back: set[PeerId] = set()
        self._applies: dict[PeerId, Apply] = {}
        self._news = asyncio.Event()

    # --- what comes in

    def routed(self, peer: PeerId, frame: Frame) -> None:
        """A checked frame; what is not of a pipeline, or not of this step, is ignored."""
        message = frame.message
        if not isinstance(message, (Passed, Activation, Tally)) or message.step != self.next_step:
            return
        if not self.crew.holds(peer):
            return
        if isinstance(message, Tally):
            self._account.tallies.setdefault(peer, message)
            self._news.set()
            return
        flight = self._flights.get(message.micro)
        if isinstance(message, Activation):
            if flight is not None:
                flight.take(peer, message, frame.payload)
            return
        self._account.passed(peer, message)
        if flight is not None:
            if not message.reason and message.attempt == flight.attempt and peer in flight.peers:
                self.survey.passed(peer, message.micro, message.seconds, backward=message.backward)
            leg, since = flight.due, flight.since
            if flight.heard(peer, message, self._now()) and not message.reason and leg[0] == peer:
                self.crew.done(peer, self._patience.moved(leg, since), backward=message.backward)

    def lost(self, peer: PeerId, *, gone: bool) -> None:
        """The link to a peer broke: it does nothing more in this step."""
        self.crew.lost.add(peer)
        self._back.discard(peer)
        self._account.give_up(peer, "out of reach")
        for flight in self._flights.values():
            if flight.needs(peer):
                flight.fail("out of reach", peer)
        self._news.set()

    def reached(self, peer: PeerId) -> None:
        """A link to a peer is up: it takes part from the next step on."""
        if peer in self.crew.lost:
            self._back.add(peer)

    def ticked(self) -> None:
        """Time passes: each micro-batch waits by itself."""

    # --- a step

    async def step(self, batches: Sequence[Batch], visits: Sequence[Visits] | None = None) -> Outcome:
        """One inner step on these micro-batches, all of one shape [B, T]. `visits`: the way of each, as planned.

        Raises ValueError for micro-batches that cannot be, Diverged when our own part is not finite.
        """
        if not 0 < len(batches) <= MAX_MICROS or len({batch[0].shape for batch in batches}) != 1:
            raise ValueError(f"a step has 1…{MAX_MICROS} micro-batches of one shape")
        if visits is not None and len(visits) != len(batches):
            raise ValueError("a plan has a way for each micro-batch")
        began = self._now()
        self.crew.lost -= self._back
        for peer in sorted(self._back):
            self.catch_up(peer)
        self._back.clear()
        self._account = Account()
        lanes: Sequence[Sequence[int]] = [(micro,) for micro in range(len(batches))]
        room, planned = asyncio.Semaphore(self._window), 0.0
        if visits is None and self._pilot is not None:
            course = await self._pilot.course(len(batches), self.crew, self._work, self.next_step)
            if course is not None:
                visits, lanes, planned = course.visits, course.lanes, course.seconds
                room = asyncio.Semaphore(len(lanes))
        rose = self._now()

        async def fly(lane: Sequence[int]) -> None:
            for micro in lane:
                async with room:
                    await self._fly(micro, batches[micro], visits[micro] if visits is not None else None)

        async with asyncio.TaskGroup() as group:
            for lane in lanes:
                group.create_task(fly(lane))
        flown = self._now() - rose
        self.survey.closed()
        await self._settle(batches[0][0].numel())
        account = self._account
        outcome = Outcome(
            self.next_step,
            dict(account.losses),
            frozenset(account.finished),
            account.counted(),
            account.lost,
            dict(account.skipped),
            account.attempts,
            self._now() - began,
            dict(account.computed),
            flown,
            planned,
        )
        self.next_step += 1
        return outcome

    async def _fly(self, micro: int, batch: Batch, visits: Visits | None) -> None:
        """A micro-batch, until it is through or given up."""
        payload: bytes = await self._compute(self._ends.begin, micro, batch[0])
        tried: Counter[PeerId] = Counter()
        path: tuple[Hop, ...] = ()
        for attempt in range(ATTEMPTS):
            claimed = self._account.where(micro)
            path = self.crew.path(self.next_step, claimed, tried, visits, last=path)
            failure = await self._try(micro, attempt, path, batch, payload)
            if failure is None:
                wanted = [stage for stage, _ in visits] if visits is not None else sorted(self.crew.holders)
                missed = tuple(stage for stage in wanted if stage not in {hop.stage for hop in path})
                if missed:
                    self._account.skipped[micro] = missed
                self._account.finish(micro, attempt)
                return
            self._emit("micro-batch failed", {"micro": micro, "attempt": attempt, "reason": failure.reason})
            tried.update(failure.suspects)
            for peer in failure.suspects:
                if failure.reason == "stalled":
                    self.crew.rest(peer, self.next_step)
                if failure.reason == "step":
                    self.catch_up(peer)
            for hop in path:
                over = Passed(self.next_step, micro, attempt, False, 0.0, "over")
                self._outbox.control(hop.peer, over)
        self._ends.forget(micro)
        self._emit("micro-batch given up", {"micro": micro})

    async def _try(
        self, micro: int, attempt: int, path: tuple[Hop, ...], batch: Batch, payload: bytes
    ) -> Failure | None:
        """One attempt; what it failed of."""
        (size, length), step = batch[0].shape, self.next_step
        self._account.sent(micro, attempt, path)
        if not path:
            self._account.losses[micro] = await self._work(partial(self._ends.alone, micro, batch, payload))
            return None
        flight = self._flights[micro] = Flight(micro, attempt, path, self._boundary, size, length, self._now())
        try:
            for hop in path:
                self._outbox.control(hop.peer, Route(step, micro, attempt, size, length, path))
            self._send(path[0].peer, micro, attempt, payload, backward=False)
            there = await self._arrival(flight)
            if isinstance(there, Failure):
                return there
            try:
                self._account.losses[micro], gradient = await self._compute(self._ends.turn, micro, batch, there)
            except CodecError:
                return Failure("payload", (path[-1].peer,))
            flight.turn(self._now())
            self._account.turned(micro, attempt)
            self._send(path[-1].peer, micro, attempt, gradient, backward=True)
            back = await self._arrival(flight)
            if isinstance(back, Failure):
                return back
            try:
                await self._compute(self._ends.finish, micro, batch, back)
            except CodecError:
                return Failure("payload", (path[0].peer,))
            return None
        finally:
            del self._flights[micro]

    async def _arrival(self, flight: Flight) -> bytes | Failure:
        self.survey.sent(flight.micro, backward=flight.backward)
        found = await flight.arrival(self._patience)
        if not isinstance(found, Failure):
            self.survey.arrived(flight.micro, flight.peers, backward=flight.backward)
        return found

    async def _compute(self, part: Callable[..., Any], *arguments: Any) -> Any:
        """Our own part of a micro-batch."""
        asked = self._now()
        found = await self._work(partial(part, *arguments))
        self.survey.own(part.__name__, asked)
        return found

    def _send(self, to: PeerId, micro: int, attempt: int, payload: bytes, *, backward: bool) -> None:
        for number, piece in enumerate(pieces(payload)):
            self._outbox.bulk(to, Frame(Activation(self.next_step, micro, attempt, backward, number), piece))

    # --- the end of a step

    def catch_up(self, peer: PeerId) -> None:
        """A peer may have missed the end of steps: what it was to apply in the last it closed, and where the others are."""
        if peer in self._applies:
            self._outbox.control(peer, self._applies[peer])
        if self.next_step:
            self._outbox.control(peer, Close(self.next_step - 1, ()))
            self._outbox.control(peer, Apply(self.next_step - 1, 0.0, 1.0))

    def outdated(self, peer: PeerId, stage: int, round: int) -> None:
        """A peer holds an older state of its stage than another who is here."""
        self._outbox.control(peer, Outdated(stage, round))

    async def _settle(self, tokens: int) -> None:
        """Close the step everywhere and apply it. `tokens` of one micro-batch."""
        account, step = self._account, self.next_step
        asked, since = self.crew.peers, self._now()
        for peer in asked:
            self._outbox.control(peer, Close(step, tuple(sorted(account.of(peer)[1]))))
        await self._tallies(asked, since)
        squares: float = await self._work(self.update.squares)
        seen = len(account.losses)
        ours = squares < float("inf") and seen > 0
        scaled = squares / seen**2 if ours else 0.0
        norms = {0: math.sqrt(scaled)} if ours else {}
        for peer in asked:
            tally = account.tallies.get(peer)
            if tally is None or tally.reason or tally.squares < 0:
                account.give_up(peer, "silent" if tally is None else tally.reason or "squares")
        divisors = {peer: account.divisor(peer, by_visits=self._by_visits) for peer in asked}
        for peer, divisor in divisors.items():
            if divisor:
                part, (stage, _) = account.tallies[peer].squares / divisor**2, account.of(peer)
                scaled += part
                norms[stage] = max(norms.get(stage, 0.0), math.sqrt(part))
                self.crew.did_well(peer)
        self.norms.update(norms)
        factor = clipping(scaled, self._clip)
        account.settle()
        for peer, divisor in divisors.items():
            self._applies[peer] = Apply(step, divisor, factor, account.loss)
            self._outbox.control(peer, self._applies[peer])
        if ours:
            await self._work(partial(self.update.apply, step, float(seen), factor, tokens * seen))
        else:
            self._emit("gradient lost", {"step": step, "reason": "not finite" if seen else "no micro-batch"})
        self.update.drop()
        self._ends.clear()

    async def _tallies(self, asked: Sequence[PeerId], since: float) -> None:
        """Wait for the answers of those that are in reach, each for as long as it may take."""
        while missing := [p for p in asked if p not in self._account.tallies and p not in self.crew.lost]:
            self._news.clear()
            left = max(self._patience.left((peer, False), since) for peer in missing)
            if not left:
                for peer in missing:
                    self.crew.rest(peer, self.next_step)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._news.wait()
