"""Rounds: what turns local training into one outer step after another, or into nothing at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import blake3
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.statesync import Fetched, Foreign
from thinwire.node.outer import Read, Replica, Write
from thinwire.node.session import Session
from thinwire.node.waiting import Work, whole
from thinwire.swarm.manifest import Manifest, ManifestMismatch
from thinwire.swarm.protocol import Commit

LONELY = 2
"""Times in a row that nobody in reach had a state, after which it counts as lost, where there are other ways to it."""

GIVE_UP = 10
"""A round that neither commits nor fails within grace plus this many patiences is left; training goes on with its delta."""


Lost = Callable[[int], Awaitable[bool]]
"""Brings back the state of a fragment that nobody in reach has: True when it is in the replica."""


class Rounds:
    """One Round after another of one replica: prepare, average, commit or roll back.

    `read` copies a range of the model's parameters, `write` sets them all from the outer parameters; both run in `work`.
    """

    meanwhile: Callable[[], Awaitable[None]] | None = None
    """What whoever trains does while a round is under way, for methods that let them; the model is theirs until it is done."""

    beside: Work | None = None
    """Computes beside training what the model is not needed for, where there is something that does; else `work` does it."""

    _settling: asyncio.Task[None] | None = None

    def __init__(self, session: Session, manifest: Manifest, *, read: Read, write: Write, work: Work) -> None:
        self._session, self._outer = session, manifest.outer
        self._read, self._write, self._work = read, write, work
        self._thereafter: list[Callable[[], None]] = []

    @property
    def turn(self) -> int:
        """Exchanges that the swarm has behind it, ours as far as we know; inner steps are counted by them."""
        round: int = self._session.replica.round
        return round

    def follow(self, told: Callable[[Outcome], None]) -> None:
        """From now on follow the rounds of others while ours is in the making, where the method does: `told` of each."""

    async def rest(self) -> None:
        """Let the replica be as it is until `go_on`, or for good. Raises what has gone wrong in following."""
        await self.settled()

    def go_on(self) -> None:
        """Follow again, if `follow` was called."""

    async def settled(self) -> None:
        """Until the state has its digest and the next round has begun here, which may be after `sync` has ended. Before that no
        checkpoint is written and nothing announced. Raises what has gone wrong in it.
        """
        settling = self._settling
        if settling is not None:
            await asyncio.wait([settling])
            settling.result()

    def thereafter(self, what: Callable[[], None]) -> None:
        """Call `what` as soon as there is nothing to wait for in `settled`: now, or on the loop."""
        if self._settling is None:
            what()
        else:
            self._thereafter.append(what)

    async def enter(self, *, tries: int = 0, alone: int = 0, lost: Lost | None = None) -> bool:
        """Become part of a running swarm: fetch its state, write it into the model, take part in the round in progress.

        Waits for as long as nobody offers a state that is as new as ours; with `tries`, for so many patiences only, and
        then goes on with what is here. False after `alone` times in a row that nobody in reach had a state at all (0: never).
        `lost`: tried, where nobody has one; it is given twice the `tries`.
        Raises ManifestMismatch when the swarm trains another model than this one.
        """
        session, tried, lonely = self._session, 0, 0
        while not await self._catch_up():
            if session.following.foreign is not None:
                raise mismatch(session.replica, session.following.foreign)
            lonely = lonely + 1 if session.following.alone else 0
            if lost is not None and lonely >= LONELY and await lost(session.fragment):
                await self._adopt()
                return True
            tried += 1
            if tries and tried >= tries * (1 if lost is None else 2):
                await self._adopt()
                return True
            if alone and lonely >= alone:
                return False
            await session.pause()
        return True

    async def sync(self, *, weight: int, loss: float, speed: float) -> Outcome:
        """One Round after the inner steps. `weight` is the tokens that went into them; `loss` and `speed` are for display.

        On commit the replica has made its outer step and the model starts from it. Without commit everything is as it was
        before the call (the model keeps its local progress, which the next call sends), unless this peer had to fetch
        the swarm's state: then the model starts from that. The outcome that is returned comes without the results.
        The next inner steps need the model, and not the digest of the state: that is made beside them, see `settled`.
        """
        await self.settled()
        session = self._session
        if session.current.agreement.commit is None and not session.following.behind.is_set():
            try:
                encoded = await self._work(self._encode)
            except FloatingPointError as error:
                session.report("unsent", str(error))
                encoded = ([], b"")
            payloads, hashes = encoded
            average = partial(
                session.average,
                payloads,
                hashes=hashes,
                weight=weight if payloads else 0,
                loss=loss,
                speed=speed,
            )
            del payloads, encoded
            outcome = await self._average(lambda give_up: average(give_up=give_up))
            del average
        else:
            outcome = await session.outcome(give_up=GIVE_UP * session.patience)
            if outcome.commit is not None:
                await self._late(weight)
        if outcome.commit is not None:
            await whole(self._settle(outcome, outcome.commit))
        elif outcome.diverged or session.following.behind.is_set():
            if not await self._catch_up():
                session.again()
                await session.pause()
        return replace(outcome, results=())

    async def _average(self, average: Callable[[float | None], Coroutine[Any, Any, Outcome]]) -> Outcome:
        """The outcome of `average`, which gives up after so many seconds."""
        return await average(self._give_up)

    @property
    def _give_up(self) -> float:
        return self._session.grace + GIVE_UP * self._session.patience

    async def _catch_up(self) -> bool:
        """Take over the swarm's state, if there is one for us."""
        fetched = await self._session.following.newer(self._work)
        if fetched is not None:
            await whole(self._take_over(fetched))
        return fetched is not None

    async def _take_over(self, fetched: Fetched) -> None:
        await self._session.states.install(self._work, fetched)
        await self._adopt()

    async def _settle(self, outcome: Outcome, commit: Commit) -> None:
        """Book what data is used up, and apply the commit."""
        session, entries = self._session, commit.opened.contributors
        if session.replica.ledger is not None:
            await session.change(self._work, lambda: session.replica.book(entries))
        await self._commit(outcome, commit)

    async def _commit(self, outcome: Outcome, commit: Commit) -> None:
        """Apply a commit, whole: whoever cancels `sync` on the way waits for it."""
        await self._apply(outcome, commit, settled=False)
        await self._go_ahead()

    async def _apply(self, outcome: Outcome, commit: Commit, *, settled: bool = True) -> None:
        """The outer step, and when it is to be `settled` the digest of what it leaves."""
        await self._session.change(self._work, lambda: self._outer_step(outcome, commit), settled=settled)

    def _outer_step(self, outcome: Outcome, commit: Commit) -> None:
        session, outer = self._session, self._outer
        session.replica.apply(
            outcome.results,
            session.grid,
            session.codec,
            members=commit.opened.members,
            lr=outer.lr,
            momentum=outer.momentum,
            nesterov=outer.nesterov,
        )

    async def _late(self, weight: int) -> None:
        """A commit came before we had announced anything of `weight` tokens: what was trained is lost."""

    async def _adopt(self) -> None:
        await self._work(lambda: self._write(self._session.replica.theta))
        self._session.advance()

    async def _go_ahead(self) -> None:
        """`_adopt`, but for what inner steps do not wait for: that goes on beside them."""
        await self._work(lambda: self._write(self._session.replica.theta))
        self._settling = asyncio.create_task(self._settle_down())

    async def _settle_down(self) -> None:
        try:
            await (self.beside or self._work)(self._session.replica.settle)
            self._session.advance()
            for what in self._thereafter:
                what()
        except Exception as error:
            self._session.fail(error)  # nobody waits for it before the next round
            raise
        self._thereafter.clear()
        self._settling = None

    def _encode(self) -> tuple[list[memoryview], bytes]:
        session = self._session
        payloads, hashes = [], []
        for payload in session.replica.encode(self._read, session.grid, session.codec):
            payloads.append(payload)
            hashes.append(blake3.blake3(payload).digest())
        return payloads, b"".join(hashes)


def mismatch(replica: Replica, foreign: Foreign) -> ManifestMismatch:
    """What is wrong when the swarm offers the state of another model."""
    ours, held = replica.theta.size, 2 * replica.ledger.used.size if replica.ledger is not None else 0
    # What a method has beside the ledger depends on the model's shapes: then the size of a state does not tell how many.
    theirs, rest = divmod(foreign.nbytes // 4 - held, replica.vectors)
    if foreign.nbytes == replica.state.nbytes:
        differ = f"the swarm's model has {ours} trainable parameters too, but other names, shapes or element types"
    elif rest or theirs <= 0 or replica.extra.size != held:
        differ = f"the swarm's model has another number of trainable parameters than the one here, which has {ours}"
    else:
        differ = f"the swarm's model has {theirs} trainable parameters, the one here has {ours}"
    return ManifestMismatch(differ, "build the model as those do who started the run, and freeze the same parameters")
