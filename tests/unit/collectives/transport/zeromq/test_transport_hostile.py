"""The ZeroMQ transport against strangers and bad members, which can only lose their own connection."""

import asyncio
import os
import socket
import time
from contextlib import suppress

import pytest
import zmq
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from thinwire.collectives.blocking_work import WORTH
from thinwire.collectives.transport.circuits.circuits import DialRoute
from thinwire.collectives.transport.interface import OWN_GATE, SAME_KEY, Contact
from thinwire.collectives.transport.zeromq.admission import knock
from thinwire.collectives.transport.zeromq.link import Link, LinkEvents
from thinwire.collectives.transport.zeromq.sockets.listener import port_of
from thinwire.collectives.transport.zeromq.sockets.zmq_socket import GREETING, as_client
from thinwire.collectives.transport.zeromq.streams.record_crypto import LENGTHS, MAX_EXPRESS, OPENING, session_of
from thinwire.swarm import frame as frames
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.messages.registry import (
    VERSION,
    Ask,
    Ballot,
    Chunk,
    Found,
    Hello,
    Ping,
    Promise,
    Refuse,
    Vote,
    Welcome,
)


def nothing(*_):
    pass


async def refusal(visitor, host, *, contact=None, hello=None):
    answer = await visitor.transport.meet(contact or host.contact, hello or visitor.hello)
    assert isinstance(answer, Refuse), answer
    assert visitor.id not in host.links
    return answer


async def link_still_works(first, second):
    assert await first.ping(second, 99)
    while True:
        arrival = await second.recv()
        if arrival.peer == first.id:
            break
    assert arrival.frame.message.sequence == 99


async def ends(reader):
    """Read until the other side closes; return all bytes."""
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""


# --- the gate


def test_wrong_transport_key_is_refused(wire):
    async def work():
        visitor, host = await wire.peer(1), await wire.peer(2)
        contact = Contact(host.contact.address, Identity.generate(bytes(32)).transport_public)
        assert (await refusal(visitor, host, contact=contact)).code == "unreachable"
        assert not host.hellos

    wire.run(work)


def test_visitor_of_another_run_is_refused_by_name(wire):
    async def work():
        visitor, host = await wire.peer(1, run_id=b"q" * 32), await wire.peer(2)
        answer = await refusal(visitor, host)
        assert answer.code == "run" and not host.hellos
        assert host.transport.refusals() == {"run": 1}

    wire.run(work)


def test_visitor_of_another_version_is_refused_with_both_versions(wire):
    async def work():
        visitor, host = await wire.peer(1), await wire.peer(2)
        answer = await refusal(visitor, host, hello=Hello(VERSION + 6, visitor.run_id, visitor.record.wire))
        assert answer.code == "version" and str(VERSION) in answer.detail and str(VERSION + 6) in answer.detail

    wire.run(work)


def test_gate_of_another_version_is_no_gate_without_an_answer(wire, monkeypatch):
    """Its frames have its own version, also that of its refusal: it will not admit us, however long we wait."""

    async def work():
        visitor, host = await wire.peer(1), await wire.peer(2)
        encode = frames.encode

        def encode_as_old_gate(sent, identity, run_id):
            data = bytearray(encode(sent, identity, run_id))
            data[len(frames.MAGIC)] -= isinstance(sent.message, Refuse)
            return bytes(data)

        monkeypatch.setattr(frames, "encode", encode_as_old_gate)
        answer = await refusal(visitor, host, hello=Hello(VERSION - 1, visitor.run_id, visitor.record.wire))
        assert answer == Refuse("version", f"the peer uses protocol version {VERSION - 1}, we use {VERSION}")

    wire.run(work)


def test_gate_distinguishes_another_process_with_its_key_from_its_own_visit(wire):
    async def work():
        visitor, host = await wire.peer(1), await wire.peer(1)
        assert visitor.id == host.id
        assert await refusal(visitor, host) == Refuse("busy", SAME_KEY)
        assert await refusal(visitor, visitor) == Refuse("busy", OWN_GATE)
        assert not visitor.hellos and not host.hellos

    wire.run(work)


@pytest.mark.parametrize("damage", ["stolen", "forged", "garbage"])
def test_visitor_with_foreign_record_is_refused(wire, damage):
    async def work():
        visitor, host, other = await wire.peer(1), await wire.peer(2), await wire.peer(3)
        record = {
            "stolen": other.record.wire,
            "forged": visitor.record.wire[:-1] + bytes([visitor.record.wire[-1] ^ 1]),
            "garbage": os.urandom(200),
        }[damage]
        answer = await refusal(visitor, host, hello=Hello(VERSION, visitor.run_id, record))
        assert answer.code == "signature" and not host.hellos

    wire.run(work)


