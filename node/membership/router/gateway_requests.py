"""Requests to the default gateway in single UDP packets, repeated until it answers."""

from __future__ import annotations

import asyncio
import ipaddress
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from thinwire.node.membership.router.port_mapping import MappingFailed

PORT = 5351
"""UDP port at which gateways answer NAT-PMP and PCP."""

WAITS = (0.25, 0.5, 1.0, 2.0)
"""Seconds of each wait for an answer; RFC 6886, section 3.1, has five more."""


class Silent(MappingFailed):
    """No answer came in time; there will be none about other ports either."""


def default_gateway(table: Path = Path("/proc/net/route")) -> str:
    """Return the IPv4 address of the default gateway.

    Raises MappingFailed if there is none, or no such table (only Linux has it).
    """
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        raise MappingFailed("the default gateway is not known on this system") from None
    for fields in map(str.split, lines):
        if len(fields) > 7 and fields[1] == fields[7] == "00000000" and int(fields[3], 16) & 2:
            return str(ipaddress.IPv4Address(int(fields[2], 16).to_bytes(4, "little")))
    raise MappingFailed("this machine has no default gateway")


class _Answers(asyncio.DatagramProtocol):
    """Answers of one gateway; the socket is connected, so the kernel drops what others send."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes] = asyncio.Queue(16)

    def datagram_received(self, data: bytes, addr: object) -> None:
        if not self.queue.full():
            self.queue.put_nowait(data)

    def error_received(self, exc: Exception) -> None:
        if not self.queue.full():
            self.queue.put_nowait(b"")


class GatewayRouter(ABC):
    """Port mappings at one gateway, whose protocol maps one port at a time.

    gateway: its IPv4 address; "": the default gateway. A subclass has the `name` of a protocol, and its request: `_set`.
    """

    name = ""

    def __init__(self, gateway: str = "", port: int = PORT) -> None:
        self._host, self._port = gateway, port
        self._asked: set[int] = set()
        """Ports that may be mapped: the answer to a request can be lost."""
        self._answered = False

    async def map(self, ports: Sequence[int], seconds: int) -> str:
        """Map the ports one after the other; return the outside host. Raises MappingFailed."""
        hosts = set[str]()
        for port in ports:
            self._asked.add(port)
            outside, lease, host = await self._set(port, port, seconds)
            if lease < seconds:
                raise MappingFailed(f"it maps port {port} for {lease} s only, and {seconds} s are needed")
            if outside != port:
                raise MappingFailed(f"it maps port {outside} instead of {port}, which another machine may have")
            hosts.add(host)
        if len(hosts) > 1:
            raise MappingFailed("the ports have several outside addresses")
        return hosts.pop()

    async def unmap(self, ports: Sequence[int]) -> None:
        """Remove the mappings of these ports, as far as they may exist. Raises MappingFailed."""
        if not self._answered:
            return  # It does not speak this protocol; at worst the mappings end by themselves.
        failure: MappingFailed | None = None
        for port in sorted(self._asked.intersection(ports)):
            try:
                await self._set(port, 0, 0)
                self._asked.discard(port)
            except Silent:
                raise
            except MappingFailed as error:
                failure = error
        if failure is not None:
            raise failure

    @abstractmethod
    async def _set(self, inside: int, outside: int, seconds: int) -> tuple[int, int, str]:
        """Map a port for some seconds, or remove its mapping with 0.

        Return the outside port, the seconds and the outside host. Raises MappingFailed.
        """

    async def _ask(self, request: Callable[[str], bytes], judge: Callable[[bytes], str | None]) -> bytes:
        """Send a request until an answer comes; return that. Raises MappingFailed.

        `request`: returns the packet, given our own address. `judge`: returns "" for an answer that grants the request, the
        reason of a refusal, and None for any other packet.
        """
        loop, host = asyncio.get_running_loop(), self._host or default_gateway()
        try:
            transport, answers = await loop.create_datagram_endpoint(_Answers, remote_addr=(host, self._port))
        except OSError as error:
            raise MappingFailed(f"{host}: {error.strerror or error}") from None
        try:
            packet = request(transport.get_extra_info("sockname")[0])
            for wait in WAITS:
                transport.sendto(packet)
                try:
                    async with asyncio.timeout(wait):
                        while (fault := judge(data := await answers.queue.get())) is None and data:
                            pass
                except TimeoutError:
                    continue
                if not data:
                    raise MappingFailed(f"{host} does not speak it")
                self._answered = True
                if fault:
                    raise MappingFailed(f"{host}: {fault}")
                return data
        finally:
            transport.close()
        raise Silent(f"{host} does not answer")
