"""Rounds of sparse payloads: everybody gets what every contributor sent, and computes the same step from it."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import blake3
from thinwire.collectives.gather import cut_up
from thinwire.collectives.outcome import Outcome
from thinwire.node.rounds import GIVE_UP, Rounds
from thinwire.node.sparse import SparseReplica
from thinwire.node.waiting import whole
from thinwire.swarm.protocol import Commit


class SparseRounds(Rounds):
    """What `Rounds` is where chunks are averaged. What was not sent is committed or rolled back with the round."""

    @property
    def _replica(self) -> SparseReplica:
        return cast(SparseReplica, self._session.replica)

    async def sync(self, *, weight: int, loss: float, speed: float) -> Outcome:
        """See Rounds.sync."""
        session = self._session
        try:
            if session.current.agreement.commit is None and not session.behind.is_set():
                try:
                    payloads, hashes = await self._work(self._encode)
                except FloatingPointError as error:
                    session.report("unsent", str(error))
                    payloads, hashes = [], b""
                outcome = await session.average(
                    payloads,
                    hashes=hashes,
                    weight=weight if payloads else 0,
                    loss=loss,
                    speed=speed,
                    give_up=self._exchange.grace + GIVE_UP * session.patience,
                )
            else:
                outcome = await session.outcome(give_up=GIVE_UP * session.patience)
                if outcome.commit is not None and weight:
                    await self._late()
            if outcome.commit is not None:
                await whole(self._commit(outcome, outcome.commit))
            elif outcome.diverged or session.behind.is_set():
                if not await self._catch_up():
                    session.again()
                    await session.pause()
        finally:
            self._replica.rollback()
        return replace(outcome, results=())

    async def _late(self) -> None:
        """The others have committed without us: what we would have sent is treated as what was sent in vain."""
        try:
            await self._work(self._encode)
        except FloatingPointError as error:
            self._session.report("unsent", str(error))

    async def _commit(self, outcome: Outcome, commit: Commit) -> None:
        """Apply a commit, whole: whoever cancels `sync` on the way waits for it."""
        session, replica, entries = self._session, self._replica, commit.opened.contributors
        session.applying()
        await self._work(
            lambda: replica.commit(
                outcome.results,
                [entry.weight for entry in entries],
                session.grid,
                members=commit.opened.alive,
                named=any(entry.peer == session.me for entry in entries),
            )
        )
        await self._adopt()

    def _encode(self) -> tuple[list[memoryview], bytes]:
        session = self._session
        pieces = cut_up(self._replica.prepare(self._read), session.grid)
        return pieces, b"".join(blake3.blake3(piece).digest() for piece in pieces)
