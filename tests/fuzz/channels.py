"""Fuzzing targets for answers of machines that are no peers yet: bulk streams, routers, LAN and DHT directories.

Each target refuses an input with CodecError, or accepts it.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from kit.planted.cards import NOW, card
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.collectives.transport.zeromq.sockets.limits import Limits
from thinwire.collectives.transport.zeromq.streams import record_crypto, stream
from thinwire.collectives.transport.zeromq.streams.record_crypto import EXPRESS, LENGTHS, OPENING, TAG, record_size
from thinwire.compression.core.codec import CodecError
from thinwire.node.discovery import dht_process, dht_source, lan_source, public_runs
from thinwire.node.discovery.public_runs import DirectoryError
from thinwire.node.membership.router import nat_pmp, pcp, port_mapping, upnp
from thinwire.node.membership.router.port_mapping import MappingFailed
from thinwire.node.runtime.disk import RealDisk
from thinwire.swarm.frame import HEADER_BYTES
from thinwire.swarm.identity.peer_record import RecordError
from thinwire.swarm.identity.run_card import RunCard

MODULES = (record_crypto, stream, dht_process, dht_source, lan_source, public_runs, nat_pmp, pcp, port_mapping, upnp)
"""Modules whose functions are instrumented."""

Target = tuple[str, Callable[[bytes], None], list[bytes]]

SECRET = b"\7" * 32
LEASE, PORT = 3600, 7400
SERVICE = lan_source.SERVICE


def targets() -> list[Target]:
    """Return the targets of all these machines."""
    return [_stream(), _pcp(), _nat_pmp(), _upnp(), _lan(), _dht(), _plain_values()]


class _Owner:
    """Owner of a stream: takes each number below 18, and stores what arrives."""

    def __init__(self) -> None:
        self.heard: list[tuple[bytes, bytes]] = []
        self.ends: list[str] = []

    def joined(self, stream: stream.Stream, number: int) -> None:
        if number > EXPRESS + 1:
            raise ValueError("no such stream")

    def arrived(self, stream: stream.Stream, head: bytes, payload: memoryview, digest: bytes) -> None:
        self.heard.append((head, bytes(payload)))

    def flushed(self, stream: stream.Stream) -> None:
        pass

    def broken(self, stream: stream.Stream, reason: str) -> None:
        self.ends.append(reason)


class _Socketless(stream.Stream):
    def _set_options(self, transport: asyncio.Transport) -> str:
        return "192.0.2.1"


class _Transport:
    """Transport that is open until it is closed, and sends nothing."""

    closing = False

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True


def _stream() -> Target:
    """Bits of the first byte: valid proof in the opening, sealed records, small pieces; then number, lengths, content.

    A sealed record arrives as it was; bytes that were not sealed end the stream.
    """
    session, limits, loop = record_crypto.session_of(SECRET), Limits(), asyncio.new_event_loop()

    async def take(data: bytes) -> None:
        if len(data) < 2:
            raise CodecError("empty")
        owner, transport = _Owner(), _Transport()
        one = _Socketless(BufferPool(1 << 16), limits, lambda named: (owner, SECRET) if named == session else None)
        one.connection_made(transport)  # type: ignore[arg-type]
        proved, sealed, small = data[0] & 1, data[0] & 2, data[0] & 4
        wire, sent = data[1:], []
        if proved:
            opening = OPENING.pack(session, data[1] % (EXPRESS + 3))
            sealer, _ = record_crypto.stream_keys(SECRET, opening[-1])
            wire = opening + sealer.prove(opening) + data[2:]
            if sealed:
                sent = list(_records(data[2:]))
                wire = opening + sealer_proof(opening) + b"".join(_sealed(opening[-1], sent))
        for piece in _pieces(wire, 7 if small else 1 << 20):
            while piece and not one.reason:
                room = one.get_buffer(-1)
                count = min(len(room), len(piece))
                room[:count] = piece[:count]
                one.buffer_updated(count)
                piece = piece[count:]
        assert transport.closing == bool(one.reason) == (one.state == "closed")
        if sealed and proved:
            assert owner.heard == sent or one.reason
            assert owner.heard == sent[: len(owner.heard)]
        else:
            assert not owner.heard
        refused = one.reason
        one.fail("end of the input")
        if refused:
            raise CodecError(refused)

    seeds = [
        bytes([flags, number]) + struct.pack(">BH", 9, 40) + bytes(49) for flags in (3, 7) for number in (0, EXPRESS)
    ]
    seeds += [b"\1\0", b"\1\0" + LENGTHS.pack(HEADER_BYTES + 1, 0), bytes(1) + OPENING.pack(session, 0) + bytes(TAG)]
    return "bulk stream", lambda data: loop.run_until_complete(take(data)), seeds


def sealer_proof(opening: bytes) -> bytes:
    """Return the proof of an opening by a new cipher of its stream."""
    return record_crypto.stream_keys(SECRET, opening[-1])[0].prove(opening)


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield heads and payloads: a byte and two bytes of lengths, then the content, cut short at the end."""
    while len(data) >= 3:
        head, payload = struct.unpack(">BH", data[:3])
        yield bytes(HEADER_BYTES) + data[3 : 3 + head], data[3 + head : 3 + head + payload]
        data = data[3 + head + payload :]


