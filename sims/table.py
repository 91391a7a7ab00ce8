"""Replicas of one process around a table: the real rounds of a dense method, without members, votes or a network.

What each announces is averaged with the product's codec and rule as soon as all have announced. For what outer methods do to
the numbers; what becomes of them when peers die, lie or come late, whole worlds show (`world.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from thinwire.collectives.aggregate import RULES
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounding import encode
from thinwire.collectives.shards import Grid
from thinwire.compression.codec import Buffer, Floats
from thinwire.node.fragments import Layout
from thinwire.node.methods import METHODS
from thinwire.node.outer import Read, Write
from thinwire.node.rounds import Rounds
from thinwire.node.waiting import Result, Work, at_once
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import Ballot, Commit, Contribution, Open, PeerId


class Seat:
    """A replica's session, as far as rounds ask for one; `rounds` are the real ones."""

    def __init__(self, table: Table, me: PeerId, theta: Floats, read: Read, write: Write) -> None:
        self.me, self._table = me, table
        method = METHODS[table.manifest.outer.method]
        self.codec: Any = method.codec(table.manifest, table.layout)
        self.replica = method.replica.begin(table.manifest, table.layout, self.codec, theta, table.members)
        self._grid = method.cut(table.manifest, table.layout, self.codec)
        self.behind, self.patience = asyncio.Event(), 1.0
        self.current = SimpleNamespace(agreement=SimpleNamespace(commit=None))
        self.ready: Collection[PeerId] = table.members
        self.rounds: Rounds = method.rounds(self, table.manifest, read=read, write=write, work=at_once)

    @property
    def grid(self) -> Grid:
        cut: Grid = self.replica.cut(self._grid)
        return cut

    async def average(self, source: Sequence[Buffer], *, weight: int, **told: Any) -> Outcome:
        """What all announce, averaged."""
        return await self._table.put(self, source, weight)

    async def change(self, work: Work, how: Callable[[], Result]) -> Result:
        result: Result = await work(how)
        return result

    def advance(self) -> None:
        """Nothing: the table has one round at a time."""

    def report(self, name: str, detail: str) -> None:
        raise AssertionError(f"{name}: {detail}")


class Table:
    """See the module. `learners`: for each replica its parameters, and what reads and writes them.

    `fail`: numbers of the rounds whose first try comes to nothing. `weights`: of each contribution to each committed round.
    """

    def __init__(
        self,
        manifest: Manifest,
        layout: Layout,
        learners: Sequence[tuple[Floats, Read, Write]],
        fail: Collection[int] = (),
    ) -> None:
        self.manifest, self.layout, self.fail = manifest, layout, set(fail)
        self.members = tuple(bytes([index]) * 32 for index in range(len(learners)))
        self.weights: list[list[int]] = []
        self.seats = [Seat(self, me, *one) for me, one in zip(self.members, learners, strict=True)]
        self._sent: dict[PeerId, tuple[Sequence[Buffer], int]] = {}
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    async def play(
        self, rounds: int, train: Callable[[int, int], int], look: Callable[[], None] = lambda: None
    ) -> None:
        """Tries of rounds, with inner steps before them and while they are under way, as a life makes them.

        `train(index, steps)` makes one replica's steps and returns their tokens; `look` is called after each try.
        """
        pace, overlap, count = self.manifest.pace, self.manifest.overlap, len(self.seats)
        tokens, tails = [0] * count, [0] * count

        async def one(index: int) -> None:
            rounds, tail = self.seats[index].rounds, 0

            async def meanwhile() -> None:
                nonlocal tail
                for _ in range(overlap):
                    tail += train(index, 1)
                    await asyncio.sleep(0)

            rounds.meanwhile = meanwhile if overlap else None
            outcome = await rounds.sync(weight=tokens[index], loss=0.0, speed=0.0)
            tokens[index] = tail + (outcome.kept if outcome.commit else tokens[index])
            tails[index] = overlap

        for _ in range(rounds):
            for index in range(count):
                tokens[index] += train(index, pace - tails[index]) if pace > tails[index] else 0
            await asyncio.gather(*(one(index) for index in range(count)))
            look()

    async def put(self, seat: Seat, source: Sequence[Buffer], weight: int) -> Outcome:
        """One contribution; returns when the last one is there."""
        self._sent[seat.me], outcome = (source, weight), self._outcome
        if len(self._sent) == len(self.members):
            found, self._sent = [self._sent[me] for me in self.members], {}
            self._outcome = asyncio.get_running_loop().create_future()
            outcome.set_result(self._average(seat, found))
        return await asyncio.shield(outcome)

    def _average(self, seat: Seat, sent: Sequence[tuple[Sequence[Buffer], int]]) -> Outcome:
        number, cut, codec = seat.replica.round + 1, seat.grid, seat.codec
        if number in self.fail:
            self.fail.remove(number)
            return Outcome()
        weights, results = [weight for _, weight in sent], []
        for index in range(len(cut)):
            mean = np.empty(cut.size(index), np.float32)
            payloads = [source[index] for source, _ in sent if source]
            counting = [float(weight) for source, weight in sent if source]
            RULES[self.manifest.exchange.aggregation](codec, payloads, counting, mean)
            result = np.empty(codec.nbytes(mean.size), np.uint8)
            encode(codec, mean, result)
            results.append(result.data)
        self.weights.append(weights)
        entries = tuple(Contribution(me, 1, weight) for me, weight in zip(self.members, weights, strict=True))
        ballot = Ballot(1, self.members[0])
        opened = Open(number, 0, ballot, self.members, self.members, entries, (), adopted=None, sources=())
        return Outcome(tuple(results), Commit(opened, bytes(32), ()))
