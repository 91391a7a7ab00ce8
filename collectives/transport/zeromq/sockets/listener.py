"""Listening sockets: where they are bound, and limits against floods of strangers."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import random
import socket
from collections.abc import Callable
from functools import lru_cache
from typing import ClassVar

from thinwire.collectives.transport.addresses.name_resolver import NameResolver
from thinwire.swarm.identity.address import subnet_of
from thinwire.swarm.identity.errors import HintedError

BACKLOG = 512
"""Connections that may wait to be accepted."""

MOST_INTERFACES = 4
"""Most interfaces whose addresses are announced."""

INNER = ("br-", "cni", "docker", "lxc", "lxd", "veth", "virbr", "vmnet")
"""Beginnings of names of interfaces to containers and virtual machines here; these come last."""

NO_ADDRESS = "this machine does not have that address: choose another with --host, such as 0.0.0.0"
"""Hint for a host that cannot be bound."""


class PortTaken(HintedError):
    """The address to listen on is not available."""

    exit_code: ClassVar[int] = 3


def descriptors_left(count: int) -> bool:
    """Return True if this process may open `count` more descriptors.

    libzmq aborts the process when it cannot open one.
    """
    found: list[int] = []
    try:
        for _ in range(count):
            found.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    finally:
        for descriptor in found:
            os.close(descriptor)
    return True


async def bindable(resolver: NameResolver, host: str) -> str:
    """Return the address to bind for a host, the first one of a name, IPv4 before IPv6. Raises PortTaken.

    The event loop continues while a name server is asked.
    """
    try:
        found = await resolver.numeric(host)
    except OSError as error:
        raise PortTaken(f"cannot listen on {host}: {error.strerror or error}", NO_ADDRESS) from None
    return min(found, key=lambda address: ":" in address)


async def listen(factory: Callable[[], asyncio.BaseProtocol], host: str, ports: range) -> tuple[asyncio.Server, int]:
    """Listen on a port of `ports` (range(0, 1): any), chosen at random so that a stranger cannot know it.

    `host`: a numeric address. Returns the server and its port. Raises PortTaken.
    """
    loop = asyncio.get_running_loop()
    reason, hint = (
        "the range of ports is empty",
        "choose another one with --port N (--port 0, Python: port=0: any free one), or stop the process that uses it",
    )
    # At most 64 tries: if a range is nearly full, the next dial tries other ports.
    for port in random.SystemRandom().sample(ports, min(len(ports), 64)):
        try:
            sock = _listening(host, port)
        except OSError as error:
            if error.errno and not isinstance(error, socket.gaierror):
                reason = os.strerror(error.errno)
            else:
                reason = error.strerror or str(error)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                break
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                hint = NO_ADDRESS
                break
            continue
        server = await loop.create_server(factory, sock=sock, backlog=BACKLOG)
        return server, sock.getsockname()[1]
    text = str(ports.start) if len(ports) == 1 else f"{ports.start}-{ports.stop - 1}"
    raise PortTaken(f"cannot listen on {host} port {text}: {reason}", hint)


def _listening(host: str, port: int) -> socket.socket:
    """Return a listening socket at a numeric address. Raises OSError.

    uvloop would look up even a numeric host in a thread of libuv, after which a forked child of this process crashes when it
    exits: libuv waits for threads that the child does not have.
    """
    family = _family(host)
    # With the interface of fe80::…%eth0; a name would stop the event loop while its server is asked.
    numeric = socket.AI_NUMERICHOST
    (*_, place), *_ = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=numeric)
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind(place)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def own_addresses(host: str) -> tuple[str, ...]:
    """Return the addresses that others can dial for a bound `host`.

    For a wildcard this is the address of the default route; in a network without one, those of all interfaces. Raises OSError
    where descriptors are short.
    """
    if host not in ("0.0.0.0", "::", ""):
        return (host,)
    family, outside = (socket.AF_INET6, "2001:db8::1") if host == "::" else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only queries the routing table.
            probe.connect((outside, 9))
            return (str(probe.getsockname()[0]),)
        except OSError:
            return _of_interfaces(family) or ("::1" if host == "::" else "127.0.0.1",)


def _of_interfaces(family: socket.AddressFamily) -> tuple[str, ...]:
    """Return the addresses of this machine that other machines may dial, of at most MOST_INTERFACES."""
    import psutil

    up = {name for name, one in psutil.net_if_stats().items() if one.isup}
    interfaces = sorted(psutil.net_if_addrs().items(), key=lambda item: (item[0].startswith(INNER), item[0]))
    found = [
        one.address
        for name, addresses in interfaces
        for one in addresses
        if name in up and one.family == family and "%" not in one.address
    ]
    return tuple(one for one in found if not ipaddress.ip_address(one).is_loopback)[:MOST_INTERFACES]


class HalfOpen:
    """Unauthenticated connections. Above `cap`, one of the busiest network is closed, drawn at random.

    At random, because a flood that opens connections faster than a distant peer can authenticate would always push out the
    oldest one, and so that peer. By networks (`subnet_of`), because one machine can have all addresses of a network. `rate`
    returns True if a source address may open another connection now, `handshakes` if a network may begin a handshake.
    """

    def __init__(
        self,
        cap: int,
        rate: Callable[[str], bool] = lambda source: True,
        rng: random.Random | None = None,
        handshakes: Callable[[str], bool] = lambda network: True,
    ) -> None:
        self._cap, self._rate, self._rng, self._handshakes = cap, rate, rng or random.SystemRandom(), handshakes
        self._count = 0
        self._networks: dict[str, dict[Callable[[], None], None]] = {}

    def __len__(self) -> int:
        return self._count

    def add(self, source: str, close: Callable[[], None]) -> bool:
        """Add a connection from address `source`; return False if it is not allowed.

        `close` closes the connection and leads to `remove`.
        """
        if not self._rate(source):
            return False
        victim = None
        if self._count >= self._cap:
            most = max(map(len, self._networks.values()))
            busiest = self._rng.choice([one for one in self._networks.values() if len(one) == most])
            victim = self._rng.choice([*busiest])
        self._networks.setdefault(_network(source), {})[close] = None
        self._count += 1
        if victim is not None:
            victim()
        return True

    def may_begin(self, source: str) -> bool:
        """Return True if a connection from address `source` may begin its handshake now."""
        return self._handshakes(_network(source))

    def remove(self, source: str, close: Callable[[], None]) -> None:
        """Remove a connection that has authenticated or closed."""
        connections = self._networks.get(_network(source), {})
        if close in connections:
            del connections[close]
            self._count -= 1
            if not connections:
                del self._networks[_network(source)]

    def clear(self) -> None:
        """Close all connections."""
        for connections in list(self._networks.values()):
            for close in list(connections):
                close()


@lru_cache(maxsize=8192)
def _network(source: str) -> str:
    try:
        return subnet_of(source)
    except ValueError:
        return source


def port_of(endpoint: str) -> int:
    """Return the port of ":port", which means a port at the gate's own host. Raises ValueError."""
    digits = endpoint[1:]
    if endpoint[:1] != ":" or not digits.isascii() or not digits.isdigit() or not 0 < int(digits[:6]) < 65536:
        raise ValueError(f"not an endpoint: {endpoint!r}")
    return int(digits)