def test_visitor_receives_the_refusal_reason(wire):
    async def work():
        visitor, host = await wire.peer(1), await wire.peer(2)
        host.verdict = Refuse("full", "come back tomorrow")
        assert await refusal(visitor, host) == host.verdict

    wire.run(work)


def test_banned_key_fails_the_handshake(wire):
    async def work():
        first, second = await wire.pair()
        second.transport.drop(first.id, "lied", ban=True)
        assert "lied" in (await first.recv()).reason
        before = len(second.hellos)
        refused = second.refused
        assert (await refusal(first, second)).code == "unreachable"
        assert len(second.hellos) == before and second.refused > refused
        assert not await second.ping(first)
        second.transport.allow(first.id)
        second.transport.learn(first.record)
        first.transport.learn(second.record)
        assert await second.ping(first), "the verdict has ended"

    wire.run(work)


def test_unexpected_identity_at_the_gate_is_refused(wire):
    async def work():
        visitor, host = await wire.peer(1), await wire.peer(2)
        # A record of another peer that names the host's address and transport key.
        host.record, honest = (await wire.peer(3)).record, host.record
        assert (await refusal(visitor, host)).code == "unreachable"
        host.record = honest
        assert isinstance(await visitor.meet(host), Welcome)

    wire.run(work)


def test_visitor_that_knocks_too_often_is_limited(wire):
    async def work():
        visitor = await wire.peer(1)
        host = await wire.peer(2, limits=wire.short(key_burst=2, key_rate=0.0))
        host.verdict = Refuse("token", "no")
        codes = [(await refusal(visitor, host)).code for _ in range(4)]
        assert codes == ["token", "token", "unreachable", "unreachable"]
        assert isinstance(await (await wire.peer(3)).meet(host), Refuse)

    wire.run(work)


@pytest.mark.parametrize(
    "body",
    [
        frames.encode(Frame(Chunk(1, 1, 1, 1)), None, bytes(32)),
        frames.encode(Frame(Refuse("a", "b")), None, bytes(32)),
        frames.encode(Frame(Hello(VERSION, bytes(32), b"")), None, bytes(32)) + b"more",
        os.urandom(1000),
        b"",
    ],
    ids=["bulk", "an answer", "too long", "noise", "nothing"],
)
def test_unexpected_frame_at_the_gate_is_refused(wire, eventually, body):
    async def work():
        visitor, host = await wire.peer(1), await wire.peer(2)
        context = zmq.Context()
        sock = context.socket(zmq.DEALER)
        as_client(sock, visitor.identity, host.identity.transport_public)
        sock.connect(f"tcp://127.0.0.1:{host.port}")
        sock.send(body)
        await eventually(lambda: host.transport.refusals() == {"malformed": 1})
        context.destroy(linger=0)
        assert not host.hellos
        assert isinstance(await visitor.meet(host), Welcome)

    wire.run(work)


# --- ports


async def member_port(visitor, host):
    """Return a port that `host` has opened for `visitor`, which has not dialled it yet."""
    welcome, _ = await knock(visitor.sockets, host.contact, visitor.hello, lambda: int(time.time()))
    return welcome, port_of(welcome.endpoint)


@pytest.mark.parametrize("which", ["gate", "member", "bulk"])
@pytest.mark.parametrize("said", ["nothing", "noise", "greeting", "half a greeting"])
def test_noise_and_silence_on_every_port_harm_nobody(wire, which, said):
    async def work():
        visitor, friend = await wire.peer(1), await wire.peer(3)
        host = await wire.peer(2, limits=wire.short(handshake=1.0))
        assert isinstance(await friend.meet(host), Welcome)
        _, member = await member_port(visitor, host)
        port = {"gate": host.port, "member": member, "bulk": host.bulk_port}[which]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        greeting = bytes.fromhex("ff00000000000000017f03")
        data = {
            "nothing": b"",
            "noise": os.urandom(65536),
            "greeting": greeting + bytes(53),
            "half a greeting": greeting,
        }
        writer.write(data[said])
        await ends(reader)
        writer.close()
        await link_still_works(friend, host)
        assert host.strangers == (0, 0)

    wire.run(work)


