"""A ticket: the bytes with which both ends of a circuit begin their connections to the relay's gate.

The token in it came over a CURVE link, is random, and is good for two connections within a few seconds, so a ticket needs
no signature and no clock, and a replayed one opens nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar, cast

import blake3
from thinwire.collectives.transport.addresses.name_resolver import NameResolver
from thinwire.collectives.transport.tcp_options import tune
from thinwire.swarm.identity.address import split_address

TOKEN_BYTES = 32

MAGIC = b"twcirc1\n"
"""First bytes of a ticket; a ZMTP greeting begins with 0xFF."""

TICKET_BYTES = len(MAGIC) + TOKEN_BYTES

OPEN = b"\1"
"""Byte that the relay sends both ends when they are spliced. All later bytes come from the other end."""

End = TypeVar("End", bound=asyncio.BaseProtocol)


def name_of(token: bytes) -> bytes:
    """Return the hash of a token for its ticket, so that no relay can choose bytes that we send."""
    return blake3.blake3(b"thinwire/circuit/1\0" + token).digest()


def encode(name: bytes) -> bytes:
    """Return the ticket with the name of a token, of TOKEN_BYTES."""
    return MAGIC + name


def decode(data: bytes) -> bytes | None:
    """Return the name in a ticket, or None while `data` is only its beginning.

    Raises ValueError if it is not a ticket.
    """
    if not MAGIC.startswith(data[: len(MAGIC)]) or len(data) > TICKET_BYTES:
        raise ValueError("not a ticket")
    return data[len(MAGIC) :] if len(data) == TICKET_BYTES else None


class _Visitor(asyncio.BufferedProtocol):
    """Shows a ticket and waits for OPEN; then the connection belongs to the protocol that `factory` makes."""

    def __init__(self, token: bytes, factory: Callable[[], asyncio.BaseProtocol]) -> None:
        self.opened: asyncio.Future[asyncio.BaseProtocol] = asyncio.get_running_loop().create_future()
        self._token, self._factory = token, factory
        # One byte, so that nothing of the other end is read before its protocol is here.
        self._byte = bytearray(1)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio.Transport, but have the same methods.
        self._transport = cast(asyncio.Transport, transport)
        tune(transport.get_extra_info("socket"))
        self._transport.write(encode(name_of(self._token)))

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._byte

    def buffer_updated(self, count: int) -> None:
        transport = self._transport
        assert transport is not None
        if bytes(self._byte) != OPEN or self.opened.done():
            transport.abort()
            return
        hand_over(transport, protocol := self._factory())
        self.opened.set_result(protocol)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.opened.done():
            self.opened.set_exception(ConnectionError("the relay has closed the circuit"))


def hand_over(transport: asyncio.Transport, protocol: asyncio.BaseProtocol) -> None:
    """Give a connection to another protocol, as if it had just been made."""
    # An event loop looks at the kind of protocol when it begins to read.
    if transport.is_reading():
        transport.pause_reading()
    transport.set_protocol(protocol)
    transport.resume_reading()
    protocol.connection_made(transport)


async def enter(
    resolver: NameResolver, gates: Iterable[str], token: bytes, factory: Callable[[], End]
) -> tuple[asyncio.BaseTransport, End]:
    """Open a circuit at the first of a relay's gates that answers; return the connection and its protocol.

    Raises OSError. The caller limits the time.
    """
    error: OSError = ConnectionError("the relay has no address")
    for gate in gates:
        try:
            host, port = split_address(gate)
            made = await resolver.connect(lambda: _Visitor(token, factory), host, port)
            transport, visitor = cast(asyncio.Transport, made[0]), made[1]
        except (OSError, ValueError) as failed:
            error = ConnectionError(f"relay at {gate}: {failed}")
            continue
        try:
            return transport, cast(End, await visitor.opened)
        except BaseException:
            transport.abort()
            raise
    raise error
