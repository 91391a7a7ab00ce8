"""Gain of planned paths that skip stages on uneven links, and the accuracy of the planned times of steps.

    python -m benchmarks.pipeline.skippipe

Virtual time, real frames, a model that computes almost nothing, whose duration is that of the instance. One origin and ten
hosts, two of each of five stages: the cities of the published instance gcp12_33m2 without London, one of whose links is
mistyped. "latency": all of a link's delay is latency; "rate": most of it is bandwidth, which micro-batches on one link share.
The origin knows nothing of the links at first. "full": no stage skipped, peers of a stage in turn by their measured speed;
"full, planned": no stage skipped, paths planned.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.compression.boundary_codec import Boundary
from thinwire.node.pipeline.model.section import ModelSection
from thinwire.node.pipeline.model.stage import Stage
from thinwire.node.pipeline.model.stage_optimizer import StageOptimizer
from thinwire.node.pipeline.planner.problem import Problem, UnarrangedProblem, load
from thinwire.node.pipeline.planner.stage_arrangement import arranged
from thinwire.node.pipeline.step.gradient_ledger import StepOutcome
from thinwire.node.pipeline.step.host import Host
from thinwire.node.pipeline.step.measurements import Measurements
from thinwire.node.pipeline.step.origin import Origin
from thinwire.node.pipeline.step.route_planner import RoutePlanner
from thinwire.node.pipeline.step.stage_holders import StageHolders
from thinwire.node.pipeline.step.step_context import StepContext
from thinwire.node.pipeline.step.timeouts import Timeouts
from thinwire.node.training.inner_optimizer import InnerConfig
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.network import SimNet
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import Hello, PeerId, Welcome

from benchmarks.pipeline.hollow_section import HollowSection
from benchmarks.support import machine

RUN = b"k" * 32
WIDTH, LENGTH, VOCABULARY = 64, 16, 64
INNER = InnerConfig(optimizer="sgd", lr=0.0, betas=(0.0, 0.0), weight_decay=0.0, warmup=0)
COSTS = {"begin": 1.0, "_forward": 1.0, "turn": 0.25, "finish": 1.5, "_backward": 1.5}
"""Parts of a micro-batch's computing time at one peer, as plans count them."""

FILE = Path(__file__).parents[2] / "examples" / "pipelines" / "gcp12_33m2.json"


@dataclass
class Replica:
    """An origin and hosts on the links of `instance`, all of it in virtual time; made inside `virtual_loop.run`.

    `events`: (seconds, peer, name, fields) of what hosts did. `watch` is called with each of them. `paces`: seconds of a
    forward of each peer, may be changed.
    """

    instance: Problem
    micros: int
    room: int
    plan: dict[str, Any] | None
    window: int = 0
    rates: bool = False
    events: list[tuple[float, int, str, dict[str, Any]]] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    watch: Callable[[float, int, str, dict[str, Any]], None] | None = None

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.paces = self.instance.work.tolist()
        self.ids = [Identity.generate(bytes([index + 1]) * 32) for index in range(self.instance.peers)]
        self.number = {identity.peer_id: index for index, identity in enumerate(self.ids)}
        payload = float(WIDTH * LENGTH * 4)

        def latency(a: PeerId, b: PeerId) -> float:
            delay = float(self.instance.delays[self.number[a], self.number[b]])
            return min(0.1, delay / 4) if self.rates else delay

        def stream(a: PeerId, b: PeerId) -> float | None:
            delay = float(self.instance.delays[self.number[a], self.number[b]])
            return payload / (delay - latency(a, b)) if self.rates and delay else None

        self.net = SimNet(1, latency=latency, stream=stream, patience=1e6, deadline=60.0)
        self.boundary = Boundary("fp32", WIDTH, VOCABULARY, 1)
        self.transports, records = [], []
        for index, identity in enumerate(self.ids):
            place = f"10.0.0.{index}:1"
            record = PeerRecord.create(identity, run_id=RUN, addresses=(place,), sequence=1, issued=self.net.wall())
            welcome = Welcome(record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))
            records.append(record)

            def admit(hello: Hello, them: PeerRecord, source: str, welcome: Welcome = welcome) -> Welcome:
                return welcome

            self.transports.append(self.net.transport(identity, RUN, admit, place))
        for transport in self.transports:
            for record in records:
                transport.learn(record)
        me, stages = self.ids[0].peer_id, self.instance.stages
        holders = {stage: [self.ids[p].peer_id for p in members] for stage, members in enumerate(stages) if stage}
        for stage, members in list(enumerate(stages))[1:]:
            for index in members:
                own = HollowSection(VOCABULARY, WIDTH)
                host = Host(
                    self.context(index), me, stage, Stage(own), StageOptimizer(own, INNER), self.boundary,
                    length=LENGTH, room=self.room,
                )  # fmt: skip
                self.hosts.append(host)
                self.start(index, host, host.run())
        own, context = HollowSection(VOCABULARY, WIDTH), self.context(0)
        self.measurements = Measurements(loop.time)
        route_planner = None
        if self.plan is not None:
            route_planner = RoutePlanner(self.measurements, room=self.room, emit=context.emit, **self.plan)
        self.origin = Origin(
            cast(ModelSection, own), StageOptimizer(own, INNER), self.boundary, StageHolders(holders), context,
            patience=Timeouts(loop.time, first=900.0, least=200.0),
            window=self.window or self.micros, route_planner=route_planner,
        )  # fmt: skip
        self.route_planner = route_planner
        self.start(0, self.origin)

    def context(self, index: int) -> StepContext:
        loop, lock = asyncio.get_running_loop(), asyncio.Lock()

        async def work(function: Callable[[], Any]) -> Any:
            called = getattr(function, "func", function)
            cost = self.paces[index] * COSTS.get(called.__name__, 0.0)
            async with lock:
                if cost:
                    await asyncio.sleep(cost)
                return function()

        def emit(name: str, fields: Any) -> None:
            event = (loop.time(), index, name, dict(fields))
            self.events.append(event)
            if self.watch is not None:
                self.watch(*event)

        def unreachable(peer: PeerId) -> None:
            (self.origin if not index else self.host(index)).on_link_down(peer, gone=False)

        send_queue = SendQueue(self.transports[index], unreachable)
        return StepContext(self.ids[index].peer_id, send_queue, loop.time, work, emit)

    def host(self, index: int) -> Host:
        return next(host for host in self.hosts if host.me == self.ids[index].peer_id)

    def start(self, index: int, runs: Origin | Host, also: Any = None) -> None:
        async def receive() -> None:
            while True:
                arrival = await self.transports[index].recv()
                if arrival.frame is None:
                    runs.on_link_down(arrival.peer, gone=arrival.gone)
                else:
                    runs.on_frame(arrival.peer, arrival.frame)

        loop = asyncio.get_running_loop()
        self.tasks += [loop.create_task(receive()), *([loop.create_task(also)] if also is not None else [])]

    def kill(self, index: int) -> None:
        """Kill a host."""
        self.net.kill(self.ids[index].peer_id)
        for task in self.tasks[2 * index - 2 : 2 * index]:
            task.cancel()

    async def step(self, visits: Sequence[Any] | None = None) -> StepOutcome:
        """One step."""
        rows = torch.zeros(1, LENGTH + 1, dtype=torch.int64)
        self.events.clear()
        return await self.origin.step([(rows[:, :-1], rows[:, 1:])] * self.micros, visits)


