"""Rounds in pairs: the two averages of an outer step with PowerSGD, one transaction."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import blake3
import numpy as np
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.statesync import Fetched
from thinwire.node.lowrank import LowRankReplica
from thinwire.node.outer import Read, Write
from thinwire.node.rounds import Rounds
from thinwire.node.session import Session
from thinwire.node.waiting import Work
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import Commit


class LowRankRounds(Rounds):
    """What `Rounds` is where one average makes a step. Only the second of two gives the model new parameters."""

    def __init__(self, session: Session, manifest: Manifest, *, read: Read, write: Write, work: Work) -> None:
        super().__init__(session, manifest, read=read, write=write, work=work)
        self._stepped = False
        # Tokens that went into what is still to be sent: of steps that came to nothing; of the step in progress; and after its
        # first round, when the second one had to be left and training went on.
        self._owed = self._offered = self._since = 0

    @property
    def _replica(self) -> LowRankReplica:
        return cast(LowRankReplica, self._session.replica)

    async def sync(self, *, weight: int, loss: float, speed: float) -> Outcome:
        """See Rounds.sync: both rounds of a step, or what is left of it. Without commit when they came to nothing.

        When the second round did not end, it is taken up by the next call, with what was sent in the first: what has been
        trained since is of the step after.
        """
        if self._replica.turn:
            self._since = weight
        else:
            self._offered, self._since = weight + self._owed, 0
        outcome = await super().sync(weight=self._offered, loss=loss, speed=speed)
        while outcome.commit is not None and self._replica.turn:
            outcome = await super().sync(weight=self._offered, loss=loss, speed=speed)
        if outcome.commit is None:
            return outcome
        self._owed = self._since if self._stepped else self._since + self._offered
        return outcome if self._stepped else replace(outcome, commit=None)

    async def _late(self, weight: int) -> None:
        """The others have committed without us: what we would have sent is treated as what was sent in vain. And when they have
        counted an earlier announcement of ours, what it said is known.
        """
        if (weight or self._replica.sent) and not self._replica.turn:
            try:
                await self._work(lambda: self._replica.offer(self._read))
            except FloatingPointError as error:
                self._session.report("unsent", str(error))

    async def _commit(self, outcome: Outcome, commit: Commit) -> None:
        """Apply a commit, whole: whoever cancels `sync` on the way waits for it."""
        session, replica, outer = self._session, self._replica, self._outer
        kept = self._since if replica.memory.pending else 0
        self._stepped = await session.change(
            self._work,
            lambda: replica.commit(
                outcome.results,
                commit.opened.contributors,
                session.codec,
                me=session.me,
                members=commit.opened.members,
                lr=outer.lr,
                momentum=outer.momentum,
                nesterov=outer.nesterov,
                since=self._read if self._since else None,
            ),
        )
        if self._stepped:
            self._since = kept
            await self._adopt()
        else:
            session.advance()

    async def _take_over(self, fetched: Fetched) -> None:
        await super()._take_over(fetched)
        self._owed = self._offered = self._since = 0  # it went into a model that is no more

    def _encode(self) -> tuple[list[memoryview], bytes]:
        session = self._session
        vector = self._replica.offer(self._read, session.current.attempt + 1)
        if vector is None:
            return [], b""
        payloads = []
        for index in range(len(session.grid)):
            start, stop = session.grid.span(index)
            payloads.append(np.empty(session.codec.nbytes(stop - start), np.uint8))
            session.codec.encode(np.ascontiguousarray(vector[start:stop]), payloads[-1])
        return [one.data for one in payloads], b"".join(blake3.blake3(one.data).digest() for one in payloads)
