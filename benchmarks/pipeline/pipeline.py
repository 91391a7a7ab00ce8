"""A replica in stages: cost of boundaries on slow links, idle share of the stages, cost of the runtime.

    python -m benchmarks.pipeline.pipeline

Links are simulated, in virtual seconds, with real frames and codecs. The model computes next to nothing and has a made-up
computing time. There are four stages, with 100 Mbit/s each way and 50 ms round trip unless stated otherwise.

The last figure compares processor seconds of one thread. A step of a real model has its four stages in one process; every
message is encoded, signed and checked, but passes no socket. The same forward and backward passes are made without messages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.compression.boundary_codec import Boundary
from thinwire.node.pipeline.model.section import ModelSection, cut
from thinwire.node.pipeline.model.stage import Stage
from thinwire.node.pipeline.model.stage_optimizer import StageOptimizer
from thinwire.node.pipeline.step.host import Host
from thinwire.node.pipeline.step.origin import Origin
from thinwire.node.pipeline.step.stage_holders import StageHolders
from thinwire.node.pipeline.step.step_context import StepContext
from thinwire.node.pipeline.step.timeouts import Timeouts
from thinwire.node.training.inner_optimizer import InnerConfig
from thinwire.node.training.models.transformer import ModelConfig, Transformer
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.network import SimNet
from thinwire.sims.network.transport import SimTransport
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import Hello, Welcome

from benchmarks.pipeline.hollow_section import HollowSection
from benchmarks.support import machine

RUN = b"p" * 32
STAGES, MICROS, VOCABULARY = 4, 8, 512
INNER = InnerConfig(optimizer="sgd", lr=0.0, betas=(0.0, 0.0), weight_decay=0.0, warmup=0)
COSTS = {"begin": 1.0, "_forward": 1.0, "turn": 0.0, "finish": 2.0, "_backward": 2.0}
"""Parts of a micro-batch's computing time at one stage; the rest (norms, the inner step) takes none here."""


def batches(length: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows = torch.randint(0, VOCABULARY, (MICROS, size, length + 1), generator=torch.Generator().manual_seed(2))
    return [(row[:, :-1], row[:, 1:]) for row in rows]


async def step(
    sections: list[Any],
    spec: str,
    width: int,
    length: int,
    size: int,
    *,
    rate: float | None,
    latency: float,
    unit: float,
    window: int,
    steps: int = 2,
) -> tuple[float, float, int]:
    """Return virtual seconds, processor seconds and sent bulk bytes of all peers in the last of `steps` steps."""
    net, loop = SimNet(1, latency=latency, bandwidth=rate), asyncio.get_running_loop()
    identities = [Identity.generate(bytes([index + 1]) * 32) for index in range(STAGES)]
    boundary, transports, records, tasks = Boundary(spec, width, VOCABULARY, 1), [], [], []
    runs: list[Origin | Host] = []
    for index, identity in enumerate(identities):
        address = f"10.0.0.{index}:1"
        records.append(PeerRecord.create(identity, run_id=RUN, addresses=(address,), sequence=1, issued=net.wall()))
        welcome = Welcome(records[-1].wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))

        def admit(hello: Hello, them: PeerRecord, source: str, welcome: Welcome = welcome) -> Welcome:
            return welcome

        transports.append(net.transport(identity, RUN, admit, address))
    for index, (identity, transport) in enumerate(zip(identities, transports, strict=True)):
        for record in records:
            transport.learn(record)
        lock = asyncio.Lock()

        async def work(function: Callable[[], Any], lock: asyncio.Lock = lock) -> Any:
            called = getattr(function, "func", function)
            cost = unit * COSTS.get(called.__name__, 0.0)
            async with lock:
                if cost:
                    await asyncio.sleep(cost)
                return function()

        own = sections[index]
        context = StepContext(identity.peer_id, SendQueue(transport), loop.time, work, lambda name, fields: None)
        if index:
            host = Host(
                context,
                identities[0].peer_id,
                index,
                Stage(own),
                StageOptimizer(own, INNER),
                boundary,
                length=length,
            )
            runs.append(host)
            tasks.append(loop.create_task(host.run()))
        else:
            stage_holders = StageHolders({stage: [identities[stage].peer_id] for stage in range(1, STAGES)})
            patience = Timeouts(loop.time, first=600.0, least=60.0)
            runs.append(
                Origin(
                    own, StageOptimizer(own, INNER), boundary, stage_holders, context, patience=patience, window=window
                )
            )
        tasks.append(loop.create_task(receive(transport, runs[-1])))
    origin, data, spent, real, sent = runs[0], batches(length, size), 0.0, 0.0, 0
    assert isinstance(origin, Origin)
    for _ in range(steps):
        before, began = sum(transport.traffic.bulk_up for transport in transports), time.process_time()
        outcome = await origin.step(data)
        assert len(outcome.finished) == MICROS and not outcome.lost and outcome.attempts == MICROS
        spent, real = outcome.seconds, time.process_time() - began
        sent = sum(transport.traffic.bulk_up for transport in transports) - before
    for task in tasks:
        task.cancel()
    return spent, real, sent


