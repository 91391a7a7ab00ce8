"""Relay between one TCP connection to the network and a libzmq socket on loopback.

libzmq cannot close one peer of a socket, cannot limit connections, counts messages but not the parts of an unfinished
one (a peer could fill the memory with it), and does not report at once that a peer has disconnected. The relay does all
four. It also answers the greeting of an accepted connection itself, because a libzmq socket costs several times as much as the
rest: strangers that send only a greeting get none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from thinwire.collectives.transport.circuits.ticket import decode, hand_over
from thinwire.collectives.transport.interface import RESET
from thinwire.collectives.transport.tcp_options import round_trip, tune
from thinwire.collectives.transport.zeromq.sockets.zmq_socket import GREETING, begins_handshake

FIRST_BYTE = GREETING[0]
"""First byte of every ZMTP greeting. A connection that begins otherwise may come with a ticket."""

CIRCUIT = "an end of a circuit"
"""Reason of the end of a relay whose connection came with a valid ticket: another protocol has it now."""

Divert = Callable[[bytes], asyncio.BaseProtocol | None]
"""Return the protocol for a connection that came with this token of a circuit; None: there is none."""

HANDSHAKE_BYTES = 2048
"""More bytes than one side sends before its first message."""


class _End(asyncio.Protocol):
    """One side of a relay."""

    def __init__(self, tcp_relay: TcpRelay, outer: bool) -> None:
        self._tcp_relay, self._outer = tcp_relay, outer
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio.Transport, but have the same methods.
        self.transport = cast(asyncio.Transport, transport)
        tune(transport.get_extra_info("socket"))
        self._tcp_relay.made(self._outer)

    def data_received(self, data: bytes) -> None:
        self._tcp_relay.carry(self._outer, data)

    def pause_writing(self) -> None:
        self._tcp_relay.hold_back(self._outer, True)

    def resume_writing(self) -> None:
        self._tcp_relay.hold_back(self._outer, False)

    def eof_received(self) -> bool:
        return self._tcp_relay.ended(self._outer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._tcp_relay.ended(self._outer)


class TcpRelay:
    """Carries bytes both ways with back-pressure.

    `opened` is called when there is data to carry (dialled: once connected; accepted: once the other side has begun the
    handshake of CURVE) and must call `join`; `closed(reason)` is called once, at the end. `window`: bytes from outside that
    may pass before `progress` reports that a whole message has come out of libzmq. At the limit reading stops, or, if
    `strict`, the relay closes. `divert`: takes connections that begin with a ticket.
    """

    def __init__(
        self,
        window: int,
        opened: Callable[[], None],
        closed: Callable[[str], None],
        *,
        accepted: bool,
        strict: bool,
        met: Callable[[], None] = lambda: None,
        divert: Divert | None = None,
    ) -> None:
        self.up = 0
        self.down = 0
        """Bytes to and from the outside."""
        self.receiving = 0.0
        """Seconds between the first bytes from outside after the handshake and the last ones."""
        self._first = 0.0
        self.reason = ""
        self._window, self._opened, self._closed, self._met = window, opened, closed, met
        self._accepted, self._strict, self._divert = accepted, strict, divert
        self._ticket = b""
        self._left = window
        self._early = bytearray()
        self._doubled = 0
        """Bytes of libzmq's greeting that the relay has sent in its place, and libzmq not yet."""
        self._started = self._ending = False
        self._full = self._held_back = False
        self._task: asyncio.Task[None] | None = None
        self.outer, self._inner = _End(self, True), _End(self, False)

    @property
    def source(self) -> str:
        """The outside's address, without port."""
        transport = self.outer.transport
        return str((transport.get_extra_info("peername") or "?")[0]) if transport is not None else "?"

    @property
    def ends(self) -> tuple[str, str]:
        """Return "host:port" of our end and of the other end of the outside connection; "" if there is none."""
        transport = self.outer.transport
        if transport is None:
            return "", ""
        ours, theirs = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        return _text(ours), _text(theirs)

    @property
    def rtt(self) -> float | None:
        """Kernel's round-trip time of the outside connection in seconds."""
        transport = self.outer.transport
        return None if transport is None or self.reason else round_trip(transport.get_extra_info("socket"))

    def join(self, port: int) -> None:
        """Connect to the libzmq socket on loopback `port` and let bytes pass."""
        self._task = asyncio.get_running_loop().create_task(self._join(port))

    async def _join(self, port: int) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: self._inner, "127.0.0.1", port)
        except OSError as error:
            self.close(f"no local socket: {error}")
            return
        inner = self._inner.transport
        if inner is None or self.reason:
            return
        inner.write(bytes(self._early))
        self._early.clear()
        if self._ending:
            inner.write_eof()
        self._flow()

    def progress(self) -> None:
        """Reopen the window: a whole message has come out of libzmq."""
        self._left, self._full = self._window, False
        self._flow()

    def close(self, reason: str, *, flush: bool = False) -> None:
        """Close both sides; with `flush`, unsent data is still sent."""
        if self.reason:
            return
        self.reason = reason
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        for end in (self._inner, self.outer):
            if end.transport is not None:
                if flush and end is self.outer:
                    end.transport.close()
                else:
                    end.transport.abort()
        self._closed(reason)

    # --- called by the ends

    def made(self, outer: bool) -> None:
        """Note that one side is connected."""
        end = self.outer if outer else self._inner
        if self.reason and end.transport is not None:
            end.transport.abort()
        elif outer:
            self._met()
            if not self._accepted:
                self._start()

    def carry(self, outer: bool, data: bytes) -> None:
        """Pass bytes from one side to the other."""
        if self.reason:
            return
        if not outer:
            self._doubled, data = max(0, self._doubled - len(data)), data[self._doubled :]
            self._send(data)
            return
        if self.down == 0 and (self._ticket or data[0] != FIRST_BYTE):
            self._take_ticket(data)
            return
        self.down += len(data)
        if self.down > HANDSHAKE_BYTES:
            now = asyncio.get_running_loop().time()
            self._first = self._first or now
            self.receiving = now - self._first
        self._left -= len(data)
        if self._left < 0 and self._strict:
            self.close("sent too much")
            return
        inner = self._inner.transport
        if inner is None:
            self._early += data
            if self._started or self._greet():
                self._start()
        elif not inner.is_closing():
            inner.write(data)
        if self._left <= 0:
            self._full = True
            self._flow()

    def _send(self, data: bytes) -> None:
        self.up += len(data)
        if data and self.outer.transport is not None and not self.outer.transport.is_closing():
            self.outer.transport.write(data)

    def _greet(self) -> bool:
        """Answer a greeting in libzmq's place; return True once the handshake of CURVE has begun."""
        if not self._doubled:
            self._doubled = len(GREETING)
            self._send(GREETING)
        try:
            return begins_handshake(self._early)
        except ValueError:
            self.close("not a ZeroMQ greeting")
            return False

    def _take_ticket(self, data: bytes) -> None:
        transport, self._ticket = self.outer.transport, self._ticket + data
        try:
            token = decode(self._ticket)
        except ValueError:
            self.close("not a ZeroMQ greeting")
            return
        if token is None or transport is None:
            return
        protocol = self._divert(token) if self._divert is not None else None
        if protocol is None:
            self.close("no such circuit")
            return
        self.reason, self.outer.transport = CIRCUIT, None
        self._closed(CIRCUIT)
        hand_over(transport, protocol)

    def hold_back(self, outer: bool, held_back: bool) -> None:
        """Stop or resume reading one side while the other takes no data."""
        if outer:
            transport = self._inner.transport
            if transport is not None and not transport.is_closing():
                transport.pause_reading() if held_back else transport.resume_reading()
        else:
            self._held_back = held_back
            self._flow()

    def ended(self, outer: bool) -> bool:
        """Note that one side has ended; return True if the other side must still take earlier data."""
        inner = self._inner.transport
        if self.reason:
            return False
        if not outer:
            self.close(RESET if self._ending else "the encrypted channel failed", flush=True)
            return False
        if not self._started:
            self.close(RESET)
            return False
        # libzmq reads the rest and closes its side, which ends the relay.
        if not self._ending:
            self._ending = True
            if inner is not None and not inner.is_closing():
                inner.write_eof()
        return True

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._flow()
            self._opened()

    def _flow(self) -> None:
        transport = self.outer.transport
        if transport is None or self.reason or transport.is_closing():
            return
        held = self._full or self._held_back or (self._started and self._inner.transport is None)
        if held and transport.is_reading():
            transport.pause_reading()
        elif not held and not transport.is_reading():
            transport.resume_reading()


def _text(end: tuple[str, int] | None) -> str:
    if not end:
        return ""
    host = end[0].removeprefix("::ffff:") if "." in end[0] else end[0].partition("%")[0]
    return f"[{host}]:{end[1]}" if ":" in host else f"{host}:{end[1]}"
