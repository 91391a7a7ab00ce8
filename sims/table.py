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
from thinwire.node.chains import ChainedReplica
from thinwire.node.fragments import Layout
from thinwire.node.methods import method_of
from thinwire.node.outer import Read, Write
from thinwire.node.rounds import Rounds
from thinwire.node.waiting import Result, Work, at_once
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import Ballot, Commit, Contribution, Open, PeerId


class Session:
    """The session of a replica, or of one of its fragments, as far as rounds ask for one."""

    def __init__(self, table: Table, me: PeerId, replica: Any, codec: Any, cut: Grid, number: int = 0) -> None:
        self.me, self.replica, self.codec, self.number, self._table, self._grid = me, replica, codec, number, table, cut
        self.following = SimpleNamespace(behind=asyncio.Event(), lone=False)
        self.patience, self.grace = 1.0, table.manifest.exchange.seconds
        self.current = SimpleNamespace(agreement=SimpleNamespace(commit=None, opened=None), attempt=0)
        self.ready: Collection[PeerId] = table.members

    @property
    def grid(self) -> Grid:
        cut: Grid = self.replica.cut(self._grid)
        return cut

    async def average(self, source: Sequence[Buffer], *, weight: int, **told: Any) -> Outcome:
        """What all announce, averaged."""
        return await self._table.put(self, source, weight)

    async def change(self, work: Work, how: Callable[[], Result], *, settled: bool = True) -> Result:
        result: Result = await work(how)
        if settled:
            self.replica.settle()
        return result

    def fail(self, error: Exception) -> None:
        """Nothing: the round fails."""

    def advance(self) -> None:
        """Nothing: the table has one round at a time."""

    def waiting_for(self) -> Collection[PeerId]:
        return ()

    def report(self, name: str, detail: str) -> None:
        if name != "uncommitted":
            raise AssertionError(f"{name}: {detail}")


class Seat:
    """A peer at the table: its replica, and the real rounds of its method."""

    def __init__(self, table: Table, me: PeerId, theta: Floats, read: Read, write: Write) -> None:
        manifest, layout = table.manifest, table.layout
        method = method_of(manifest)
        codec = method.codec(manifest, layout)
        self.me = me
        self.replica: Any = method.replica.begin(manifest, layout, codec, theta, table.members)
        self.session: Any = Session(table, me, self.replica, codec, method.cut(manifest, layout, codec))
        if isinstance(self.replica, ChainedReplica):
            links = {
                number: Session(table, me, chain.replica, chain.codec, chain.grid, number)
                for number, chain in self.replica.chains.items()
            }
            self.session = SimpleNamespace(
                replica=self.replica, links=links, now=lambda: 0.0, late=lambda opened, at: 0.0
            )
        self.rounds: Rounds = method.rounds(self.session, manifest, read=read, write=write, work=at_once)


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
        self._sent: dict[int, dict[PeerId, tuple[Sequence[Buffer], int]]] = {}
        self._outcomes: dict[int, asyncio.Future[Outcome]] = {}

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
            await rounds.settled()
            tokens[index] = tail + (outcome.kept if outcome.commit or outcome.taken else tokens[index])
            tails[index] = overlap

        for _ in range(rounds):
            for index in range(count):
                tokens[index] += train(index, pace - tails[index]) if pace > tails[index] else 0
            await asyncio.gather(*(one(index) for index in range(count)))
            look()

    async def put(self, seat: Session, source: Sequence[Buffer], weight: int) -> Outcome:
        """One contribution; returns when the last one is there."""
        sent = self._sent.setdefault(seat.number, {})
        sent[seat.me] = (source, weight)
        if seat.number not in self._outcomes:
            self._outcomes[seat.number] = asyncio.get_running_loop().create_future()
        outcome = self._outcomes[seat.number]
        if len(sent) == len(self.members):
            del self._sent[seat.number], self._outcomes[seat.number]
            outcome.set_result(self._average(seat, [sent[me] for me in self.members]))
        return await asyncio.shield(outcome)

    def _average(self, seat: Session, sent: Sequence[tuple[Sequence[Buffer], int]]) -> Outcome:
        number, cut, codec = seat.replica.round + 1, seat.grid, seat.codec
        if number in self.fail:
            self.fail.remove(number)
            return Outcome()
        weights, results = [weight for _, weight in sent], list[Buffer]()
        if self.manifest.sparse:
            results = [piece for source, _ in sent for piece in source]
        for index in range(0 if self.manifest.sparse else len(cut)):
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
        opened = Open(number, seat.number, ballot, self.members, self.members, entries, (), adopted=None, sources=())
        return Outcome(tuple(results), Commit(opened, bytes(32), ()))
