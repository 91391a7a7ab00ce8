"""Process of a pipeline replica: `pipeline_process.py STAGE` is a host; the origin runs in the test.

Writes its record (hex) on one line, reads the records of all peers on one line, then works until it is killed or its
input ends.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import uvloop
from thinwire.collectives.transport.zeromq.transport import ZmqTransport
from thinwire.compression.boundary_codec import Boundary
from thinwire.node.membership.handler import Topic
from thinwire.node.membership.presence import Presence
from thinwire.node.pipeline.model.section import ModelSection, cut
from thinwire.node.pipeline.model.stage import Stage
from thinwire.node.pipeline.model.stage_optimizer import StageOptimizer
from thinwire.node.pipeline.step.host import Host
from thinwire.node.pipeline.step.step_context import StepContext
from thinwire.node.training.inner_optimizer import InnerConfig
from thinwire.node.training.models.transformer import ModelConfig, Transformer
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership.presets import WAN
from thinwire.swarm.membership.swim import Roster
from thinwire.swarm.messages.registry import Hello, Welcome

RUN = b"s" * 32
CONFIG = ModelConfig(vocab=40, layers=3, width=64, heads=2, context=128)


def identity(index: int) -> Identity:
    return Identity.generate(bytes([index + 1]) * 32)


class Member:
    """Parts of the process of every stage: transport, presence, a section of the model, and workers."""

    def __init__(self, stage: int) -> None:
        self.identity, self.now = identity(stage), asyncio.get_running_loop().time
        self.transport = ZmqTransport(self.identity, run_id=RUN, admit=self._admit, wall=wall)
        self.section = ModelSection(Transformer(CONFIG, 1), cut(3, (1, 1, 1))[stage], ends=not stage)
        self.update = StageOptimizer(self.section.module, InnerConfig(lr=0.01, warmup=0))
        self.boundary = Boundary("rows(bits=8)", CONFIG.width, CONFIG.vocab, 0)

    def _admit(self, hello: Hello, them: PeerRecord, source: str) -> Welcome:
        return Welcome(self.record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32))

    async def open(self) -> str:
        """Listen; the record as hex."""
        await self.transport.open()
        self.record = PeerRecord.create(
            self.identity, run_id=RUN, addresses=self.transport.addresses(), sequence=1, issued=wall()
        )
        self.transport.learn(self.record)
        return self.record.wire.hex()

    def meet(self, records: list[str]) -> Presence:
        """Be there, with all of these."""
        rng = random.Random(self.identity.peer_id)
        roster = Roster(self.identity, self.record, run_id=RUN, preset=WAN, rng=rng, now=self.now(), wall=wall)
        presence = Presence(self.transport, roster, now=self.now, emit=ignore)
        for text in records:
            record = PeerRecord.parse(bytes.fromhex(text), run_id=RUN, now=wall())
            if record.peer_id != self.identity.peer_id:
                roster.learn(record, self.now())
                self.transport.learn(record)
        self.context = StepContext(self.identity.peer_id, presence.send_queue, self.now, work, ignore)
        return presence


def wall() -> int:
    return int(time.time())


def ignore(name: str, fields: object) -> None:
    pass


async def work(function: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, function)


async def main(stage: int) -> None:
    member = Member(stage)
    print(await member.open(), flush=True)
    presence = member.meet(json.loads(await work(sys.stdin.readline)))
    layers, origin = Stage(member.section, recompute=True), identity(0).peer_id
    host = Host(member.context, origin, stage, layers, member.update, member.boundary, length=CONFIG.context)
    presence.attach(Topic.STAGES, host)
    tasks = [asyncio.create_task(presence.run()), asyncio.create_task(host.run())]
    while await work(sys.stdin.readline):
        pass
    for task in tasks:
        task.cancel()
    await presence.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(main(int(sys.argv[1])))
