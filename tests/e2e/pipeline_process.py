"""One process of a replica in stages: `pipeline_process.py INDEX`. Stage 0 is the origin, the others are hosts.

Writes its record (hex) on a line, reads those of all on a line, and then works. The origin makes a step for every further
line and writes what came of it; hosts work until they are killed, or their input ends.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

import torch
import uvloop
from thinwire.collectives.wire import ZmqTransport
from thinwire.node.inner import InnerConfig
from thinwire.node.model import ModelConfig
from thinwire.node.pipeline.boundary import Boundary
from thinwire.node.pipeline.crew import Crew
from thinwire.node.pipeline.host import Host
from thinwire.node.pipeline.origin import Origin
from thinwire.node.pipeline.patience import Patience
from thinwire.node.pipeline.section import cut, section
from thinwire.node.pipeline.stage import Stage
from thinwire.node.pipeline.update import Update
from thinwire.node.presence import Presence
from thinwire.swarm.identity import Identity
from thinwire.swarm.preset import WAN
from thinwire.swarm.protocol import Welcome
from thinwire.swarm.record import PeerRecord
from thinwire.swarm.roster import Roster

RUN = b"s" * 32
CONFIG = ModelConfig(vocab=40, layers=3, width=64, heads=2, context=128)
MICROS = 5


def identity(index: int) -> Identity:
    return Identity.generate(bytes([index + 1]) * 32)


async def line() -> str:
    return (await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)).strip()


def say(text: str) -> None:
    print(text, flush=True)


async def main(index: int) -> None:
    now = asyncio.get_running_loop().time
    me = identity(index)

    def wall() -> int:
        return int(time.time())

    transport = ZmqTransport(
        me,
        run_id=RUN,
        wall=wall,
        admit=lambda hello, them: Welcome(record.wire, b"", bytes(32), bytes(64), (), "", "", bytes(32)),
    )
    await transport.open()
    record = PeerRecord.create(me, run_id=RUN, addresses=transport.addresses(), sequence=1, issued=wall())
    transport.learn(record)
    say(record.wire.hex())
    roster = Roster(me, record, run_id=RUN, preset=WAN, rng=random.Random(index), now=now(), wall=wall)
    presence = Presence(transport, roster, now=now, emit=lambda name, fields: None)
    for wire in json.loads(await line()):
        other = PeerRecord.parse(bytes.fromhex(wire), run_id=RUN, now=wall())
        if other.peer_id != me.peer_id:
            roster.learn(other, now())
            transport.learn(other)
    boundary = Boundary("rows(bits=8)", CONFIG.width, CONFIG.vocab, 0)
    inner = InnerConfig(lr=0.01, warmup=0)
    own = section(CONFIG, 1, cut(3, (1, 1, 1))[index], ends=not index)

    async def work(function):
        return await asyncio.get_running_loop().run_in_executor(None, function)

    options = {"outbox": presence.outbox, "work": work, "now": now, "emit": lambda name, fields: None}
    if index:
        host = Host(
            me.peer_id,
            identity(0).peer_id,
            index,
            Stage(own, recompute=True),
            Update(own, inner),
            boundary,
            context=CONFIG.context,
            **options,
        )
        presence.handler = host
        tasks = [asyncio.create_task(presence.run()), asyncio.create_task(host.run())]
        while await line():
            pass
    else:
        crew = Crew({stage: [identity(stage).peer_id] for stage in (1, 2)})
        origin = Origin(
            own,
            Update(own, inner),
            boundary,
            crew,
            patience=Patience(now, first=60.0, least=30.0),
            window=3,
            clip=1.0,
            **options,
        )
        presence.handler = origin
        tasks = [asyncio.create_task(presence.run())]
        rows = torch.randint(0, 40, (MICROS, 2, 129), generator=torch.Generator().manual_seed(1))
        while await line():
            say("begins")
            outcome = await origin.step([(row[:, :-1], row[:, 1:]) for row in rows])
            counted = {stage: sorted(*peers.values()) for stage, peers in outcome.counted.items()}
            skipped = {micro: list(stages) for micro, stages in outcome.skipped.items()}
            say(
                json.dumps(
                    {
                        "finished": sorted(outcome.finished),
                        "counted": counted,
                        "skipped": skipped,
                        "loss": outcome.loss,
                        "lost": [reason for _, (_, _, reason) in outcome.lost],
                    }
                )
            )
    for task in tasks:
        task.cancel()
    await presence.close()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
