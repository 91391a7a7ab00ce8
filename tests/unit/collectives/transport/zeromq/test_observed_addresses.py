"""Questions to gates about our own address, over real sockets."""

import asyncio
import time

import pytest
from thinwire.collectives.transport.addresses.observed_addresses import Sighting, judge
from thinwire.collectives.transport.interface import Contact
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.messages.registry import BALLAST, Refuse


async def seen_by(visitor, *hosts, **options):
    return await visitor.transport.observe([host.contact for host in hosts], **options)


def test_gates_tell_a_visitor_its_address_and_reach_its_gate(wire):
    async def work():
        visitor, *hosts = [await wire.peer(seed) for seed in (1, 2, 3)]
        answers = await seen_by(visitor, *hosts)
        assert all(isinstance(answer, Sighting) for answer in answers)
        assert all(answer.seen == answer.local and answer.reached for answer in answers)
        assert len({answer.local for answer in answers}) == 1, "all questions come from one port"
        assert [answer.by for answer in answers] == [host.contact.address for host in hosts]
        assert all(abs(answer.wall - time.time()) < 60 for answer in answers)
        assert judge(answers).nat == "none" and judge(answers).reached
        # Nothing was admitted: a question makes no member and no link.
        assert not any(host.hellos or host.links for host in hosts) and not visitor.hellos

    wire.run(work)


def test_gate_with_another_key_at_the_port_is_not_reached(wire):
    async def work():
        visitor, host, other = [await wire.peer(seed) for seed in (1, 2, 3)]
        [answer] = await seen_by(visitor, host, port=other.port)
        assert answer.reached is False
        [answer] = await seen_by(visitor, host, port=-1)
        assert answer.reached is None

    wire.run(work)


@pytest.mark.parametrize("fault", ["key", "run", "version", "nobody"])
def test_a_gate_that_does_not_answer_is_a_refusal(wire, fault, monkeypatch):
    async def work():
        visitor = await wire.peer(1)
        host = await wire.peer(2, **({"run_id": b"x" * 32} if fault == "run" else {}))
        contact = host.contact
        if fault == "key":
            contact = Contact(contact.address, Identity.generate(b"4" * 32).transport_public)
        if fault == "version":
            monkeypatch.setattr("thinwire.collectives.transport.zeromq.admission.VERSION", 1)
        if fault == "nobody":
            await host.transport.close()
        [answer] = await visitor.transport.observe([contact])
        codes = {"key": "unreachable", "run": "run", "nobody": "refused"}
        if fault == "version":
            assert isinstance(answer, Sighting)  # both sides of this process were changed
        else:
            assert isinstance(answer, Refuse) and answer.code == codes[fault]

    wire.run(work)


def test_ballast_is_sent_when_wanted_within_a_budget(wire):
    async def work():
        limits = wire.short(ballast_burst=2, ballast_rate=1e-9)
        visitor, host = await wire.peer(1), await wire.peer(2, limits=limits)
        rates = [(await seen_by(visitor, host, port=-1, size=BALLAST * 2))[0].rate for _ in range(3)]
        assert rates[0] > 0 and rates[1] > 0 and rates[2] == 0
        assert host.refused == 0

    wire.run(work)


def test_visits_in_return_are_limited(wire):
    async def work():
        visitor, host = await wire.peer(1), await wire.peer(2, limits=wire.short(returned=0))
        assert (await seen_by(visitor, host))[0].reached is None

    wire.run(work)


def test_banned_peer_learns_nothing(wire):
    async def work():
        visitor, host = await wire.peer(1), await wire.peer(2)
        assert await visitor.meet(host)
        host.transport.drop(visitor.id, "test", ban=True)
        await asyncio.sleep(0)
        [answer] = await seen_by(visitor, host)
        assert isinstance(answer, Refuse)

    wire.run(work)
