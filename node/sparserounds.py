"""Rounds of sparse payloads: everybody gets what all contributors sent, or owners made of it, and computes the same step."""

from __future__ import annotations

from typing import cast

import blake3
from thinwire.collectives.outcome import Outcome
from thinwire.node.chainrounds import ChainRounds
from thinwire.node.rounds import Rounds
from thinwire.node.sparse import SparseReplica
from thinwire.swarm.protocol import Commit


class SparseRounds(Rounds):
    """What `Rounds` is where chunks are averaged. What was not sent is committed or rolled back with the round."""

    @property
    def _replica(self) -> SparseReplica:
        return cast(SparseReplica, self._session.replica)

    async def sync(self, *, weight: int, loss: float, speed: float) -> Outcome:
        """See Rounds.sync."""
        try:
            return await super().sync(weight=weight, loss=loss, speed=speed)
        finally:
            self._replica.rollback()

    async def _late(self, weight: int) -> None:
        """The others have committed without us: what we would have sent is treated as what was sent in vain. And when they have
        counted an earlier announcement of ours, what it said is known.
        """
        if weight or self._replica.sent:
            await self._forgo()

    async def _forgo(self) -> None:
        try:
            await self._work(lambda: self._replica.prepare(self._read))
        except FloatingPointError as error:
            self._session.report("unsent", str(error))

    async def _apply(self, outcome: Outcome, commit: Commit, *, settled: bool = True) -> None:
        session, replica = self._session, self._replica
        await session.change(
            self._work,
            lambda: replica.commit(
                outcome.results,
                commit.opened.contributors,
                session.grid,
                me=session.me,
                members=commit.opened.members,
            ),
            settled=settled,
        )

    def _encode(self) -> tuple[list[memoryview], bytes]:
        session, replica = self._session, self._replica
        payload = replica.prepare(self._read, session.current.attempt + 1)
        pieces = replica.codec.cut(payload, replica.feedback.choice, session.grid)
        return pieces, b"".join(blake3.blake3(piece).digest() for piece in pieces)


class SparseChainRounds(SparseRounds, ChainRounds):
    """The same of one fragment, beside training: see ChainRounds."""

    async def _forgo(self) -> None:
        """See SparseRounds, so that nothing of it is left."""
        await self._floor.visit(super()._forgo)

    def _encode(self) -> tuple[list[memoryview], bytes]:
        """See OverlappedRounds."""
        try:
            return super()._encode()
        except FloatingPointError:
            self._write(self._replica.theta)
            raise
