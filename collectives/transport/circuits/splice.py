"""Two TCP connections at a relay whose bytes are passed to each other, with back-pressure.

A relay has no keys for the data that it passes on: CURVE and the sealed streams run from end to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from thinwire.collectives.transport.circuits.ticket import OPEN
from thinwire.collectives.transport.rate_limit import RateLimit
from thinwire.swarm.messages.registry import PeerId

PIECE = 1 << 16
"""Bytes of one read."""

LINGER = 5.0
"""Seconds in which the rest of the data must leave when one end has closed."""


class Splice:
    """Circuit between two peers, the `pair`: at most two ends.

    `asker`: the peer that has asked for it. `ended(splice)` is called once, `relayed(pair, count)` for each piece of `count`
    bytes.
    """

    def __init__(
        self,
        asker: PeerId,
        pair: frozenset[PeerId],
        rate_limit: RateLimit,
        relayed: Callable[[frozenset[PeerId], int], None],
        ended: Callable[[Splice], None],
    ) -> None:
        self.asker, self.pair = asker, pair
        self.rate_limit = rate_limit
        self.ends: list[End] = []
        self.over = False
        self._relayed, self._report_end = relayed, ended

    def end(self) -> End:
        """Return the protocol of the next end. Call at most twice."""
        self.ends.append(End(self))
        return self.ends[-1]

    @property
    def joined(self) -> bool:
        """True once both ends are connected."""
        return len(self.ends) == 2 and all(end.transport is not None for end in self.ends)

    def made(self) -> None:
        """Note that an end is connected; with two, bytes begin to flow."""
        if self.joined:
            for end in self.ends:
                end.start()

    def relayed(self, count: int) -> None:
        """Count passed bytes."""
        self._relayed(self.pair, count)

    def other(self, end: End) -> End | None:
        """Return the opposite end, if there is one."""
        return next((one for one in self.ends if one is not end), None)

    def close(self) -> None:
        """Close both ends at once."""
        self.finish()
        for end in self.ends:
            end.abort()

    def finish(self) -> None:
        """Report the end of the circuit; data that was read may still leave."""
        if not self.over:
            self.over = True
            self._report_end(self)


class End(asyncio.BufferedProtocol):
    """One end of a splice. Its connection is not read until the other end is here."""

    def __init__(self, splice: Splice) -> None:
        self.transport: asyncio.Transport | None = None
        self.splice = splice
        self._buffer = memoryview(b"")
        self._held_back = False
        self._turn: asyncio.Task[None] | None = None
        self._ending = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio.Transport, but have the same methods.
        self.transport = cast(asyncio.Transport, transport)
        self.transport.pause_reading()
        if self.splice.over:
            self.abort()
        else:
            self.splice.made()

    def start(self) -> None:
        """Send OPEN, after which the peer at this end sends, and read what it sends."""
        assert self.transport is not None
        self._buffer = memoryview(bytearray(PIECE))
        self.transport.write(OPEN)
        self.transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        data = bytes(self._buffer[:count])  # copied, because the other transport may hold it longer than this call
        if not self.splice.rate_limit.rate:
            self._pass(data)
            return
        self._turn = asyncio.get_running_loop().create_task(self._pass_in_turn(data))
        self._flow()

    async def _pass_in_turn(self, data: bytes) -> None:
        await self.splice.rate_limit.wait_behind(len(data))
        self._turn = None
        self._pass(data)
        self._flow()
        if self._ending:
            self._end_other()

    def _pass(self, data: bytes) -> None:
        other = self.splice.other(self)
        if other is not None and other.transport is not None and not other.transport.is_closing():
            other.transport.write(data)
            self.splice.relayed(len(data))

    def pause_writing(self) -> None:
        self._hold_back_other(True)

    def resume_writing(self) -> None:
        self._hold_back_other(False)

    def _hold_back_other(self, held_back: bool) -> None:
        if (other := self.splice.other(self)) is not None:
            other._held_back = held_back
            other._flow()

    def _flow(self) -> None:
        transport = self.transport
        if transport is None or transport.is_closing() or self._ending:
            return
        held = self._held_back or self._turn is not None
        if held and transport.is_reading():
            transport.pause_reading()
        elif not held and not transport.is_reading():
            transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._ending = True
        self.splice.finish()
        if self._turn is None:
            self._end_other()

    def _end_other(self) -> None:
        """Close the opposite connection when it has sent what came from here."""
        other = self.splice.other(self)
        if other is not None and other.transport is not None and not other.transport.is_closing():
            other.transport.close()
            asyncio.get_running_loop().call_later(LINGER, other.abort)

    def abort(self) -> None:
        """Close this connection at once."""
        if self._turn is not None:
            self._turn.cancel()
        if self.transport is not None:
            self.transport.abort()
