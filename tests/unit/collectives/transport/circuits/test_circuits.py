"""Circuits on loopback: three transports, of which two cannot dial each other."""

import asyncio
import secrets
from types import SimpleNamespace

import pytest
from kit.wire import RUN, Wire, until
from thinwire.collectives.transport.circuits.circuits import Circuits
from thinwire.collectives.transport.circuits.limits import DAY, Allowance, CircuitLimits
from thinwire.collectives.transport.circuits.relay import Relay
from thinwire.collectives.transport.circuits.splice import End, Splice
from thinwire.collectives.transport.circuits.ticket import MAGIC, TICKET_BYTES, decode, encode, name_of
from thinwire.collectives.transport.interface import Loan
from thinwire.collectives.transport.rate_limit import RateLimit
from thinwire.collectives.transport.zeromq.sockets.limits import Limits
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Circuit, CircuitAsk, Ping


@pytest.fixture
def wire():
    return Wire()


async def star(wire, *, relays=1, first=None, **options):
    """Two peers without addresses of each other, linked with all relays; they know each other's records."""
    relays = [await wire.peer(10 + index, **options) for index in range(relays)]
    ends = [await wire.peer(seed, reachable=False, **(first or {})) for seed in (1, 2)]
    for relay in relays:
        for end in ends:
            await end.meet(relay)
            await until(lambda end=end, relay=relay: end.id in relay.links)
    for one, other in (ends, ends[::-1]):
        one.transport.learn(other.record)
    return *ends, relays


async def chunk_of(peer):
    while True:
        arrival = await peer.recv()
        if arrival.frame is not None and len(arrival.frame.payload):
            return bytes(arrival.frame.payload)


async def left_relay(first, second, relay):
    """Wait until no link between two peers is over a relay; one over another relay may be there at once."""
    ends = (first, second), (second, first)
    await until(lambda: all(one.links[other.id].relay != relay.id for one, other in ends if other.id in one.links))


def relay_of(one, other):
    return one.transport.stats()[other.id].relay


