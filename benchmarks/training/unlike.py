"""Trainings of replicas that differ or do not wait for each other, with the product's replicas and rounds."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from blake3 import blake3
from thinwire.collectives.aggregation.rule_factory import RULES
from thinwire.collectives.gossip.means import Means, MeshMeans
from thinwire.collectives.gossip.owner_group import MESH, OwnerGroup
from thinwire.collectives.gossip.pair import PairTerms
from thinwire.collectives.gossip.pair_codec import PairCodec, parse_pair_codec
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.topology.matching import others
from thinwire.collectives.topology.shards import Grid, grid
from thinwire.compression.core.types import Floats
from thinwire.node.methods.noloco.replica import GossipReplica, GossipStep
from thinwire.node.methods.overlapped.co2 import Co2Replica
from thinwire.node.methods.overlapped.eager import EagerReplica
from thinwire.node.methods.registry import METHODS
from thinwire.node.state.layout import Layout, layout_of
from thinwire.node.state.replica_buffers import ParameterWrite, Read
from thinwire.node.training.inner_loop import Trainer
from thinwire.node.training.step_balancing import steps_by_power
from thinwire.swarm.frame import Frame
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.messages.registry import Ballot, Commit, Contribution, Proposal

from benchmarks.training.round_table import RoundTable
from benchmarks.training.toy import PEERS, Toy


class ByAll(MeshMeans):
    """Means that divide each value by all members, also by those that have not sent it."""

    def fast(self, index: int, out: Floats) -> bool:
        self._mean(self._codecs.fast, index, out)
        return True


class PairRounds:
    """NoLoCo's replicas of one process: in every round each averages with one or more partners, drawn as in the product.

    `means`: those of groups up to MESH.
    """

    def __init__(
        self,
        layout: Layout,
        theta: Floats,
        peers: Sequence[bytes],
        codec: PairCodec,
        step: GossipStep,
        group: int = 2,
        means: type[MeshMeans] = MeshMeans,
    ) -> None:
        self.replicas = [GossipReplica(layout.digest, theta, ()) for _ in peers]
        self._peers, self._view, self._group, self._means = list(peers), sorted(peers), group, means
        self._codec, self._cut, self._step = codec, grid(layout.total, codec), step
        self._owned: dict[bytes, OwnerGroup] = {}
        """The last group whose chunks have owners."""

    def offer(self, index: int, read: Read) -> list[memoryview]:
        """Return the payloads of one replica's contribution."""
        one = self.replicas[index]
        return [*one.offer(read, self._cut, self._codec), *one.base(self._cut, self._codec)]

    def step(self, index: int, read: Read, sent: Sequence[Sequence[memoryview]]) -> None:
        """Make one replica's outer step, given the payloads of all."""
        one, me = self.replicas[index], self._peers[index]
        drawn = others(bytes(32), one.round, self._view, me, self._group)
        group = sorted({me, *drawn})
        payloads = [sent[self._peers.index(peer)] for peer in group]
        means: Means | None = None
        if drawn and self._group > MESH:
            if self._owned.keys() != set(group) or self._owned[me].round != one.round + 1:
                self._owned = owner_groups(group, payloads, self._cut, self._codec, one.round + 1)
            means = self._owned[me].means(group)
        elif drawn:
            means = self._means(payloads, group.index(me), self._cut, self._codec, one.round + 1)
        one.step(read, sent[index], means, self._cut, self._codec, members=(), pull=self._step)


