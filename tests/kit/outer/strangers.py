"""Made-up identities that knock at simulated peers, or that peers are told of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from thinwire.collectives.transport.interface import Contact
from thinwire.sims.simulation.world import SimWorld
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import VERSION, Hello, Refuse

Act = Callable[[SimWorld], None]
"""Action of an attacker or an author in a simulated world."""


def made_up(world: SimWorld, count: int, first: int = 10_000) -> list[PeerRecord]:
    """Return valid records of identities that no peer uses."""
    wall = int(world.machines[1].clocks.wall())
    return [
        PeerRecord.create(
            Identity.generate((first + number).to_bytes(32, "big")),
            run_id=world.run_id,
            addresses=(f"10.9.{number // 250}.{number % 250 + 1}:7000",),
            sequence=1,
            issued=wall,
        )
        for number in range(count)
    ]


def knocks(count: int, answers: list[str], *, times: int = 3, hosts: int = 6) -> Act:
    """Return an act in which so many identities knock at each of the first `hosts` peers, once a second, `times` times."""

    async def knock(world: SimWorld, record: PeerRecord, identity: Identity, address: str) -> None:
        net = world.net
        transport = net.transport(identity, world.run_id, lambda hello, shown, source: Refuse("busy", ""), address)
        hello = Hello(VERSION, world.run_id, record.wire)
        for _ in range(times):
            for machine in world.machines[:hosts]:
                answer = await transport.meet(Contact(machine.address, machine.identity.transport_public), hello)
                answers.append(answer.code if isinstance(answer, Refuse) else "welcome")
            await asyncio.sleep(1.0)
        await transport.close()

    def act(world: SimWorld) -> None:
        known, real = {machine.identity.peer_id for machine in world.machines}, world.net.latency
        world.net.latency = lambda a, b: real(a, b) if {a, b} <= known else 0.02
        if (stream := world.net.stream) is not None:
            world.net.stream = lambda a, b: stream(a, b) if {a, b} <= known else 1e6
        for number, record in enumerate(made_up(world, count, 50_000)):
            identity = Identity.generate((50_000 + number).to_bytes(32, "big"))
            world.tasks.append(asyncio.create_task(knock(world, record, identity, record.addresses[0])))

    return act
