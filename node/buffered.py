"""Buffered asynchronous averaging (FedBuff, arXiv 2106.06639): a round is of whoever is ready, the others train on.

Everybody takes part in every round: owns chunks, votes, and follows its verdict, whether it contributes or not. A round opens
when the first contribution has come and `grace` is over, or all have contributed. So state, digests and quorums are those of
DiLoCo; what differs is from where a contribution was measured. A peer trains from θ̄ as it was when its last one came into a
round, and keeps that, while its replica follows the rounds of others:

    Δ = (start − θ) / (1 + s)^a                s: steps since `start`; given up when there are more than `staleness`
    θ̄ ← Outer(θ̄, k / n · mean Δ)                k: contributors of the round, n: `arrivals`, or all who took part in it
    s ← s + k / n                                for those who were not in it

Who sends Δ has scaled it: that it is s steps old nobody else could check, as nobody can check its tokens. The weights in
the record are tokens. As k of n were in the round it moves θ̄ by as much of a whole step; with all of them it is DiLoCo's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self, cast

import numpy as np
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.proposal import FAULTS
from thinwire.collectives.shards import Grid
from thinwire.collectives.statesync import Fetched
from thinwire.compression.codec import Buffer, Codec, Floats
from thinwire.compression.kernels import outer_step
from thinwire.node.rounds import Rounds
from thinwire.node.session import Session
from thinwire.node.waiting import Work, cancelled, whole
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import Commit, PeerId
from thinwire.swarm.settings import Outer

from .fragments import Layout
from .outer import Read, Replica, Write


class BufferedReplica(Replica):
    """θ̄ and its momentum, and this peer's alone: what its model was set to, `start`, and its `age`, the whole steps that θ̄
    has been moved by since: n contributions make one, in however many rounds. Made by `begin`.
    """

    start: Floats
    age: float
    outer: Outer

    @classmethod
    def begin(cls, manifest: Manifest, layout: Layout, codec: Any, theta: Floats, members: Sequence[PeerId]) -> Self:
        """See Replica."""
        replica = cls(layout.digest, theta, members, extra=cls.more(theta.size))
        replica.outer = manifest.outer
        replica.reset()
        return replica

    @classmethod
    def more(cls, size: int) -> int:
        """Numbers that the state has beside parameters and momentum, of a model of `size` parameters."""
        return 0

    def reset(self) -> None:
        """See Replica: the model starts from θ̄."""
        self.start, self.age = self.theta.copy(), 0.0

    def install(self, fetched: Fetched) -> int:
        """See Replica."""
        changed = super().install(fetched)
        self.reset()
        return changed

    def encode(self, read: Read, grid: Grid, codec: Codec) -> Iterator[memoryview]:
        """What was trained since `start`, scaled by its age. Raises FloatingPointError when it is not finite."""
        share = np.float32((1 + self.age) ** -self.outer.fade)
        whole = self._floats(grid.chunk)
        for index in range(len(grid)):
            start, stop = grid.span(index)
            delta = whole[: stop - start]
            read(start, stop, delta)
            np.subtract(self.start[start:stop], delta, out=delta)
            if not np.isfinite(np.dot(delta, delta)):
                raise FloatingPointError(f"the pseudo-gradient is not finite in elements {start} to {stop}")
            delta *= share
            yield self._encoded(codec, delta)

    def whole(self, members: Sequence[PeerId]) -> int:
        """Contributions that make a whole step, in a round that these took part in."""
        return self.outer.arrivals or len(members)

    def arrive(
        self, results: Sequence[Buffer], grid: Grid, codec: Codec, *, contributors: int, members: Sequence[PeerId]
    ) -> None:
        """Commit the next round, which so many have contributed to. Cannot fail half-way, see Replica.apply."""
        outer, share = self.outer, np.float32(contributors / self.whole(members))
        for low, high, mean in self.means(results, grid, codec):
            mean *= share
            outer_step(self.theta[low:high], self.momentum[low:high], mean, outer.lr, outer.momentum, outer.nesterov)
        self.pass_by(contributors, members)

    def pass_by(self, contributors: int, members: Sequence[PeerId]) -> None:
        """A round of so many is committed."""
        self.moved(members)
        self.age += contributors / self.whole(members)


class BufferedRounds(Rounds):
    """What `Rounds` is where nobody's round is over before it has contributed. While its owner trains, between `follow` and
    `rest`, it follows the rounds of others; it touches the model in `sync` only.
    """

    def __init__(self, session: Session, manifest: Manifest, *, read: Read, write: Write, work: Work) -> None:
        super().__init__(session, manifest, read=read, write=write, work=work)
        self._last, self._oldest = manifest.run.rounds, manifest.outer.staleness
        self._told: Callable[[Outcome], None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._sound = True
        session.follows = self._others

    @property
    def _replica(self) -> BufferedReplica:
        return cast(BufferedReplica, self._session.replica)

    def follow(self, told: Callable[[Outcome], None]) -> None:
        """See Rounds."""
        self._told = told
        self.go_on()

    def go_on(self) -> None:
        """See Rounds."""
        self._sound = True
        if self._told is not None and self._following is None:
            self._following = asyncio.ensure_future(self._follow(self._told))

    async def rest(self) -> None:
        """See Rounds."""
        following, self._following = self._following, None
        if following is not None:
            if not following.done():
                await cancelled(following)
            if not following.cancelled():
                following.result()

    async def sync(self, *, weight: int, loss: float, speed: float) -> Outcome:
        """See Rounds.sync: rounds until our contribution is in one, or is found to be too old, or comes to nothing."""
        await self.rest()
        try:
            return await self._deliver(weight, loss, speed)
        finally:
            self.go_on()

    async def _deliver(self, weight: int, loss: float, speed: float) -> Outcome:
        session, replica = self._session, self._replica
        while replica.age <= self._oldest:
            self._sound = True
            outcome = await super().sync(weight=weight, loss=loss, speed=speed)
            if outcome.commit is None:
                return outcome if self._sound else replace(outcome, dropped=True)
            if not replica.age:
                return outcome
            if self._told is not None:
                self._told(outcome)
        session.report("unsent", f"begun {replica.age:.1f} steps ago, and outer.staleness is {self._oldest}")
        await self._work(self._start)
        return Outcome(dropped=True)

    async def _take_over(self, fetched: Fetched) -> None:
        await super()._take_over(fetched)
        self._sound = False

    def _others(self, commit: Commit) -> bool:
        """Whether a verdict leaves our model as it is: our work is neither in it nor found unfit, and a round is to follow."""
        opened, me = commit.opened, self._session.me
        unfit = any(entry.peer == me and entry.reason in FAULTS for entry in opened.excluded)
        return not unfit and opened.round != self._last and all(entry.peer != me for entry in opened.contributors)

    async def _follow(self, told: Callable[[Outcome], None]) -> None:
        while True:
            outcome = await self._session.outcome()
            commit = outcome.commit
            if commit is None or not self._others(commit):
                return  # the next call sees to it
            await whole(self._pass(outcome, commit, told))

    async def _pass(self, outcome: Outcome, commit: Commit, told: Callable[[Outcome], None]) -> None:
        await self._settle(outcome, commit)
        told(replace(outcome, results=()))

    def _start(self) -> None:
        self._replica.reset()
        self._write(self._replica.start)

    async def _apply(self, outcome: Outcome, commit: Commit, *, settled: bool = True) -> None:
        session, replica, opened = self._session, self._replica, commit.opened
        await session.change(
            self._work,
            lambda: replica.arrive(
                outcome.results,
                session.grid,
                session.codec,
                contributors=len(opened.contributors),
                members=opened.members,
            ),
            settled=settled,
        )

    async def _commit(self, outcome: Outcome, commit: Commit) -> None:
        """Apply a commit, whole. The model starts anew where our work was in it, or will be in none."""
        await self._apply(outcome, commit)
        if not self._sound or not self._others(commit):
            await self._work(self._start)
        self._session.advance()

    def _encode(self) -> tuple[list[memoryview], bytes]:
        try:
            return super()._encode()
        except FloatingPointError:
            self._sound = False
            self._start()
            raise