def owner_groups(
    members: Sequence[bytes], sent: Sequence[Sequence[memoryview]], cut: Grid, codec: PairCodec, round: int
) -> dict[bytes, OwnerGroup]:
    """Return the product's groups of these members after a round of theirs, in which frames arrive at once.

    `sent`: payloads of each member's contribution, see `PairRounds.offer`.
    """
    frames: deque[tuple[bytes, bytes, Frame]] = deque()

    def member(me: bytes) -> OwnerGroup:
        queue: Any = SimpleNamespace(
            control=lambda to, message: frames.append((me, to, Frame(message))),
            bulk=lambda to, frame: frames.append((me, to, frame)),
            withdraw=lambda *of: None,
            received_over_relay=lambda peer: None,
        )
        terms = PairTerms(round, bytes(32), cut, codec, 1, queue, lambda: 1.0, 1.0)
        group = OwnerGroup(terms, me=me, size=len(members))
        group.choose(tuple(peer for peer in members if peer != me), members)
        return group

    def deliver() -> None:
        while frames:
            sender, to, frame = frames.popleft()
            groups[to].on_frame(sender, frame)

    groups = {me: member(me) for me in members}
    hashes = [[blake3(payload).digest() for payload in payloads] for payloads in sent]
    for payloads, known, group in zip(sent, hashes, groups.values(), strict=True):
        if codec.slow is not None:
            group.post(payloads[len(cut) :], b"".join(known[len(cut) :]))
    deliver()
    for payloads, known, group in zip(sent, hashes, groups.values(), strict=True):
        fast = b"".join(known[: len(cut)])
        group.announce(payloads[: len(cut)], fast, weight=1, loss=0.0, speed=0.0, deadline=1.0)
    deliver()
    assert not any(group.outstanding for group in groups.values())
    return groups


def paired(
    gamma: float,
    lr: float = 0.7,
    momentum: float = 0.5,
    group: int = 2,
    codec: str = "fp32",
    seen: Callable[[int, Sequence[GossipReplica]], None] = lambda number, replicas: None,
    parts: int = 1,
    decay: float = 1.0,
    means: type[MeshMeans] = MeshMeans,
) -> Callable[[Toy], float]:
    """Return NoLoCo with these settings. `seen` is called after each round."""

    def run(toy: Toy) -> float:
        trainers = toy.trainers()
        layout = layout_of(trainers[0].model)
        theta = np.empty(layout.total, np.float32)
        layout.read(trainers[0].model, theta)
        how, pull = parse_pair_codec(codec, lr=lr, gamma=gamma, parts=parts), GossipStep(momentum, lr, gamma, decay)
        pairs = PairRounds(layout, theta, toy.peers, how, pull, group, means)

        def reader(trainer: Trainer) -> Read:
            return lambda start, stop, out: layout.read(trainer.model, out, start)

        reads = [reader(trainer) for trainer in trainers]
        for number in range(toy.rounds):
            for trainer in trainers:
                trainer.run_steps(toy.steps)
            sent = [pairs.offer(index, read) for index, read in enumerate(reads)]
            for index, (read, trainer) in enumerate(zip(reads, trainers, strict=True)):
                pairs.step(index, read, sent)
                layout.write(trainer.model, pairs.replicas[index].theta)
            seen(number, pairs.replicas)
        return float(np.mean([toy.loss(trainer) for trainer in trainers]))

    return run


class Naive(EagerReplica):
    """One-round overlap without eager updates: every peer applies late results, and nothing else."""

    def share(self, peers: int) -> float:
        return 0.0


class Heavy(Co2Replica):
    """CO2 whose steps all count in full, however late they come."""

    def penalty(self, *arguments: object) -> float:
        return 1.0


def overlapped(outer: str, *, naive: bool = False, codec: str = "fp32") -> Callable[[Toy], float]:
    """Methods that train while they exchange, with the product's rounds and replicas around a table."""

    def run(toy: Toy) -> float:
        manifest = parse(f'[exchange]\ncodec = "{codec}"\n[outer]\nsync_every = {toy.steps}\n{outer}')
        trainers = toy.trainers()
        layout = layout_of(trainers[0].model)

        def learner(trainer: Trainer) -> tuple[Floats, Read, ParameterWrite]:
            theta = np.empty(layout.total, np.float32)
            layout.read(trainer.model, theta)
            return (
                theta,
                lambda start, stop, out: layout.read(trainer.model, out, start),
                lambda theta, start=0, keep=0.0: layout.write(trainer.model, theta, start, keep),
            )

        async def play() -> Floats:
            table = RoundTable(manifest, layout, [learner(trainer) for trainer in trainers])
            if naive:
                for slot in table.slots:
                    slot.replica.__class__ = Heavy if isinstance(slot.replica, Co2Replica) else Naive
            await table.play(
                toy.rounds * toy.steps // manifest.pace, lambda index, steps: trainers[index].run_steps(steps).tokens
            )
            assert len({slot.replica.digest for slot in table.slots}) == 1
            theta: Floats = table.slots[0].replica.theta
            return theta

        layout.write(trainers[0].model, asyncio.run(play()))
        return toy.loss(trainers[0])

    return run


