"""Network namespaces behind address translators (nftables), beside public ones. Needs root on Linux.

A router has one outside address on a bridge, and one host behind it. Its kinds are those of RFC 4787: "cone" keeps the
source port of a connection and forwards the ports in PORTS to the host; "symmetric" draws a new port for every
connection and forwards nothing. A "mapping" one is a cone that forwards what `serve` maps.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from kit.real.namespaces import Namespaces, ip, run

Kind = Literal["public", "cone", "symmetric", "mapping"]
PORTS = "7400-7499"
ROUTER = str(Path(__file__).parents[1] / "programs" / "router.py")
INSIDE, GATEWAY = "192.168.0.5", "192.168.0.1"
"""Addresses of each host behind a router, and of the router's inner side; all private networks are alike."""

_TABLE = """
add table ip nat
add chain ip nat after {{ type nat hook postrouting priority 100; }}
add chain ip nat before {{ type nat hook prerouting priority -100; }}
add rule ip nat after oifname "eth0" masquerade{how}
{forward}
"""


class Translators(Namespaces):
    """One namespace for each kind, on one bridge or behind a router on it. Use with `with`, which removes them.

    `outside`: address of each on the bridge, in separate /24 subnets; `addresses`: address that each listens on.
    """

    def __init__(self, kinds: Sequence[Kind]) -> None:
        super().__init__(0)
        self.kinds = kinds
        self.programs: list[subprocess.Popen[str]] = []
        self.routers: dict[int, int] = {}
        """Index of a host -> process in its router's namespace."""
        self.outside = [f"45.{index + 1}.1.1" for index in range(len(kinds))]
        self.addresses = [
            address if kind == "public" else INSIDE for address, kind in zip(self.outside, kinds, strict=True)
        ]

    def __enter__(self) -> Translators:
        try:
            hub = self.hold()
            ip(hub, ["link set lo up", "link add hub type bridge", "link set hub up"])
            hosts = [self.hold() for _ in self.kinds]  # `inside` counts on this order
            for index, (kind, host) in enumerate(zip(self.kinds, hosts, strict=True)):
                edge = host if kind == "public" else self.hold()
                port = f"port{index}"
                link = f"link add {port} type veth peer name eth0 netns {edge}"
                ip(hub, [link, f"link set {port} master hub", f"link set {port} up"])
                ip(edge, ["link set lo up", f"addr add {self.outside[index]}/8 dev eth0", "link set eth0 up"])
                if kind != "public":
                    self.routers[index] = edge
                    self._route(edge, host, kind)
        except BaseException:
            self.__exit__()
            raise
        return self

    def serve(self, index: int, *words: str) -> subprocess.Popen[str]:
        """Run the program of the router of a host (tests/kit/programs/router.py); it ends with the namespaces."""
        enter = ["nsenter", f"--net=/proc/{self.routers[index]}/ns/net", sys.executable, ROUTER]
        self.programs.append(
            subprocess.Popen([*enter, GATEWAY, self.outside[index], *words], stdout=subprocess.PIPE, text=True)
        )
        assert self.programs[-1].stdout.readline().startswith("listening")
        return self.programs[-1]

    def __exit__(self, *error: object) -> None:
        for program in self.programs:
            program.kill()
            program.wait()
        self.programs = []
        super().__exit__(*error)

    def _route(self, router: int, host: int, kind: Kind) -> None:
        ip(
            router,
            [
                f"link add eth1 type veth peer name eth0 netns {host}",
                f"addr add {GATEWAY}/24 dev eth1",
                "link set eth1 up",
            ],
        )
        up = ["link set lo up", f"addr add {INSIDE}/24 dev eth0", "link set eth0 up"]
        ip(host, [*up, f"route add default via {GATEWAY}"])
        enter = ["nsenter", f"--net=/proc/{router}/ns/net"]
        run([*enter, "sysctl", "-w", "net.ipv4.ip_forward=1"], "")
        forward = f'add rule ip nat before iifname "eth0" tcp dport {PORTS} dnat to {INSIDE}' if kind == "cone" else ""
        how = " fully-random" if kind == "symmetric" else ""
        run([*enter, "nft", "-f", "-"], _TABLE.format(how=how, forward=forward))
