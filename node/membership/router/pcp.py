"""PCP (RFC 6887), the successor of NAT-PMP: asks the default gateway for port mappings.

A request has 60 bytes. Gateways that speak only NAT-PMP answer with its version, 0.
"""

from __future__ import annotations

import ipaddress
import secrets
import struct

from thinwire.node.membership.router.gateway_requests import PORT, GatewayRouter

VERSION, MAP, TCP = 2, 1, 6
"""Version of the protocol, operation code of a mapping, number of TCP."""

NONCE_BYTES = 12

SIZE, LONGEST = 60, 1100
"""Bytes of a request and of the smallest answer to it, and of the longest packet."""

_NOWHERE = bytes(10) + b"\xff\xff" + bytes(4)
"""The IPv4 address 0.0.0.0 as an IPv6 address: no address is preferred."""

_RESULTS = {
    1: "it does not speak this version",
    2: "its owner has switched mappings off",
    4: "it does not map ports",
    7: "it has no connection",
    8: "it has no room for mappings",
    9: "it does not map TCP",
    10: "this machine has too many mappings",
    11: "another machine has the port",
    12: "another router is between it and this machine",
}


class Pcp(GatewayRouter):
    """PCP with one gateway: "", the default one, or an IPv4 address."""

    name = "PCP"

    def __init__(self, gateway: str = "", port: int = PORT) -> None:
        super().__init__(gateway, port)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        """Proof that a renewal or a removal comes from us."""

    async def _set(self, inside: int, outside: int, seconds: int) -> tuple[int, int, str]:
        about = self._nonce + struct.pack(">BxxxH", TCP, inside)

        def request(host: str) -> bytes:
            own = _NOWHERE[:12] + ipaddress.IPv4Address(host).packed
            return struct.pack(">BBxxI", VERSION, MAP, seconds) + own + about + struct.pack(">H", outside) + _NOWHERE

        def judge(data: bytes) -> str | None:
            if len(data) >= 4 and data[0] == 0:
                return "it speaks NAT-PMP only"
            if not 24 <= len(data) <= LONGEST or len(data) % 4 or data[:2] != bytes((VERSION, 128 + MAP)):
                return None
            if len(data) >= SIZE and data[24 : 24 + len(about)] != about:
                return None
            if data[3]:  # A gateway that could not read the request may answer without its content.
                return _RESULTS.get(data[3], f"result {data[3]}")
            return "" if len(data) >= SIZE else None

        answer = await self._ask(request, judge)
        address = ipaddress.IPv6Address(answer[44:60])
        granted = int.from_bytes(answer[42:44], "big")
        return granted, int.from_bytes(answer[4:8], "big"), str(address.ipv4_mapped or address)
