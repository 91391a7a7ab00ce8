"""Port at which one peer, and no other, may take a link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from thinwire.collectives.transport.zeromq.sockets.control_connection import SharedSockets
from thinwire.collectives.transport.zeromq.sockets.listener import HalfOpen, listen
from thinwire.swarm.messages.registry import PeerId

_domains = count(1)


class OfferedPort:
    """Port for control connections of the peer with transport key `key`, direct or over a relay.

    Connections are made in the ZAP domain `domain`, where only `key` passes the handshake of CURVE, and count in `crowd`
    until then.
    """

    def __init__(self, sockets: SharedSockets, key: bytes) -> None:
        self.domain = b"link %d" % next(_domains)
        self.crowd = HalfOpen(8)
        self._sockets, self._key = sockets, key
        self._server: asyncio.Server | None = None
        self._port = -1

    async def open(self, accept: Callable[[PeerId], asyncio.Protocol], host: str, ports: range) -> int:
        """Listen on a port of `ports` and return it. Raises PortTaken.

        `accept(relay)` makes the connection that begins, see `Circuits.listeners`; relay: b"" if it is direct.
        """
        self._server, self._port = await listen(lambda: accept(b""), host, ports)
        self._sockets.gatekeeper.allow(self.domain, lambda key: key == self._key)
        self._sockets.circuits.listeners[self._port] = accept
        return self._port

    def close(self) -> None:
        """Accept no more connections; those that have begun stay open."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._sockets.circuits.listeners.pop(self._port, None)
            self._sockets.gatekeeper.forbid(self.domain)