def test_member_port_admits_only_its_peer(wire, eventually):
    async def work():
        visitor, host, member = await wire.peer(1), await wire.peer(2), await wire.peer(3)
        assert isinstance(await member.meet(host), Welcome)
        welcome, port = await member_port(visitor, host)
        context = zmq.Context()
        refused = host.refused
        sockets = []
        # Without CURVE; with an unknown key; with the key of another member; with the wrong server key.
        for key, server in (
            (None, None),
            (Identity.generate(bytes(32)), host),
            (member.identity, host),
            (visitor.identity, member),
        ):
            sock = context.socket(zmq.DEALER)
            sock.setsockopt(zmq.LINGER, 0)
            if key is not None:
                as_client(sock, key, server.identity.transport_public)
            monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            sock.connect(f"tcp://127.0.0.1:{port}")
            sock.send(b"")
            sockets += [sock, monitor]
            await eventually(lambda monitor=monitor: monitor.poll(0))
        assert host.refused >= refused + 2
        assert visitor.id not in host.links
        assert not any(sock.poll(0) for sock in sockets[::2])
        for sock in sockets:
            sock.close(linger=0)
        context.destroy(linger=0)
        # The port was open all the time: its own peer still gets in, and no peer after it.
        events = LinkEvents(nothing, nothing, nothing)
        address, loop = "127.0.0.1", asyncio.get_running_loop()
        route = DialRoute(lambda factory, port: loop.create_connection(factory, address, port))
        link = await Link.take(visitor.sockets, host.record, welcome, route, 0, events)
        assert await link.ready
        assert visitor.id in host.links
        with pytest.raises(ConnectionError):
            await asyncio.open_connection(address, port)
        link.close("done")
        await eventually(lambda: link.all_closed)

    wire.run(work)


def test_unused_connection_offer_is_withdrawn(wire, eventually):
    async def work():
        visitor, host = await wire.peer(1), await wire.peer(2, limits=wire.short())
        _, port = await member_port(visitor, host)
        assert len(host.offers) == 1
        await eventually(lambda: not host.offers)
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
        assert isinstance(await visitor.meet(host), Welcome)

    wire.run(work)


@pytest.mark.parametrize("which", ["gate", "bulk"])
def test_flood_of_silent_connections_does_not_exclude_honest_peer(wire, which):
    async def work():
        limits = wire.short(handshake=5.0, visits=16, half_open=16, address_burst=10_000)
        visitor, host = await wire.peer(1), await wire.peer(2, limits=limits)
        port = host.port if which == "gate" else host.bulk_port
        flood = []
        for _ in range(200):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
            flood.append(sock)
        assert isinstance(await visitor.meet(host), Welcome)
        assert await visitor.chunk(host, bytes(1000))
        assert (await host.recv()).frame.message.index == 0
        assert host.strangers[0] <= 16 and host.strangers[1] <= 17
        for sock in flood:
            sock.close()

    wire.run(work)


def test_connections_per_source_are_limited(wire):
    async def work():
        host = await wire.peer(2, limits=wire.short(address_burst=3, address_rate=0.0))
        friend = await wire.peer(1)
        assert isinstance(await friend.meet(host), Welcome)
        for _ in range(6):
            reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
            await ends(reader)
            writer.close()
        assert (await (await wire.peer(3)).meet(host)).code == "unreachable"
        assert host.transport.refusals()["too many connections from there"] >= 4

    wire.run(work)


def test_handshakes_of_all_sources_together_are_limited(wire):
    """A greeting alone does not count: it costs no libzmq socket, and the gate answers it as libzmq would."""

    async def work():
        host = await wire.peer(2, limits=wire.short(visit_burst=1, visit_rate=0.0))
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
            writer.write(GREETING[:-1])
            assert await reader.readexactly(len(GREETING)) == GREETING
            writer.close()
        assert isinstance(await (await wire.peer(1)).meet(host), Welcome)
        assert (await (await wire.peer(3)).meet(host)).code == "unreachable"
        assert host.transport.refusals()["too many handshakes"] == 1

    wire.run(work)


# --- members


@pytest.mark.parametrize("message", [Ping(1, 2, ()), Vote(1, 1, None, bytes(32), bytes(32))])
def test_bad_signature_closes_link(wire, message):
    async def work():
        first, second = await wire.pair()
        first.sockets.identity = Identity.generate(b"x" * 32)
        assert await first.transport.send(second.id, Frame(Ping(1, 2, ())))
        arrival = await second.recv()
        assert arrival.peer == first.id and arrival.frame is None and "signature" in arrival.reason
        assert "signature" in (await first.recv()).reason

    wire.run(work)


