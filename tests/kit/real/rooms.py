"""Network namespaces in separate private networks, and a public one that all reach and that forwards nothing. Needs root.

Packets between two private networks are lost without an answer, as between hosts behind two address translators. It
needs no firewall.
"""

from __future__ import annotations

from kit.real.namespaces import Namespaces, ip, run

PUBLIC = "10.79.0.1"


class Rooms(Namespaces):
    """The public namespace (index 0), and `count` private ones. Use with `with`, which removes them."""

    def __init__(self, count: int) -> None:
        super().__init__(0)
        self.addresses = [PUBLIC, *(f"10.79.{room}.2" for room in range(1, count + 1))]

    def __enter__(self) -> Rooms:
        try:
            public = self.hold()
            ip(public, ["link set lo up", f"addr add {PUBLIC}/32 dev lo"])
            run(["nsenter", f"--net=/proc/{public}/ns/net", "sysctl", "-w", "net.ipv4.ip_forward=0"], "")
            for room, address in enumerate(self.addresses[1:], start=1):
                host, gateway = self.hold(), f"10.79.{room}.1"
                link = f"link add port{room} type veth peer name eth0 netns {host}"
                ip(public, [link, f"addr add {gateway}/24 dev port{room}", f"link set port{room} up"])
                up = ["link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"]
                ip(host, [*up, f"route add default via {gateway}"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def network(self, index: int) -> str:
        return super().network(index - 1)
