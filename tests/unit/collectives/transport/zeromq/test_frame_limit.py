"""Small valid frames of one peer: their number has a limit, beyond which they wait with the sender."""

import asyncio

import pytest
from thinwire.collectives.transport.frame_limit import FrameLimit, FrameLimits
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Activation, Ask, Chunk, Ping, Ready, Route, StateChunk

ONE, TWO = bytes(32), bytes([1]) * 32
FLOOD, BURST = 400, 40
ROUNDS = 30
"""Frames of another peer that come after the limit is reached, one after the other."""
NUMBER = {Ask: "round", Ping: "sequence", Chunk: "index"}
FOR_EVER, NEVER = 3600.0, 1e-9


def ready(round, fragment=0):
    return Ready(round, fragment, 1, bytes(32), bytes(32), 1, b"", True, 0.0, 0.0)


def taken(limit, peer, now=0.0, **payload):
    """Return the number of frames that are admitted before one is too many."""
    count = 0
    while limit.admits(peer, now, **payload):
        count += 1
    return count


def test_peer_may_send_a_burst_then_frames_at_a_rate_and_more_for_each_announcement():
    limit = FrameLimit(FrameLimits(burst=50, rate=10.0, round=7))
    assert taken(limit, ONE) == 50 and taken(limit, ONE) == 0
    assert taken(limit, TWO) == 50
    assert taken(limit, ONE, now=2.0) == 20
    limit.sent(TWO, Ask(1, 0))
    assert taken(limit, ONE, now=2.0) == 0
    limit.sent(TWO, ready(1))
    assert taken(limit, TWO, now=2.0) == 27 and taken(limit, ONE, now=2.0) == 7
    for number in range(50):
        limit.sent(TWO, ready(2 + number))
    assert taken(limit, ONE, now=2.0) == 50


def test_repeated_announcement_allows_nothing_more():
    """A peer may ask for it as often as it likes."""
    limit = FrameLimit(FrameLimits(burst=50, rate=10.0, round=7))
    for fragment in range(1024):
        limit.sent(TWO, ready(1, fragment))
    assert taken(limit, ONE) == 50
    for _ in range(3):
        for fragment in range(1024):
            limit.sent(TWO, ready(1, fragment))
    assert taken(limit, ONE) == 0
    limit.sent(TWO, ready(2))
    assert taken(limit, ONE) == 7


def test_pipeline_is_held_back_by_its_micro_batches_only():
    """Two stages send four small frames for each micro-batch, however many there are a second."""
    limit = FrameLimit(FrameLimits(burst=50, rate=NEVER))
    for micro in range(10_000):
        limit.sent(ONE, Route(1, micro % 64, 1, 4, 64, ()))
        limit.sent(ONE, Activation(1, micro % 64, 1, False, 0))
        assert all(limit.admits(ONE, 0.0) for _ in range(4))
    assert taken(limit, ONE) == 46, "no more than the burst is saved up"
    for index in range(100):  # one request for each chunk of a state
        limit.sent(ONE, StateChunk(1, index))
        assert limit.admits(ONE, 0.0)
    taken(limit, ONE)
    limit.sent(ONE, Route(1, 1, 1, 4, 64, ()))
    assert taken(limit, TWO) == 50 and taken(limit, ONE) == 4


def test_bulk_frames_with_large_payloads_are_not_counted():
    limit = FrameLimit(FrameLimits(burst=2, rate=NEVER, small=1000))
    assert all(limit.admits(ONE, 0.0, payload=1000) for _ in range(100))
    assert taken(limit, ONE, payload=999) == 2
    assert limit.admits(ONE, 0.0, payload=1000) and not limit.admits(ONE, 0.0)


def short(wire, **frames):
    """Return limits with these of small frames."""
    return wire.short(handshake=5.0, frames=FrameLimits(**frames))


async def flood(first, second, say):
    """Send FLOOD frames; they wait with the sender, sooner or later."""
    for number in range(FLOOD):
        await say(first, second, number)


async def ask(first, second, number):
    await first.transport.send(second.id, Frame(Ask(number, 0)))


async def ping(first, second, number):
    await first.ping(second, number)


async def chunk(first, second, number):
    await first.chunk(second, bytes(100), number)


async def nothing(first, second, number):
    first.control_connection(second).post([b""])


