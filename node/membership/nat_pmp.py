"""NAT-PMP (RFC 6886): asks the default gateway for port mappings, in packets of 2 to 16 bytes.

Written here because the packages for it are abandoned. Routers that speak only PCP (RFC 6887) answer that they do not
know this version.
"""

from __future__ import annotations

import asyncio
import ipaddress
import struct
from collections.abc import Sequence
from pathlib import Path

from thinwire.node.membership.port_mapping import MappingFailed

PORT = 5351
WAITS = (0.25, 0.5, 1.0, 2.0)
"""Seconds of each wait for an answer; RFC 6886, section 3.1, has five more."""

ADDRESS, TCP = 0, 2
"""Operation codes: ask for the outside address, map a TCP port."""

_RESULTS = {
    1: "it does not speak this version",
    2: "its owner has switched mappings off",
    3: "it has no connection",
    4: "it has no room for mappings",
    5: "it does not map ports",
}


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


class Silent(MappingFailed):
    """No answer came in time; there will be none about other ports either."""


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


class NatPmp:
    """NAT-PMP with one gateway: "", the default one, or an IPv4 address."""

    name = "NAT-PMP"

    def __init__(self, gateway: str = "", port: int = PORT) -> None:
        self._gateway, self._port = gateway, port
        self._asked: set[int] = set()
        """Ports that may be mapped: the answer to a request can be lost."""

    async def map(self, ports: Sequence[int], seconds: int) -> str:
        """Map the ports one after the other; return the outside host. Raises MappingFailed."""
        answer = await self._ask(struct.pack(">BB", 0, ADDRESS), 12)
        for port in ports:
            self._asked.add(port)
            outside = await self._set(port, port, seconds)
            if outside != port:
                raise MappingFailed(f"it maps port {outside} instead of {port}, which another machine may have")
        return str(ipaddress.IPv4Address(answer[8:12]))

    async def unmap(self, ports: Sequence[int]) -> None:
        """Remove the mappings of the ports, those that there are. Raises MappingFailed."""
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

    async def _set(self, inside: int, outside: int, seconds: int) -> int:
        """Map a port for some seconds, or remove its mapping with 0; return the outside port."""
        request = struct.pack(">BBHHHI", 0, TCP, 0, inside, outside, seconds)
        answer = await self._ask(request, 16, struct.pack(">H", inside))
        granted, lease = struct.unpack(">HI", answer[10:16])
        if lease < seconds:
            raise MappingFailed(f"it maps port {inside} for {lease} s only, and {seconds} s are needed")
        return int(granted)

    async def _ask(self, request: bytes, size: int, about: bytes = b"") -> bytes:
        """Send a request until the gateway answers it; return the answer of `size` bytes.

        Raises MappingFailed. `about`: the bytes that an answer has at its offset 8.
        """
        loop, gateway = asyncio.get_running_loop(), self._gateway or default_gateway()
        try:
            transport, answers = await loop.create_datagram_endpoint(_Answers, remote_addr=(gateway, self._port))
        except OSError as error:
            raise MappingFailed(f"{gateway}: {error.strerror or error}") from None
        try:
            for wait in WAITS:
                transport.sendto(request)
                with_answer = await _answer(answers.queue, wait, request[1], size, about)
                if with_answer is None:
                    continue
                if not with_answer:
                    raise MappingFailed(f"{gateway} does not speak it")
                if code := int.from_bytes(with_answer[2:4], "big"):
                    raise MappingFailed(f"{gateway}: {_RESULTS.get(code, f'result {code}')}")
                return with_answer
        finally:
            transport.close()
        raise Silent(f"{gateway} does not answer")


async def _answer(queue: asyncio.Queue[bytes], seconds: float, code: int, size: int, about: bytes) -> bytes | None:
    """Return the first answer to operation `code`.

    b"": nothing listens there; None: no answer comes in time.
    """
    try:
        async with asyncio.timeout(seconds):
            while True:
                data = await queue.get()
                if not data:
                    return b""
                failed = len(data) >= 8 and data[2:4] != b"\0\0"  # An error may be shorter.
                if len(data) < 2 or data[0] != 0 or data[1] != 128 + code:
                    continue
                if failed or (len(data) == size and data[8 : 8 + len(about)] == about):
                    return data
    except TimeoutError:
        return None