def _sealed(number: int, records: Sequence[tuple[bytes, bytes]]) -> Iterator[bytes]:
    sealer, _ = record_crypto.stream_keys(SECRET, number)
    sealer.prove(b"")
    for head, payload in records:
        record = bytearray(record_size(len(head), len(payload)))
        sealer.seal(head, payload, memoryview(record))
        yield bytes(record)


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


class _Fed:
    """Protocol of a gateway whose answers are the parts of an input: a length of one byte, and the packet."""

    packets: Iterator[bytes] = iter(())

    def feed(self, data: bytes) -> None:
        def packets() -> Iterator[bytes]:
            rest = data
            while rest:
                yield rest[1 : 1 + rest[0]]
                rest = rest[1 + rest[0] :]

        self.packets = packets()

    async def _ask(self, request: Callable[[str], bytes], judge: Callable[[bytes], str | None]) -> bytes:
        assert len(request("192.0.2.2")) <= pcp.SIZE
        for packet in self.packets:
            fault = judge(packet)
            if fault is None:
                continue
            if fault:
                raise MappingFailed(fault)
            return packet
        raise MappingFailed("no answer")


class _FedPcp(_Fed, pcp.Pcp):
    def __init__(self) -> None:
        super().__init__("192.0.2.1")
        self._nonce = bytes(pcp.NONCE_BYTES)


class _FedNatPmp(_Fed, nat_pmp.NatPmp):
    pass


def _mapped(router: Any, seeds: list[bytes]) -> Target:
    def take(data: bytes) -> None:
        router.feed(data)
        _run(_outside(router))

    return router.name, take, seeds


async def _outside(router: Any) -> None:
    try:
        _, address = await port_mapping.map_by_any([router], (PORT,), LEASE)
    except MappingFailed as error:
        str(error).encode()  # it is shown and logged
        raise CodecError(str(error)) from None
    assert address.endswith(f":{PORT}")


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that awaits nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


def _packets(*packets: bytes) -> bytes:
    return b"".join(bytes([len(packet)]) + packet for packet in packets)


def _pcp() -> Target:
    about = bytes(pcp.NONCE_BYTES) + struct.pack(">BxxxHH", pcp.TCP, PORT, PORT)
    head = struct.pack(">BBxBI", pcp.VERSION, 128 + pcp.MAP, 0, LEASE) + bytes(16)
    made = head + about + bytes(10) + b"\xff\xff" + bytes((9, 9, 9, 9))
    return _mapped(_FedPcp(), [_packets(made), _packets(made[:3] + b"\1" + made[4:24]), _packets(bytes(8))])