async def counted(peer, found):
    while True:
        arrival = await peer.recv()
        found.append((arrival.peer, arrival.frame))


def frames_of(found, peer):
    return [frame for sender, frame in found if sender == peer.id and frame is not None]


@pytest.mark.parametrize("say", [ask, ping, chunk, nothing])
@pytest.mark.parametrize("limited", [True, False])
def test_flood_of_small_frames_is_not_read_while_other_peers_are(wire, eventually, say, limited):
    """The same flood is read whole without a limit, so that the test shows something."""

    async def work():
        limits = short(wire, burst=BURST if limited else 10**6, rate=NEVER, pause=FOR_EVER)
        first, second = await wire.pair(limits=limits)
        third = await wire.peer(3)
        assert await third.meet(second)
        await wire.settled(first, second)
        links = first.link(second), second.link(first)
        found = []
        reading = asyncio.create_task(counted(second, found))
        sending = asyncio.create_task(flood(first, second, say))
        if limited:
            await eventually(lambda: second.transport.pauses() == {first.id: 1})
        else:
            await sending
            await eventually(lambda: say is nothing or len(frames_of(found, first)) == FLOOD)
        for number in range(ROUNDS):
            assert await third.ping(second, number)
            await eventually(lambda number=number: len(frames_of(found, third)) > number)
        came = len(frames_of(found, first))
        if limited:
            assert came <= BURST + 1 and second.transport.pauses() == {first.id: 1}
            assert links == (first.link(second), second.link(first))
        else:
            assert came == (0 if say is nothing else FLOOD) and not second.transport.pauses()
        sending.cancel()
        reading.cancel()

    wire.run(work)


@pytest.mark.parametrize("say", [ask, ping, chunk])
def test_frames_beyond_the_limit_come_later_and_in_order(wire, say):
    async def work():
        limits = short(wire, burst=BURST, rate=NEVER, pause=0.002)
        first, second = await wire.pair(limits=limits)
        await wire.settled(first, second)
        sending = asyncio.create_task(flood(first, second, say))
        numbers = []
        while len(numbers) < FLOOD:
            numbers.append(getattr(message := (await second.recv()).frame.message, NUMBER[type(message)]))
        assert sorted(numbers) == list(range(FLOOD))
        assert numbers == sorted(numbers) or say is chunk  # there are two bulk streams
        assert second.transport.pauses()[first.id] > (FLOOD - BURST) / 4
        await sending

    wire.run(work)


def test_large_payloads_are_read_although_a_link_has_no_small_frames_left(wire):
    async def work():
        first, second = await wire.pair(limits=short(wire, burst=BURST, rate=NEVER))
        await wire.settled(first, second)
        for index in range(2 * BURST):
            assert await first.chunk(second, bytes(second.limits.frames.small), index)
            assert len((await second.bulk(1))[0].payload) == second.limits.frames.small
        assert not second.transport.pauses()

    wire.run(work)


def test_our_announcement_allows_the_frames_of_a_round(wire):
    async def work():
        limits = short(wire, burst=BURST, rate=NEVER, round=BURST, pause=FOR_EVER)
        first, second = await wire.pair(limits=limits)
        await wire.settled(first, second)
        for number in range(5):
            assert await second.transport.send(first.id, Frame(ready(number)))
            for _ in range(BURST // 2):
                await ask(first, second, number)
                assert isinstance((await second.recv()).frame.message, Ask)
        assert not second.transport.pauses()

    wire.run(work)


def test_new_link_allows_no_further_burst(wire, eventually):
    async def work():
        limits = short(wire, burst=BURST, rate=NEVER, pause=FOR_EVER)
        first, second = await wire.pair(limits=limits)
        await wire.settled(first, second)
        found = []
        reading = asyncio.create_task(counted(second, found))
        sending = asyncio.create_task(flood(first, second, ask))
        await eventually(lambda: second.transport.pauses() == {first.id: 1})
        came = len(frames_of(found, first))
        second.transport.drop(first.id, "once more")
        await sending
        await eventually(lambda: not first.links)
        assert await first.meet(second)
        sending = asyncio.create_task(flood(first, second, ask))
        await eventually(lambda: second.transport.pauses() == {first.id: 2})
        assert len(frames_of(found, first)) <= came + 3
        sending.cancel()
        reading.cancel()

    wire.run(work)
