"""Many trainings of peers that make their inner steps at the same time, as lanes of stacks, with the product's rounds.

A training is one method with some peers and a seed. Each of its peers waits for the clock to make its inner steps, and
the clock makes the next ones as soon as all peers of all trainings wait for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from thinwire.compression.core.types import Floats
from thinwire.node.methods.noloco.replica import step_of
from thinwire.node.methods.registry import METHODS
from thinwire.node.runtime.asyncio_extra import Work
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.method_specs.noloco import NoLoCo

from benchmarks.training.round_table import RoundTable
from benchmarks.training.stacked import StackedTrainers
from benchmarks.training.toy import Toy
from benchmarks.training.unlike import PairRounds

NEVER = 1e6
"""Seconds that fragments wait for each other: results must not depend on the time that an average takes."""

Place = tuple[int, int]
"""Number of a stack, and a lane of it."""


class Clock:
    """Inner steps of all lanes of all stacks. `seconds`: time spent on inner steps, outer steps and evaluations."""

    def __init__(self, stacks: Sequence[StackedTrainers]) -> None:
        self.stacks, self.step = stacks, 0
        self.seconds = {"inner": 0.0, "outer": 0.0, "evaluation": 0.0}
        self._present: dict[Place, None] = {}
        self._waiting: dict[Place, tuple[int, asyncio.Future[None]]] = {}
        self._all = asyncio.Event()

    def enter(self, places: Iterable[Place]) -> None:
        """Make no step unless these lanes wait for it."""
        self._present.update(dict.fromkeys(places))

    def leave(self, places: Iterable[Place]) -> None:
        """Wait for these lanes no longer."""
        for place in places:
            self._present.pop(place, None)
            self._waiting.pop(place, None)
        self._notify()

    async def train(self, place: Place, n: int) -> int:
        """Wait for n inner steps of a lane; return their tokens."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[place] = self.step + n, future
        self._notify()
        await future
        return n * self.stacks[place[0]].step_tokens

    async def run(self, each: int, look: Callable[[], bool]) -> None:
        """Make inner steps until `look`, which is called after every `each` steps, returns False."""
        while True:
            with self._timed("outer"):
                while len(self._waiting) < len(self._present):
                    self._all.clear()
                    await self._all.wait()
                for stack in self.stacks:
                    stack.upload()
            if self.step % each == 0 and self.step:
                with self._timed("evaluation"):
                    go_on = look()
                if not go_on:
                    return
            with self._timed("inner"):
                self._advance(min([each - self.step % each, *(to - self.step for to, _ in self._waiting.values())]))

    def _advance(self, n: int) -> None:
        self.step += n
        due = [place for place, (to, _) in self._waiting.items() if to == self.step]
        for number, stack in enumerate(self.stacks):
            stack.run_steps(n)
            stack.download([lane for which, lane in due if which == number])
        for place in due:
            self._waiting.pop(place)[1].set_result(None)

    def _notify(self) -> None:
        if len(self._waiting) >= len(self._present):
            self._all.set()

    def _timed(self, what: str) -> Timed:
        return Timed(self.seconds, what)


class Timed:
    """Context that adds its duration to an entry of `seconds`."""

    def __init__(self, seconds: dict[str, float], what: str) -> None:
        self._seconds, self._what = seconds, what

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._what] += time.perf_counter() - self._began


class Training:
    """One method with some peers and a seed on some lanes; base of all, and one whose lanes only make inner steps.

    `curve`: pairs of inner steps of each peer and held-out loss. `failure`: the error that ended it, if any.
    """

    def __init__(self, name: str, toy: Toy, stack: int, first: int) -> None:
        self.name, self.toy, self.stack = name, toy, stack
        self.lanes = range(first, first + len(toy.peers))
        self.curve: list[tuple[int, float]] = []
        self.failure = ""

    @property
    def places(self) -> list[Place]:
        """Lanes for which the clock waits."""
        return [(self.stack, lane) for lane in self.lanes]

    @property
    def evaluated(self) -> list[int]:
        """Lanes whose mean loss is that of the training, if there is no `snapshot`."""
        return [self.lanes[0]]

    snapshot: tuple[int, Floats] | None = None
    """Inner steps and outer parameters after the last round, if those are not the parameters of a lane."""

    async def run(self, clock: Clock, work: Work) -> None:
        """Train until cancelled."""

    async def guarded(self, clock: Clock, work: Work) -> None:
        """Train until cancelled; an error ends this training only."""
        try:
            await self.run(clock, work)
        except* Exception as errors:
            first: BaseException = errors
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            self.failure = f"{type(first).__name__}: {first}"
            clock.leave(self.places)