def _nat_pmp() -> Target:
    outside = struct.pack(">BBHI", 0, 128, 0, 1) + bytes((9, 9, 9, 9))
    made = struct.pack(">BBHIHHI", 0, 130, 0, 1, PORT, PORT, LEASE)
    refused = struct.pack(">BBHI", 0, 128, 3, 1)
    return _mapped(_FedNatPmp("192.0.2.1"), [_packets(outside, made), _packets(refused)])


def _upnp() -> Target:
    """The input is the answer of the process that asks the router."""

    class Answered:
        name, output = "UPnP", b""

        async def map(self, ports: Sequence[int], seconds: int) -> str:
            return upnp.outside_host(self.output)

        async def unmap(self, ports: Sequence[int]) -> None:
            pass

    router = Answered()

    def take(data: bytes) -> None:
        router.output = data[: upnp.ANSWER_BYTES]
        _run(_outside(router))

    return "UPnP", take, [b'{"address": "9.9.9.9"}', b'{"error": "no router answers"}', b'{"address": "2001:db8::1"}']


def _lan() -> Target:
    """The input is a TXT record, which zeroconf reads."""
    from zeroconf import ServiceInfo

    def take(data: bytes) -> None:
        strings = ServiceInfo(SERVICE, "a." + SERVICE, properties=data).properties
        wire = lan_source.card_in(strings)  # type: ignore[arg-type]
        try:
            found = RunCard.parse(wire, now=NOW)
        except RecordError as error:
            raise CodecError(str(error)) from None
        public_runs.listing([found])

    made = lan_source.txt_strings(card().wire)
    parts = [key.encode() + b"=" + value for key, value in made.items()]
    return "LAN", take, [b"".join(bytes([len(part)]) + part for part in parts)]


class _FedDht(dht_source.DhtSource):
    """Source whose child writes `written`, and then ends."""

    written = b""

    async def _ask(self, request: dict[str, object]) -> Any:
        pipe = asyncio.StreamReader()
        pipe.feed_data(self.written)
        pipe.feed_eof()
        every = [answer async for answer in dht_source.answers(pipe)]
        if not every:
            raise DirectoryError("the child has ended", "")
        return every[-1]

    async def _keep(self) -> None:
        pass


def _dht() -> Target:
    """The input is what the child process of the DHT writes: lengths and JSON. The first byte is a shorter first length."""
    loop = asyncio.new_event_loop()
    source = _FedDht(
        ("none",),
        bootstrap=(),
        listen=(),
        known=Path("none"),
        disk=RealDisk(),
        rng=random.Random(1),
        now=lambda: 0.0,
    )

    async def take(data: bytes) -> None:
        first = b"" if not data or data[0] & 1 else len(data[1:]).to_bytes(4, "big")
        source.written = first + data[1:]
        try:
            wires = await source.cards()
        except DirectoryError as error:
            raise CodecError(str(error)) from None
        for wire in wires:
            try:
                RunCard.parse(wire, now=NOW)
            except RecordError:
                continue

    def text(**values: object) -> bytes:
        return b"\0" + msgspec.json.encode(values)

    one = card().wire
    seeds = [
        text(id=0, values=[one]),
        text(id=0, peers=["/ip4/192.0.2.1/tcp/1/p2p/Qm"]),
        text(id=0, error="no", stored=True),
    ]
    return "DHT", lambda data: loop.run_until_complete(take(data)), seeds


def _plain_values() -> Target:
    """The input is a value that strangers stored in the DHT: only bytes may pass."""

    def take(data: bytes) -> None:
        if not dht_process.is_plain(data):
            raise CodecError("not plain")
        assert len(msgspec.msgpack.decode(data, type=bytes)) <= dht_process.VALUE_BYTES

    return "DHT value", take, [msgspec.msgpack.encode(bytes(size)) for size in (0, 1, 300)]