@pytest.mark.parametrize(
    "parts",
    [
        [b"\x01"],
        [os.urandom(100)],
        [frames.encode(Frame(Chunk(1, 1, 1, 1)), None, bytes(32))],
        [frames.encode(Frame(Refuse("a", "b")), None, bytes(32))],
    ],
)
def test_invalid_control_message_closes_link(wire, parts):
    async def work():
        first, second = await wire.pair()
        first.control_connection(second).post(parts)
        arrival = await second.recv()
        assert arrival.peer == first.id and arrival.frame is None and arrival.reason

    wire.run(work)


@pytest.mark.parametrize("parts", [[b"\x01"], [b"\x01more"]])
def test_malformed_or_repeated_stream_switch_closes_link(wire, parts):
    async def work():
        first, second = await wire.pair()
        link, _ = await wire.settled(first, second)
        first.control_connection(second).post(parts)
        arrival = await second.recv()
        assert arrival.peer == first.id and arrival.frame is None and arrival.reason

    wire.run(work)


def signed(message, seed=1, run_id=b"r" * 32):
    return frames.encode(Frame(message), Identity.generate(bytes([seed]) * 32), run_id)


@pytest.mark.parametrize(
    "head",
    [
        signed(Vote(1, 1, Ballot(1, bytes(32)), bytes(32), bytes(32)), seed=3),
        signed(Promise(1, 1, Ballot(2, bytes(32)), None, None), seed=3),
        signed(Found(1, 1, bytes(32), (bytes(32),), b""), seed=3),
        signed(Ping(1, 2, ())),
        frames.encode(Frame(Chunk(1, 1, 1, 1)), None, bytes(32)),
        os.urandom(100),
        bytes(MAX_EXPRESS[0] + 1),
    ],
    ids=[
        "a vote that is forged",
        "a promise that is forged",
        "a founder's statement that is forged",
        "no word",
        "bulk",
        "noise",
        "too long",
    ],
)
def test_invalid_message_on_control_stream_closes_link(wire, head):
    async def work():
        first, second = await wire.pair()
        link, _ = await wire.settled(first, second)
        link.stream_pool.express.writer.post(head)
        arrival = await second.recv()
        assert arrival.peer == first.id and arrival.frame is None and arrival.reason

    wire.run(work)


@pytest.mark.parametrize("run_id", [b"r" * 32, b"s" * 32])
def test_bad_signature_on_control_stream_closes_link(wire, run_id):
    """The frame is processed, because the stream proves its sender; it is the last one."""

    async def work():
        first, second = await wire.pair()
        link, _ = await wire.settled(first, second)
        link.stream_pool.express.writer.post(signed(Ask(1, 0), 3 if run_id == b"r" * 32 else 1, run_id))
        link.stream_pool.express.writer.post(signed(Ask(2, 0)))
        arrivals = []
        while not arrivals or arrivals[-1].frame is not None:
            arrivals.append(await second.recv())
        assert arrivals[-1].reason == "bad signature of Ask"
        assert [arrival.frame.message for arrival in arrivals[:-1]] in ([], [Ask(1, 0)], [Ask(1, 0), Ask(2, 0)])

    wire.run(work)


def test_endless_message_stops_at_the_window(wire):
    async def work():
        first, second = await wire.pair(limits=wire.short(silence=0.6, heartbeat=0.2))
        # libzmq counts messages, not parts: this one has a thousand parts of 100 kB.
        receiving = second.control_connection(first)
        with suppress(zmq.Again):  # the receiver may close in the middle of it
            first.control_connection(second).post([bytes(100_000)] * 1000)
        arrival = await second.recv()
        assert arrival.frame is None
        assert receiving.tcp_relay.down < 12 << 20

    wire.run(work)


def first_key(secret, number):
    """Return the key of the records that the dialler of a stream sends."""
    info = b"thinwire bulk stream 1" + bytes([number])
    return AESGCM(HKDF(SHA256(), 64, salt=None, info=info).derive(secret)[:32])


class Crooked:
    """Hand-made bulk stream on a link without one."""

    async def open(self, wire, number=0, secret=None, limits=None):
        self.first, self.second = await wire.peer(1, streams=0), await wire.peer(2, limits=limits)
        assert isinstance(await self.first.meet(self.second), Welcome)
        self.secret = self.first.link(self.second).secret
        await self.join(number, secret or self.secret)
        return self

    async def join(self, number, secret):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.second.bulk_port)
        self.key = first_key(secret, number)
        opening = OPENING.pack(session_of(self.secret), number)
        self.opening = opening + self.key.encrypt(bytes(12), b"", opening)
        self.writer.write(self.opening)

    def record(self, payload=b"payload", count=1, head=None, lengths=None):
        frame = Frame(Chunk(1, 0, 1, 5), payload)
        head = frames.encode(frame, None, bytes(32)) if head is None else head
        lengths = lengths or LENGTHS.pack(len(head), len(payload))
        sealed = [
            self.key.encrypt((count + index).to_bytes(12, "big"), data, lengths)
            for index, data in enumerate((head, payload))
        ]
        return lengths + b"".join(sealed)

    async def is_cut(self):
        """Check that stream and link are closed, and that this is reported."""
        await ends(self.reader)
        arrival = await self.second.recv()
        assert arrival.peer == self.first.id and arrival.frame is None
        return arrival.reason