class Plain(Training):
    """Peers that exchange nothing, or gradients in every step."""

    @property
    def places(self) -> list[Place]:
        return []


class Rounds(Training):
    """Peers with the real rounds of a method around a table."""

    def __init__(self, name: str, toy: Toy, stack: int, first: int, manifest: Manifest) -> None:
        super().__init__(name, toy, stack, first)
        self._manifest = manifest

    async def run(self, clock: Clock, work: Work) -> None:
        stack = clock.stacks[self.stack]
        theta = np.empty(stack.layout.total, np.float32)
        stack.layout.read(self.toy.model(), theta)
        learners = [(theta, stack.reader(lane), stack.writer(lane)) for lane in self.lanes]
        table = RoundTable(self._manifest, stack.layout, learners, work=work, patience=NEVER)

        async def train(index: int, n: int) -> int:
            return await clock.train((self.stack, self.lanes[index]), n)

        async def peer(index: int) -> None:
            attempts = 0
            while True:
                await table.attempt(index, train)
                attempts += 1
                if index == 0 and attempts % self._manifest.outer.fragment_count == 0:
                    self.snapshot = clock.step, table.slots[0].replica.theta.copy()

        async with asyncio.TaskGroup() as group:
            for index in range(len(self.lanes)):
                group.create_task(peer(index))


class Pairs(Training):
    """Peers that average in random pairs; their loss is the mean."""

    def __init__(self, name: str, toy: Toy, stack: int, first: int, manifest: Manifest) -> None:
        super().__init__(name, toy, stack, first)
        self._manifest = manifest

    @property
    def evaluated(self) -> list[int]:
        return list(self.lanes)

    async def run(self, clock: Clock, work: Work) -> None:
        stack, spec = clock.stacks[self.stack], self._manifest.method(NoLoCo)
        theta = np.empty(stack.layout.total, np.float32)
        stack.layout.read(self.toy.model(), theta)
        codec = METHODS[self._manifest.outer.method].codec(self._manifest, stack.layout)
        pairs = PairRounds(stack.layout, theta, self.toy.peers, codec, step_of(spec))
        reads, writes = [stack.reader(lane) for lane in self.lanes], [stack.writer(lane) for lane in self.lanes]

        def step(index: int, sent: Sequence[Sequence[memoryview]]) -> None:
            pairs.step(index, reads[index], sent)
            writes[index](pairs.replicas[index].theta)

        def all_of(function: Callable[..., Any], *rest: Any) -> Any:
            return asyncio.gather(*(work(lambda index=index: function(index, *rest)) for index in range(len(reads))))  # type: ignore[misc]

        while True:
            await asyncio.gather(*(clock.train(place, self._manifest.pace) for place in self.places))
            sent = await all_of(lambda index: pairs.offer(index, reads[index]))
            await all_of(step, sent)


def evaluate(
    clock: Clock, trainings: Sequence[Training], samples: dict[int, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Add a point to the curves of trainings that have new parameters. `samples`: held-out ones, by seed."""
    for number, stack in enumerate(clock.stacks):
        vectors, owners = list[torch.Tensor](), list[tuple[Training, int]]()
        for training in trainings:
            if training.stack != number or training.failure:
                continue
            if isinstance(training, Rounds):
                if training.snapshot is None:
                    continue
                step, theta = training.snapshot
                training.snapshot = None
                vectors.append(stack.placed([theta]))
                owners.append((training, step))
            else:
                vectors.append(stack.vectors(training.evaluated))
                owners += [(training, clock.step)] * len(training.evaluated)
        if vectors:
            losses = stack.evaluate(torch.cat(vectors), [samples[training.toy.seed] for training, _ in owners])
            found: dict[Training, list[float]] = {}
            for (training, _), loss in zip(owners, losses, strict=True):
                found.setdefault(training, []).append(loss)
            for training, step in dict(owners).items():
                training.curve.append((step, float(np.mean(found[training]))))


async def play(clock: Clock, trainings: Sequence[Training], look: Callable[[], bool], each: int, work: Work) -> None:
    """Run all trainings until `look`, which is called after every `each` inner steps, returns False."""
    for training in trainings:
        clock.enter(training.places)
    tasks = [asyncio.create_task(training.guarded(clock, work)) for training in trainings]
    try:
        await clock.run(each, look)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
