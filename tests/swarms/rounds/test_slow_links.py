"""Rounds whose transfers take longer than the time after which a peer gives up a round in which nothing moves."""

import asyncio
from functools import partial

import pytest
from kit.swarm import Node, Swarm
from thinwire.collectives.topology.shards import Grid
from thinwire.node.methods import registry
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.messages.registry import Chunk, Result

SECONDS = 40.0
"""Duration of a transfer; a peer gives up after 12 s."""


async def _overlapped(node: Node, joins: bool) -> None:
    """Make two rounds, each with some training while it is in progress."""
    for peer in node.swarm.nodes.values():
        if peer is not node:
            node.session.roster.learn(peer.record, virtual_loop.current().time())
            node.transport.learn(peer.record)
    await asyncio.sleep(0.5)
    while node.replica.round < node.swarm.rounds:
        await node.rounds.sync(weight=100, loss=1.0, speed=1.0, meanwhile=partial(asyncio.sleep, 1.0))
        node.note()
    await node.rounds.settled()


def _played(outer: str = "") -> Swarm:
    swarms: list[Swarm] = []

    async def play() -> None:
        swarm = Swarm(4, rounds=2, size=100_000, codec="fp32", outer=outer, bandwidth=1.5 * 400_000 / SECONDS)
        swarms.append(swarm)
        for node in swarm.nodes.values():
            if outer:
                node.live = partial(_overlapped, node)
        swarm.start()
        await swarm.finish(limit=3 * SECONDS)

    virtual_loop.run(play(), seed=1)
    return swarms[0]


def test_round_commits_although_its_first_transfer_takes_longer_than_a_peer_waits_in_vain():
    swarm = _played()
    swarm.check()
    for node in swarm.nodes.values():
        assert [len(node.contributors[number]) for number in (1, 2)] == [4, 4]


def test_peer_that_trains_meanwhile_waits_for_a_round_that_moves():
    _played('method = "co2"').check()


@pytest.mark.parametrize(("timeout", "contributors"), [(60.0, 5), (2.0, 4)])
def test_contributor_with_a_slow_uplink_gets_the_time_of_a_straggler(timeout, contributors, monkeypatch):
    """A peer gets nothing while all wait for its data, and does not give its own data up for that."""
    monkeypatch.setattr(registry, "grid", lambda total, codec: Grid(total, total // 64))

    async def play() -> None:
        swarm = Swarm(5, rounds=3, size=102_400, codec="fp32", patience=2.0, straggler_timeout=timeout)
        swarm.nodes[4].transport.uplink.rate = 20_000.0  # its data takes 33 s, that of the others less than 2
        swarm.start()
        await swarm.finish([0, 1, 2, 3], limit=250.0)
        for node in list(swarm.nodes.values())[:4]:
            assert [len(node.contributors[number]) for number in (1, 2, 3)] == [contributors] * 3

    virtual_loop.run(play(), seed=1, limit=1e6)


@pytest.mark.parametrize(
    "rates", [(15_000.0, 25_000.0, 40_000.0), (20_000.0, 20_000.0, 20_000.0)], ids=["unequal", "equal"]
)
def test_most_peers_of_an_all_gather_with_slow_uplinks_do_not_find_each_other_late(rates):
    """Their payloads fit into the buffers of their links, so all frames leave the queues at once."""

    async def play() -> None:
        outer = "method = 'sparseloco'\nsync_every = 4"
        swarm = Swarm(
            5, rounds=6, size=102_400, codec="topk(k=1024,chunk=4096)", outer=outer, patience=2.0, straggler_timeout=2.0
        )
        for index, rate in enumerate(rates, 2):
            swarm.nodes[index].transport.uplink.rate = rate
        swarm.start()
        await swarm.finish(limit=60.0)
        for node in swarm.nodes.values():
            assert [len(node.contributors[number]) for number in range(1, 7)] == [5] * 6

    virtual_loop.run(play(), seed=1, limit=1e6)


def _delay(node: Node, pause: float, kinds: tuple[type, ...]) -> None:
    """Let a peer send one frame of these kinds in every `pause` patiences."""
    transport, gate, loop = node.transport, asyncio.Lock(), virtual_loop.current()
    send, offer = transport.send, transport.offer
    due = 0.0

    async def late(to, frame):
        nonlocal due
        if isinstance(frame.message, kinds):
            async with gate:
                await asyncio.sleep(max(0.0, due - loop.time()))
                due = loop.time() + pause * node.session.patience
        return await send(to, frame)

    transport.send = late
    transport.offer = lambda to, frame: not isinstance(frame.message, kinds) and offer(to, frame)


@pytest.mark.parametrize("pause", [0.05, 0.3, 0.85])
@pytest.mark.parametrize("kinds", [(Chunk,), (Result,), (Chunk, Result)], ids=["data", "results", "both"])
def test_peer_that_sends_piece_by_piece_does_not_hold_the_others(kinds, pause, monkeypatch):
    """It never stops for as long as others wait for a single chunk."""
    monkeypatch.setattr(registry, "grid", lambda total, codec: Grid(total, total // 64))

    async def play() -> None:
        swarm = Swarm(4, rounds=4, size=102_400, codec="fp32", patience=2.0)
        _delay(swarm.nodes[3], pause, kinds)
        swarm.start()
        await swarm.finish([0, 1, 2], limit=60.0)
        if Chunk in kinds:
            assert all(len(node.contributors[4]) == 3 for node in list(swarm.nodes.values())[:3])

    virtual_loop.run(play(), seed=1, limit=1e6)


@pytest.mark.parametrize("pause", [0.05, 0.3, 0.85])
def test_peer_that_sends_its_payload_piece_by_piece_does_not_hold_an_all_gather(pause):
    async def play() -> None:
        outer = "method = 'sparseloco'\nsync_every = 4"
        swarm = Swarm(4, rounds=4, size=409_600, codec="topk(k=1024,chunk=4096)", outer=outer, patience=2.0)
        _delay(swarm.nodes[3], pause, (Chunk,))
        swarm.start()
        await swarm.finish([0, 1, 2], limit=60.0)

    virtual_loop.run(play(), seed=1, limit=1e6)