def test_handmade_stream_that_follows_the_protocol_works(wire):
    """Without this the tests below could pass for the wrong reason."""

    async def work():
        crooked = await Crooked().open(wire)
        data = crooked.record() + crooked.record(b"", count=3) + crooked.record(b"z" * 70_000, count=5)
        for index in range(0, len(data), 997):
            crooked.writer.write(data[index : index + 997])
            await asyncio.sleep(0)
        payloads = [bytes((await crooked.second.recv()).frame.payload) for _ in range(3)]
        assert payloads == [b"payload", b"", b"z" * 70_000]

    wire.run(work)


@pytest.mark.parametrize("size", [5000, 2 * WORTH])
@pytest.mark.parametrize("where", [0, 7, 8, 30, -1])
def test_flipped_bit_on_stream_closes_link(wire, where, size):
    async def work():
        crooked = await Crooked().open(wire, limits=wire.short())
        data = bytearray(crooked.record(b"p" * size))
        data[where] ^= 4
        crooked.writer.write(data)
        assert await crooked.is_cut()

    wire.run(work)


def test_replayed_or_reordered_record_closes_link(wire):
    async def work():
        crooked = await Crooked().open(wire)
        crooked.writer.write(crooked.record() * 2)
        await ends(crooked.reader)
        # The report of the loss overtakes earlier frames.
        arrivals = [await crooked.second.recv() for _ in range(2)]
        assert arrivals[0].frame is None and "key" in arrivals[0].reason
        assert arrivals[1].frame.message == Chunk(1, 0, 1, 5)

    wire.run(work)


@pytest.mark.parametrize("lengths", [(0, 0), (10, 100), (1000, 100), (50, 2**32 - 1), (2**32 - 1, 50), (60, 1_114_113)])
def test_length_bomb_closes_stream_before_allocation(wire, lengths):
    async def work():
        crooked = await Crooked().open(wire)
        pool = crooked.second.sockets.pool
        pool.take = lambda size: pytest.fail("allocated")
        crooked.writer.write(LENGTHS.pack(*lengths))
        assert "limits" in await crooked.is_cut()

    wire.run(work)


@pytest.mark.parametrize(
    "head",
    [
        frames.encode(Frame(Chunk(1, 0, 1, 5), b"four"), None, bytes(32)),
        frames.encode(Frame(Refuse("a", "b")), None, bytes(32)),
        os.urandom(40),
    ],
    ids=["another length", "no bulk", "noise"],
)
def test_valid_record_with_invalid_frame_closes_link(wire, head):
    async def work():
        crooked = await Crooked().open(wire)
        crooked.writer.write(crooked.record(head=head))
        assert await crooked.is_cut()

    wire.run(work)


def test_trickling_record_is_cut_but_idle_stream_is_not(wire):
    async def work():
        crooked = await Crooked().open(wire, limits=wire.short())
        crooked.writer.write(crooked.record())
        assert (await crooked.second.recv()).frame is not None
        await asyncio.sleep(0.8)
        crooked.writer.write(crooked.record(count=3))
        assert (await crooked.second.recv()).frame is not None
        crooked.writer.write(crooked.record(bytes(100_000), count=5)[:500])
        assert "slower" in await crooked.is_cut()

    wire.run(work)


@pytest.mark.parametrize("fault", ["another secret", "another session", "used number", "number too high"])
def test_unauthenticated_streams_are_closed(wire, fault):
    async def work():
        crooked = await Crooked().open(wire)
        crooked.writer.write(crooked.record())
        assert (await crooked.second.recv()).frame is not None
        if fault == "another secret":
            await crooked.join(1, bytes(32))
        elif fault == "another session":
            crooked.secret = bytes(32)
            await crooked.join(1, bytes(32))
        else:
            await crooked.join(0 if fault == "used number" else 200, crooked.secret)
        assert await ends(crooked.reader) == b""
        # No other link is affected.
        await link_still_works(crooked.first, crooked.second)

    wire.run(work)
