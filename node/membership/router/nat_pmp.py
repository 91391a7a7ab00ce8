"""NAT-PMP (RFC 6886): asks the default gateway for port mappings, in packets of 2 to 16 bytes.

Written here because the packages for it are abandoned. Newer routers speak its successor, see pcp.py.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence

from thinwire.node.membership.router.gateway_requests import PORT, GatewayRouter

ADDRESS, TCP = 0, 2
"""Operation codes: ask for the outside address, map a TCP port."""

_RESULTS = {
    1: "it does not speak this version",
    2: "its owner has switched mappings off",
    3: "it has no connection",
    4: "it has no room for mappings",
    5: "it does not map ports",
}


class NatPmp(GatewayRouter):
    """NAT-PMP with one gateway: "", the default one, or an IPv4 address."""

    name = "NAT-PMP"

    def __init__(self, gateway: str = "", port: int = PORT) -> None:
        super().__init__(gateway, port)
        self._outside = ""

    async def map(self, ports: Sequence[int], seconds: int) -> str:
        answer = await self._question(struct.pack(">BB", 0, ADDRESS), 12)
        self._outside = str(ipaddress.IPv4Address(answer[8:12]))
        return await super().map(ports, seconds)

    async def _set(self, inside: int, outside: int, seconds: int) -> tuple[int, int, str]:
        request = struct.pack(">BBHHHI", 0, TCP, 0, inside, outside, seconds)
        answer = await self._question(request, 16, struct.pack(">H", inside))
        granted, lease = struct.unpack(">HI", answer[10:16])
        return granted, lease, self._outside

    async def _question(self, request: bytes, size: int, about: bytes = b"") -> bytes:
        """Return the answer of `size` bytes to a request. Raises MappingFailed.

        `about`: the bytes that an answer has at its offset 8.
        """

        def judge(data: bytes) -> str | None:
            if len(data) < 2 or data[0] != 0 or data[1] != 128 + request[1]:
                return None
            if len(data) >= 8 and (code := int.from_bytes(data[2:4], "big")):  # An error may be shorter.
                return _RESULTS.get(code, f"result {code}")
            return "" if len(data) == size and data[8 : 8 + len(about)] == about else None

        return await self._ask(lambda host: request, judge)