async def raw(peer, data):
    """Connect to a peer's gate, send these bytes and read until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", peer.port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


class Asker:
    """A linked peer that asks for circuits by hand. Its transport leaves the answers with the unknown numbers alone."""

    def __init__(self, peer, relay):
        self.peer, self.relay, self.answers = peer, relay, asyncio.Queue()
        link, takes = peer.link(relay), peer.sockets.circuits.takes

        def listen(sender, message):
            if isinstance(message, Circuit):
                self.answers.put_nowait(message)
                return True
            return takes(sender, message)

        peer.sockets.circuits.takes = listen
        self.link = link

    async def ask(self, target, port=0, number=7):
        assert await self.link.send(Frame(CircuitAsk(number, target, port)))
        return await asyncio.wait_for(self.answers.get(), 10)


# --- links


def test_two_peers_without_a_route_get_a_link_through_a_third(wire):
    async def work():
        first, second, (relay,) = await star(wire)
        payload = secrets.token_bytes(900_000)
        assert await first.chunk(second, payload)
        assert await chunk_of(second) == payload
        back = secrets.token_bytes(700_000)
        assert await second.chunk(first, back)
        assert await chunk_of(first) == back
        assert relay_of(first, second) == relay.id == relay_of(second, first)
        assert first.sources + second.sources == [""] and set(relay.sources) == {"127.0.0.1"}
        assert first.transport.relay_of(second.id) == relay.id and first.transport.relay_of(relay.id) is None
        assert relay.transport.lent().carried > len(payload) + len(back)
        sent, received = relay.transport.totals()
        assert min(sent, received) > len(payload) + len(back)
        taken, arrived = first.transport.delivered(second.id)
        assert taken >= arrived > len(payload), "the relay has acknowledged what it has passed on"

    wire.run(work)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_words_of_rounds_pass_a_circuit_on_their_own_stream(wire, loop):
    async def work():
        first, second, _ = await star(wire)
        assert await first.ping(second, 5)
        ends = await wire.settled(first, second)
        assert all(end.relay for end in ends)

    wire.run(work, **({} if loop == "uvloop" else {"loop": asyncio.run}))


def test_dials_that_cross_leave_one_link(wire):
    async def work():
        first, second, _ = await star(wire)
        assert all(await asyncio.gather(first.ping(second), second.ping(first)))
        await wire.settled(first, second)
        assert await first.ping(second, 9) and await second.ping(first, 9)

    wire.run(work)


def test_a_direct_connection_is_preferred(wire):
    async def work():
        relay, first, second = [await wire.peer(seed) for seed in (10, 1, 2)]
        for end in (first, second):
            await end.meet(relay)
        first.transport.learn(second.record)
        assert await first.ping(second)
        assert relay_of(first, second) == b"" and not relay.transport.lent().carried

    wire.run(work)


def test_a_direct_link_replaces_the_circuit_once_the_peer_can_be_dialled(wire):
    async def work():
        limits = wire.short(circuits=CircuitLimits(again=0.5))
        first, second, (relay,) = await star(wire, first={"limits": limits})
        assert await first.ping(second)
        assert relay_of(first, second) == relay.id
        await second.open_again()
        first.transport.learn(second.record)
        await until(lambda: second.id in first.links and relay_of(first, second) == b"", 20)
        payload = secrets.token_bytes(100_000)
        await until(lambda: first.id in second.links and relay_of(second, first) == b"")
        assert await first.chunk(second, payload)
        assert await chunk_of(second) == payload

    wire.run(work)


def test_the_relay_cannot_read_what_it_passes_on(wire, monkeypatch):
    from thinwire.collectives.transport.circuits import splice

    seen = bytearray()
    real = splice.End.buffer_updated

    def spy(end, count):
        seen.extend(end.get_buffer(0)[:count])
        real(end, count)

    monkeypatch.setattr(splice.End, "buffer_updated", spy)

    async def work():
        first, second, _ = await star(wire)
        payload = b"a secret that is easily found in a recording of all bytes " * 2000
        assert await first.chunk(second, payload)
        assert await chunk_of(second) == payload
        assert len(seen) > len(payload) and b"easily found" not in seen and RUN not in seen

    wire.run(work)


def test_another_relay_is_asked_if_one_refuses(wire):
    async def work():
        first, second, relays = await star(wire, relays=3)
        order = first.sockets.circuits.relays(second.id)
        assert order == second.sockets.circuits.relays(first.id)
        relays = sorted(relays, key=lambda relay: order.index(relay.id))
        relays[0].sockets.circuits.relay.loan = Loan(willing=False)
        assert await first.ping(second)
        assert relay_of(first, second) == relays[1].id and not relays[0].transport.lent().carried

    wire.run(work)


def test_no_relay_is_willing_and_the_send_fails(wire):
    async def work():
        first, second, (relay,) = await star(wire, loan=Loan(willing=False))
        assert not await first.ping(second)
        assert not relay.transport.lent().carried and not len(relay.sockets.circuits.relay)

    wire.run(work)


def test_the_end_of_the_relay_ends_the_link_and_the_next_relay_takes_over(wire):
    async def work():
        first, second, relays = await star(wire, relays=2, first={"limits": wire.short()})
        assert await first.ping(second)
        used = relay_of(first, second)
        left = next(relay for relay in relays if relay.id != used)
        await next(relay for relay in relays if relay.id == used).transport.close()
        await until(lambda: second.id not in first.links and first.id not in second.links)
        async with asyncio.timeout(20):
            while not await first.ping(second):
                await asyncio.sleep(0.02)
        assert relay_of(first, second) == left.id

    wire.run(work)


def test_links_over_a_relay_that_is_dead_for_membership_end_and_the_next_relay_takes_over(wire):
    async def work():
        first, second, relays = await star(wire, relays=2, first={"limits": wire.short()})
        assert await first.ping(second)
        used, left = sorted(relays, key=lambda relay: relay.id != relay_of(first, second))
        used.sockets.circuits.relay.loan = Loan(willing=False)
        for end in (first, second):
            end.transport.leave_relay(used.id)
            assert used.id in end.links, "the link to the relay may still work"
        await left_relay(first, second, used)
        assert await first.ping(second)
        assert relay_of(first, second) == left.id

    wire.run(work)


def test_both_ends_ask_another_relay_after_one_that_passes_on_no_data(wire):
    async def work():
        first, second, relays = await star(wire, relays=2, first={"limits": wire.short()})
        assert await first.ping(second)
        used, left = sorted(relays, key=lambda relay: relay.id != relay_of(first, second))
        first.transport.leave_circuit(used.id)
        assert used.id in first.links, "this link has no relay"
        first.transport.leave_circuit(second.id)
        await left_relay(first, second, used)
        for one, other in ((first, second), (second, first)):
            assert one.sockets.circuits.relays(other.id) == [left.id]
        assert await second.ping(first)
        assert relay_of(second, first) == left.id

    wire.run(work)


def test_a_relay_that_passes_on_only_the_control_connection_is_left(wire, monkeypatch):
    """The relay swallows the circuits to bulk ports, from their first byte on: the proofs of streams."""
    answer, read, made, swallowed = Relay.answer, End.buffer_updated, [], set()

    async def work():
        first, second, relays = await star(wire, relays=2, first={"limits": wire.short()})
        stuck = first.sockets.circuits.relays(second.id)[0]
        bulk_ports = {first.bulk_port, second.bulk_port}

        def make(*given):
            made.append(Splice(*given))
            return made[-1]

        def grant(relay, asker, question):
            before = len(made)
            answer(relay, asker, question)
            if question.port in bulk_ports and relay is found.sockets.circuits.relay:
                swallowed.update(made[before:])

        found = next(one for one in relays if one.id == stuck)
        monkeypatch.setattr("thinwire.collectives.transport.circuits.relay.Splice", make)
        monkeypatch.setattr(Relay, "answer", grant)
        monkeypatch.setattr(End, "buffer_updated", lambda end, count: end.splice in swallowed or read(end, count))
        payload = secrets.token_bytes(100_000)
        reader = asyncio.create_task(chunk_of(second))
        async with asyncio.timeout(40):
            while not reader.done():
                await first.chunk(second, payload)
                await asyncio.sleep(0.02)
        assert await reader == payload and swallowed
        assert relay_of(first, second) != stuck and stuck not in first.sockets.circuits.relays(second.id)

    wire.run(work)


def test_a_relay_is_avoided_for_one_peer_and_for_longer_each_time():
    async def work():
        loop = asyncio.get_running_loop()
        limits = CircuitLimits(avoid=(10.0, 30.0))
        circuits = Circuits(b"me", limits, Loan(), RateLimit(), secrets.token_bytes, enter=None)
        link = SimpleNamespace(relay=b"", dialled=True)
        circuits.links = {b"relay": link, b"other": link}

        async def pause():
            circuits.avoid(b"relay", b"other")
            since = loop.time()
            while b"relay" not in circuits.relays(b"other"):
                assert b"relay" in circuits.relays(b"third")
                await asyncio.sleep(1.0)
            return loop.time() - since

        assert [await pause() for _ in range(4)] == [10.0, 20.0, 30.0, 30.0]
        await asyncio.sleep(60.0)
        assert await pause() == 10.0, "it did its work meanwhile"

    virtual_loop.run(work(), seed=1, explore=False)


def test_a_relay_with_a_limited_uplink_passes_everything_on_at_its_rate(wire):
    async def work():
        first, second, (relay,) = await star(wire, up=2_000_000)
        payload, loop = secrets.token_bytes(1 << 20), asyncio.get_running_loop()
        begin = loop.time()
        assert await first.chunk(second, payload)
        assert await chunk_of(second) == payload
        assert loop.time() - begin > 0.4  # 1 MiB at 2 MB/s takes half a second

    wire.run(work)


def test_a_relay_that_has_lent_all_its_bytes_ends_its_circuits_and_says_so(wire):
    async def work():
        first, second, (relay,) = await star(wire, loan=Loan(daily=1_000_000))
        assert await first.ping(second)
        assert first.transport.obstacle(second.id) == "" and 0 < relay.transport.lent().left < 1_000_000
        await first.chunk(second, secrets.token_bytes(1 << 20))
        await until(lambda: not len(relay.sockets.circuits.relay))
        await until(lambda: second.id not in first.links and first.id not in second.links)
        assert not await first.ping(second)
        told = "it has relayed all bytes that it lends (relay_limit)"
        assert first.transport.obstacle(second.id) == f"relay {relay.id.hex()[:8]}: {told}"
        lent = relay.transport.lent()
        assert lent.refused[told] >= 1 and lent.left < 1_000_000 / 24 and lent.carried < 1_300_000

    wire.run(work)


def test_bytes_that_are_lent_come_back_with_time_and_not_in_drops():
    allowance = Allowance(24_000, 0.0)
    allowance.take(24_000, 0.0)
    assert allowance.spent(0.0) and allowance.left(0.0) == 0
    assert allowance.spent(0.9 * DAY / 24), "less than the bytes of an hour"
    assert not allowance.spent(DAY / 24) and allowance.left(DAY / 24) == 1000
    allowance.take(500, DAY / 24)
    assert not allowance.spent(DAY / 24)
    assert allowance.left(10 * DAY) == 24_000, "nothing is saved up for longer than a day"
    free = Allowance(0, 0.0)
    free.take(10**15, 1.0)
    assert not free.spent(1.0) and free.left(1.0) is None


def test_a_banned_peer_loses_its_circuits(wire):
    async def work():
        first, second, (relay,) = await star(wire)
        assert await first.ping(second)
        relay.transport.drop(first.id, "it lied", ban=True)
        await until(lambda: not len(relay.sockets.circuits.relay))
        await until(lambda: second.id not in first.links)

    wire.run(work)


def test_circuits_of_an_idle_pair_are_closed(wire):
    async def work():
        limits = Limits(circuits=CircuitLimits(idle=0.4))
        first, second, (relay,) = await star(wire, limits=limits)
        assert await first.ping(second)
        await until(lambda: not len(relay.sockets.circuits.relay))

    wire.run(work)


# --- tickets


def test_a_ticket_is_told_from_a_greeting_by_its_first_byte():
    token = bytes(range(32))
    assert decode(encode(name_of(token))) == name_of(token) and len(encode(name_of(token))) == TICKET_BYTES
    assert MAGIC[0] != 0xFF and decode(MAGIC[:3]) is None and decode(encode(name_of(token))[:-1]) is None
    for wrong in (b"\xff", b"GET / HTTP/1.1\r\n", MAGIC[:-1] + b"x", encode(name_of(token)) + b"x"):
        with pytest.raises(ValueError, match="not a ticket"):
            decode(wrong)


@pytest.mark.parametrize(
    ("data", "why"),
    [(encode(bytes(32)), "no such circuit"), (MAGIC[:-1] + b"?", "not a ZeroMQ greeting")],
)
def test_a_stranger_with_an_invented_ticket_is_closed_at_once(wire, data, why):
    async def work():
        relay = await wire.peer(10)
        assert await raw(relay, data) == b""
        await until(lambda: relay.transport.refusals() == {why: 1})
        assert relay.strangers == (0, 0) and not len(relay.sockets.circuits.relay)

    wire.run(work)


def test_a_ticket_in_pieces_that_never_ends_is_closed_after_the_deadline(wire):
    async def work():
        relay = await wire.peer(10, limits=wire.short())
        assert await raw(relay, MAGIC) == b""
        assert relay.transport.refusals() == {"no handshake in time": 1}

    wire.run(work)


def test_a_token_opens_two_ends_and_no_third(wire):
    async def work():
        first, second, (relay,) = await star(wire)
        mine, theirs = Asker(first, relay), Asker(second, relay)
        answer = await mine.ask(second.id, port=4)
        invited = await asyncio.wait_for(theirs.answers.get(), 10)
        assert (answer.number, answer.peer, answer.port) == (7, second.id, 4)
        assert (invited.number, invited.peer, invited.port) == (0, first.id, 4)
        assert invited.token == answer.token
        ends = [await asyncio.open_connection("127.0.0.1", relay.port) for _ in range(2)]
        for _, writer in ends:
            writer.write(encode(name_of(answer.token)))
        for reader, _ in ends:
            assert await asyncio.wait_for(reader.readexactly(1), 10) == b"\1"
        # bit for bit, both ways at once, and more than the buffers hold
        said = [secrets.token_bytes(3_000_000) for _ in ends]
        for (_, writer), data in zip(ends, said, strict=True):
            writer.write(data)
        for (reader, _), data in zip(ends, said[::-1], strict=True):
            assert await asyncio.wait_for(reader.readexactly(len(data)), 20) == data
        assert await raw(relay, encode(name_of(answer.token))) == b"", "a replayed ticket"
        ends[0][1].write(b"the last words")
        ends[0][1].close()
        assert await asyncio.wait_for(ends[1][0].read(), 10) == b"the last words"
        await until(lambda: not len(relay.sockets.circuits.relay))
        ends[1][1].close()

    wire.run(work)


def test_back_pressure_of_one_end_reaches_the_other(wire):
    async def work():
        first, second, (relay,) = await star(wire)
        mine = Asker(first, relay)
        Asker(second, relay)
        token = (await mine.ask(second.id)).token
        ends = [await asyncio.open_connection("127.0.0.1", relay.port, limit=1 << 12) for _ in range(2)]
        for _, writer in ends:
            writer.write(encode(name_of(token)))
        for reader, _ in ends:
            await asyncio.wait_for(reader.readexactly(1), 10)
        ends[0][1].write(bytes(64 << 20))
        before = -1
        while before != relay.transport.lent().carried:  # until the buffers of both kernels are full
            before = relay.transport.lent().carried
            await asyncio.sleep(0.3)
        assert before < 48 << 20
        for _, writer in ends:
            writer.transport.abort()

    wire.run(work)


def test_a_token_expires(wire):
    async def work():
        first, second, (relay,) = await star(wire, limits=Limits(circuits=CircuitLimits(token=0.2)))
        mine = Asker(first, relay)
        Asker(second, relay)
        token = (await mine.ask(second.id)).token
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(encode(name_of(token)))
        assert await asyncio.wait_for(reader.read(), 10) == b"", "the end that waits is closed, too"
        writer.close()
        assert not len(relay.sockets.circuits.relay)
        assert await raw(relay, encode(name_of(token))) == b""

    wire.run(work)


def test_a_relay_grants_no_circuit_to_an_unknown_peer_or_to_the_asker(wire):
    async def work():
        first, second, (relay,) = await star(wire)
        mine, theirs = Asker(first, relay), Asker(second, relay)
        for target in (bytes(32), first.id, relay.id):
            assert (await mine.ask(target)).token is None
        assert not len(relay.sockets.circuits.relay) and theirs.answers.empty()

    wire.run(work)


def test_a_relay_grants_a_bounded_number_of_circuits(wire):
    async def work():
        limits = Limits(circuits=CircuitLimits(pair=2))
        first, second, (relay,) = await star(wire, limits=limits, loan=Loan(circuits=3))
        third = await wire.peer(3, reachable=False)
        await third.meet(relay)
        await until(lambda: third.id in relay.links)
        mine = Asker(first, relay)
        for other in (second, third):
            Asker(other, relay)
        told = [(await mine.ask(target.id)).reason for target in (second, second, second, third, third)]
        pair, full = "it has enough circuits of this pair", "it has lent all its circuits (relay_circuits)"
        assert told == ["", "", pair, "", full]
        assert relay.transport.lent().refused == {pair: 1, full: 1} and relay.transport.lent().circuits == 3

    wire.run(work)


def test_an_invitation_to_a_port_at_which_nothing_listens_is_ignored(wire):
    async def work():
        first, second, (relay,) = await star(wire)
        token = (await Asker(first, relay).ask(second.id, port=9)).token
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(encode(name_of(token)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.5)
        writer.close()
        assert await second.transport.send(relay.id, Frame(Ping(1, 0, ())))

    wire.run(work)