async def receive(transport: SimTransport, run: Origin | Host) -> None:
    while True:
        arrival = await transport.recv()
        assert arrival.frame is not None
        run.on_frame(arrival.peer, arrival.frame)


def play(*arguments: Any, **options: Any) -> tuple[float, float, int]:
    return virtual_loop.run(step(*arguments, **options), seed=1, limit=1e6)


def links(width: int, length: int, unit: float, rate: float = 12.5e6) -> list[dict[str, Any]]:
    """Return the figures of each boundary codec on links of `rate` bytes/s and on links without cost."""
    hollow = partial(play, [HollowSection(VOCABULARY, width) for _ in range(STAGES)])
    ideal = hollow("fp32", width, length, 1, rate=None, latency=0.0, unit=unit, window=MICROS)[0]
    found = []
    for spec in ("fp32", "bf16", "rows(bits=8)", "tah", f"subspace(k={width // 8})", f"subspace(k={width // 32})"):
        seconds, _, sent = hollow(spec, width, length, 1, rate=rate, latency=0.025, unit=unit, window=MICROS)
        tokens = MICROS * length
        found.append(
            {
                "boundary": spec,
                "bytes_per_token": round(sent / tokens / STAGES, 1),
                "seconds": round(seconds, 2),
                "tokens_per_second": round(tokens / seconds),
                "of_ideal": round(ideal / seconds, 3),
            }
        )
    return found


def bubble() -> list[dict[str, Any]]:
    """Return the idle part of a step on links that cost nothing, for each window of micro-batches."""
    found = []
    for window in (MICROS, STAGES + 1, STAGES):
        hollow = [HollowSection(VOCABULARY, 16) for _ in range(STAGES)]
        seconds = play(hollow, "fp32", 16, 8, 1, rate=None, latency=0.0, unit=1.0, window=window)[0]
        theory = (STAGES - 1) / (MICROS + STAGES - 1)
        found.append({"window": window, "idle": round(1 - 3 * MICROS / seconds, 4), "theory": round(theory, 4)})
    return found


def overhead(turns: int) -> dict[str, Any]:
    """Return the median processor seconds of a step with and without the runtime, measured by turns."""
    config = ModelConfig(vocab=VOCABULARY, layers=4, width=384, heads=6, context=128)
    whole = Transformer(config, 1)
    sections = [ModelSection(Transformer(config, 1), span, ends=not at) for at, span in enumerate(cut(4, (1, 1, 1, 1)))]
    data, alone, staged = batches(128, 4), [], []
    for _ in range(turns):
        began = time.process_time()
        for tokens, targets in data:
            whole(tokens, targets)[1].backward()
        whole.zero_grad()
        alone.append(time.process_time() - began)
        options: dict[str, Any] = {"rate": None, "latency": 0.0, "unit": 0.0, "window": STAGES, "steps": 1}
        staged.append(play(sections, "fp32", 384, 128, 4, **options)[1])
    first, second = sorted(alone)[turns // 2], sorted(staged)[turns // 2]
    return {"one_process": round(first, 3), "stages": round(second, 3), "overhead": round(second / first - 1, 3)}


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256, help="tokens of a micro-batch")
    parser.add_argument(
        "--unit", type=float, default=0.025, help="seconds of a forward pass at a stage; backward takes two"
    )
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"machine": machine.describe()}
    report["links"] = links(options.width, options.length, options.unit)
    report["bubble"] = bubble()
    report["overhead"] = overhead(options.turns)
    print(f"\n{report['machine']}\n")
    print(
        "| boundary | bytes/token/boundary | step, s | tokens/s | of what links without cost allow |\n|---|---|---|---|---|"
    )
    for row in report["links"]:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    print("\n" + json.dumps(report))


if __name__ == "__main__":
    main()