def cities() -> Problem:
    """One origin and ten hosts in five stages, arranged by the planner."""
    asked = load(FILE.read_bytes())
    assert isinstance(asked, UnarrangedProblem)
    here = [p for p in range(asked.instance.peers) if asked.instance.places[p] != "London"]
    whole = replace(
        asked.instance,
        delays=asked.instance.delays[np.ix_(here, here)],
        work=asked.instance.work[here],
        memory=asked.instance.memory[here],
        places=tuple(asked.instance.places[p] for p in here),
        stages=tuple((p,) for p in range(6)),
        gap=0.0,
    )
    found = arranged(UnarrangedProblem(whole, (1, 2, 2, 2, 2, 2), 1.0))
    order = [p for stage in found.stages for p in stage]
    ends = np.cumsum([0, *(len(stage) for stage in found.stages)]).tolist()
    return replace(
        found,
        delays=found.delays[np.ix_(order, order)],
        places=tuple(found.places[p] for p in order),
        stages=tuple(tuple(range(a, b)) for a, b in zip(ends, ends[1:], strict=False)),
    )


async def steps(
    instance: Problem, plan: dict[str, Any] | None, *, micros: int, room: int, window: int, rates: bool, count: int
) -> list[tuple[float, float, int]]:
    """Return for each step its virtual seconds, those of the plan, and the number of plans so far."""
    replica = Replica(instance, micros, room, plan, window=window, rates=rates)
    found = []
    for _ in range(count):
        outcome = await replica.step()
        assert len(outcome.finished) == micros and not outcome.lost, outcome
        found.append((outcome.measured, outcome.planned, replica.route_planner.plans if replica.route_planner else 0))
    for task in replica.tasks:
        task.cancel()
    return found


def main() -> None:
    """Print a line for each kind of links."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micros", type=int, default=12)
    parser.add_argument("--room", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip", type=float, default=1 / 3)
    parser.add_argument("--tries", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=15, help="steps between two plans")
    parser.add_argument("--verbose", action="store_true", help="every step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine.describe())
    print(
        "| links | full | full, planned | skipping, first step | last | planned | less than full | off the plan | plans |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    instance = cities()
    for rates in (False, True):
        common = {"micros": options.micros, "room": options.room, "rates": rates}
        whole = virtual_loop.run(steps(instance, None, window=2 * options.room, count=4, **common), seed=1, limit=1e6)[
            -1
        ][0]
        plan = {"tries": options.tries, "every": options.every}
        best, found = (
            virtual_loop.run(
                steps(instance, {**plan, "skip": skip}, window=0, count=options.steps, **common), seed=1, limit=1e6
            )
            for skip in (0.0, options.skip)
        )
        for line in found if options.verbose else ():
            print(line)
        real, planned, plans = found[-1]
        print(
            f"| {'rate' if rates else 'latency'} | {whole:.1f} | {best[-1][0]:.1f} | {found[0][0]:.1f} | {real:.1f} "
            f"| {planned:.1f} | {100 * (1 - real / whole):.0f} % | {100 * (real / planned - 1):+.1f} % | {plans} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