UNEQUAL = (1.0, 1.3, 2.0, 4.0)
"""Time that an inner step takes each replica, where they are unequal."""


def asynchronous(outer: str, *, grace: float = 0.5) -> Callable[[Toy], float]:
    """Methods without waits, by the clock of unequal machines, until as many steps are made as in other runs.

    A round has the replicas that are ready within `grace` after the first one; its unit is a step of the quickest replica.
    """

    def run(toy: Toy) -> float:
        manifest = parse(f'[exchange]\ncodec = "fp32"\n[outer]\nsync_every = {toy.steps}\n{outer}')
        method, chosen = METHODS[manifest.outer.method], manifest.outer
        total = toy.rounds * toy.steps * len(PEERS)
        counts = [toy.steps] * len(PEERS)
        if chosen.step_ratio != 1.0:
            speeds = [1 / seconds for seconds in UNEQUAL]
            counts = [steps_by_power(own, speeds, toy.steps, chosen.step_ratio) for own in speeds]
        pace = sum(1 / seconds for seconds in UNEQUAL)
        trainers = [
            Trainer(
                toy.model(),
                replace(toy.inner, steps=round(total / seconds / pace)),
                toy.batches(peer),
                clock=time.perf_counter,
            )
            for peer, seconds in zip(PEERS, UNEQUAL, strict=True)
        ]
        layout = layout_of(trainers[0].model)
        theta = np.empty(layout.total, np.float32)
        layout.read(trainers[0].model, theta)
        codec = method.codec(manifest, layout)
        cut, made = grid(layout.total, codec), 0
        replicas: list[Any] = [method.replica.begin(manifest, layout, codec, cut, theta, PEERS) for _ in PEERS]
        ready = [(count * seconds, index) for index, (count, seconds) in enumerate(zip(counts, UNEQUAL, strict=True))]
        while made < total:
            closes = min(ready)[0] + grace
            some = sorted(index for at, index in ready if at <= closes)
            ready = [one for one in ready if one[0] > closes]
            payloads, tokens = [], []
            for index in some:
                tokens.append(float(trainers[index].run_steps(counts[index]).tokens))
                made += counts[index]
                model = trainers[index].model
                payloads.append(
                    list(
                        replicas[index].contribution(
                            lambda a, b, out, m=model: layout.read(m, out, a), attempt=1, peers=len(PEERS)
                        )
                    )
                )
            results = []
            for chunk in range(len(cut)):
                mean = np.empty(cut.size(chunk), np.float32)
                RULES["mean"](codec, [payload[chunk] for payload in payloads], tokens, mean)
                results.append(mean.view(np.uint8).data)
            entries = tuple(Contribution(PEERS[index], 1, 1) for index in some)
            proposal = Proposal(
                1, 0, Ballot(1, PEERS[0]), tuple(PEERS), tuple(PEERS), entries, (), adopted=None, sources=()
            )
            for replica in replicas:
                replica.commit(Outcome(tuple(results), Commit(proposal, bytes(32), ())), PEERS[0])
            for index in some:
                replicas[index].reset()
                layout.write(trainers[index].model, replicas[index].theta)
                ready.append((closes + counts[index] * UNEQUAL[index], index))
        assert len({replica.digest for replica in replicas}) == 1
        layout.write(trainers[0].model, replicas[0].theta)
        return toy.loss(trainers[0])

    return run
