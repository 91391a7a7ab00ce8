"""Replicas of one process with the real rounds of a dense method, without members, votes or a network.

All announced contributions are averaged with the product's codec and rule as soon as all are there. This shows the
numerical effect of outer methods; the effect of dead, lying or late peers needs a whole world (`world.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from thinwire.collectives.aggregation.rule_factory import dense_rule
from thinwire.collectives.deterministic_rounding import encode
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.data_planes.contributions import summarize
from thinwire.compression.core.types import Buffer, Floats
from thinwire.node.methods.registry import method_of
from thinwire.node.outer.round_loop import RoundLoop
from thinwire.node.runtime.asyncio_extra import Result, Work, at_once
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica_buffers import ParameterWrite, Read
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import Ballot, Commit, Contribution, PeerId, Proposal


class StubSession:
    """Session of a replica, or of one of its fragments, as far as rounds need one."""

    def __init__(self, table: RoundTable, me: PeerId, replica: Any, number: int = 0) -> None:
        self.me, self.replica, self.number, self._table = me, replica, number, table
        self.manifest = table.manifest
        self.catch_up = SimpleNamespace(behind=asyncio.Event(), alone_in_round=False, claimed_over=False)
        self.overtaken = False
        self.quorum_wait = SimpleNamespace(begun=asyncio.Event())
        self.trials = SimpleNamespace(holds=False, on_trial=lambda peer: False)
        self.patience, self.grace = table.patience, table.manifest.exchange.timeout_seconds
        data_plane = SimpleNamespace(summarize=summarize)
        self.current = SimpleNamespace(
            agreement=SimpleNamespace(commit=None, proposal=None), attempt=0, data_plane=data_plane
        )
        self.ready: Collection[PeerId] = table.members

    def make_room(self) -> None:
        """Do nothing: no contributions are stored here."""

    async def average(self, source: Sequence[Buffer], *, weight: int, **rest: Any) -> Outcome:
        """Return the average of all announced contributions."""
        return await self._table.put(self, source, weight)

    async def change(self, work: Work, how: Callable[[], Result], *, settled: bool = True) -> Result:
        result: Result = await work(how)
        if settled:
            await work(self.replica.compute_digest)
        return result

    async def until_given_up(self, futures: Collection[asyncio.Future[Any]], give_up: float) -> None:
        await asyncio.wait(futures, timeout=give_up)

    def fail(self, error: Exception) -> None:
        """Do nothing: the round fails."""

    def advance(self) -> None:
        """Do nothing: there is one round at a time."""

    def waiting_for(self) -> Collection[PeerId]:
        return ()

    def report(self, name: str, detail: str, **fields: object) -> None:
        if name != "uncommitted":
            raise AssertionError(f"{name}: {detail}")


class ReplicaSlot:
    """Peer with its replica and the real rounds of its method."""

    def __init__(self, table: RoundTable, me: PeerId, theta: Floats, read: Read, write: ParameterWrite) -> None:
        manifest, layout = table.manifest, table.layout
        method = method_of(manifest)
        codec = method.codec(manifest, layout)
        self.me = me
        self.replica: Any = method.replica.begin(
            manifest, layout, codec, method.cut(manifest, layout, codec), theta, table.members
        )
        self.session: Any = StubSession(table, me, self.replica)
        if method.partial:
            sessions = {
                number: StubSession(table, me, fragment.replica, number)
                for number, fragment in self.replica.fragments.items()
            }
            self.session = SimpleNamespace(
                replica=self.replica,
                sessions=sessions,
                committed={number: asyncio.Event() for number in sessions},
                now=lambda: 0.0,
                late=lambda proposal, at: 0.0,
            )
        self.rounds: RoundLoop = method.rounds(self.session, manifest, read=read, write=write, work=table.work)
        self.tokens, self.tail = 0, 0
        """Tokens since the last round, and inner steps of the present one that the last exchange overlapped."""


class RoundTable:
    """Peers of one process that average. `learners`: parameters, reader and writer of each replica.

    `fail`: numbers of the rounds whose first attempt fails. `work` computes encodings, averages and outer steps.
    `patience`: seconds that fragments wait for each other. `weights`: of each contribution to each committed round.
    """

    def __init__(
        self,
        manifest: Manifest,
        layout: Layout,
        learners: Sequence[tuple[Floats, Read, ParameterWrite]],
        fail: Collection[int] = (),
        work: Work = at_once,
        patience: float = 1.0,
    ) -> None:
        self.manifest, self.layout, self.fail = manifest, layout, set(fail)
        self.work, self.patience = work, patience
        self.members = tuple(bytes([index]) * 32 for index in range(len(learners)))
        self.weights: list[list[int]] = []
        self.slots = [ReplicaSlot(self, me, *one) for me, one in zip(self.members, learners, strict=True)]
        self._sent: dict[int, dict[PeerId, tuple[Sequence[Buffer], int]]] = {}
        self._outcomes: dict[int, asyncio.Future[Outcome]] = {}

    async def play(
        self, rounds: int, train: Callable[[int, int], int], look: Callable[[], None] = lambda: None
    ) -> None:
        """Attempt rounds, with inner steps before them and during them, like a PeerLifecycle.

        `train(index, steps)` makes one replica's steps and returns their tokens; `look` is called after each attempt.
        """

        async def trained(index: int, steps: int) -> int:
            return train(index, steps)

        for _ in range(rounds):
            await asyncio.gather(*(self.attempt(index, trained) for index in range(len(self.slots))))
            look()

    async def attempt(self, index: int, train: Callable[[int, int], Awaitable[int]]) -> None:
        """Make one peer's inner steps of a round, and attempt the round; the other peers have to do so meanwhile."""
        pace, overlap, slot, tail = self.manifest.pace, self.manifest.overlap, self.slots[index], 0

        async def meanwhile() -> None:
            nonlocal tail
            for _ in range(overlap):
                tail += await train(index, 1)
                await asyncio.sleep(0)

        slot.tokens += await train(index, pace - slot.tail) if pace > slot.tail else 0
        outcome = await slot.rounds.sync(
            weight=slot.tokens, loss=0.0, speed=0.0, meanwhile=meanwhile if overlap else None
        )
        await slot.rounds.settled()
        slot.tokens = tail + (outcome.kept if outcome.commit or outcome.taken else slot.tokens)
        slot.tail = overlap

    async def put(self, session: StubSession, source: Sequence[Buffer], weight: int) -> Outcome:
        """Add one contribution; return when the last one is there."""
        sent = self._sent.setdefault(session.number, {})
        sent[session.me] = (source, weight)
        if session.number not in self._outcomes:
            self._outcomes[session.number] = asyncio.get_running_loop().create_future()
        outcome = self._outcomes[session.number]
        if len(sent) == len(self.members):
            del self._sent[session.number], self._outcomes[session.number]
            outcome.set_result(await self.work(lambda: self.average_of(session, [sent[me] for me in self.members])))
        return await asyncio.shield(outcome)

    def average_of(self, session: StubSession, sent: Sequence[tuple[Sequence[Buffer], int]]) -> Outcome:
        number, cut, codec = session.replica.round + 1, session.replica.grid, session.replica.codec
        if number in self.fail:
            self.fail.remove(number)
            return Outcome()
        weights, results = [weight for _, weight in sent], list[Buffer]()
        if self.manifest.sparse:
            for source, _ in sent:  # a payload that needs fewer pieces leaves its last slots empty
                results += [*source, *[b""] * (len(cut) - len(source))]
        for index in range(0 if self.manifest.sparse else len(cut)):
            mean = np.empty(cut.size(index), np.float32)
            payloads = [source[index] for source, _ in sent if source]
            counting = [float(weight) for source, weight in sent if source]
            dense_rule(self.manifest.exchange.rule)(codec, payloads, counting, mean)
            result = np.empty(codec.nbytes(mean.size), np.uint8)
            encode(codec, mean, result)
            results.append(result.data)
        self.weights.append(weights)
        entries = tuple(Contribution(me, 1, weight) for me, weight in zip(self.members, weights, strict=True))
        ballot = Ballot(1, self.members[0])
        proposal = Proposal(
            number, session.number, ballot, self.members, self.members, entries, (), adopted=None, sources=()
        )
        return Outcome(tuple(results), Commit(proposal, bytes(32), ()))
