"""Network namespaces for real daemons, with a firewall (nftables) between them. Needs root on Linux.

No namespace has a name: it lives as long as a process in it, here a `cat` that ends with this process. So nothing remains,
even after kill -9.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence

from thinwire.sims.processes import netns_testbed

REFUSALS = {
    "reset": ("meta l4proto tcp reject with tcp reset", "reject"),
    "prohibit": ("reject with icmp type admin-prohibited",),
    "drop": ("drop",),
}
"""Kind of a cut -> what the firewall does with packets to the other side."""

_TABLE = "add table inet wall\nadd chain inet wall out {{ type filter hook output priority 0; }}\n{rules}\n"


def obstacle() -> str:
    """Return what this machine lacks for namespaces with a firewall; "" if nothing."""
    if reason := netns_testbed.obstacle():
        return reason
    if shutil.which("nft") is None:
        return "it needs the program nft (package nftables)"
    script = "ip link add port0 type veth peer name eth0 && ip link add hub type bridge && nft add table inet wall"
    tried = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True)
    return f"the kernel lacks veth, bridge or nftables: {tried.stderr.strip()}" if tried.returncode else ""


class Namespaces:
    """Namespaces that share one bridge. Use with `with`, which removes them."""

    def __init__(self, count: int) -> None:
        self.addresses = [f"10.78.0.{index + 1}" for index in range(count)]
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Namespaces:
        try:
            hub = self.hold()
            ip(hub, ["link set lo up", "link add hub type bridge", "link set hub up"])
            for index, address in enumerate(self.addresses):
                pid = self.hold()
                port = f"port{index}"
                link = f"link add {port} type veth peer name eth0 netns {pid}"
                ip(hub, [link, f"link set {port} master hub", f"link set {port} up"])
                ip(pid, ["link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for holder in self._holders:
            holder.kill()
        for holder in self._holders:
            holder.wait()
        self._holders = []

    def hold(self) -> int:
        """Start a process in a new namespace, and return its id."""
        holder = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._holders.append(holder)
        holder.stdin.write(b"!")
        holder.stdin.flush()
        assert holder.stdout.read(1) == b"!"  # The echo comes from inside the namespace.
        return holder.pid

    def network(self, index: int) -> str:
        """Return the file that names a namespace."""
        return f"/proc/{self._holders[index + 1].pid}/ns/net"

    def inside(self, index: int) -> tuple[str, ...]:
        """Return the beginning of a command that runs in a namespace."""
        return ("nsenter", f"--net={self.network(index)}")

    def cut(self, side: Iterable[int], kind: str) -> None:
        """Let no packet pass between the namespaces of `side` and all others. `kind`: a key of REFUSALS."""
        inner = set(side)
        for index in range(len(self.addresses)):
            others = [i for i in range(len(self.addresses)) if (i in inner) != (index in inner)]
            self._apply(index, [self.addresses[i] for i in others], REFUSALS[kind])

    def _apply(self, index: int, others: Sequence[str], verdicts: Sequence[str]) -> None:
        targets = ", ".join(others)
        rules = "\n".join(f"add rule inet wall out ip daddr {{ {targets} }} {verdict}" for verdict in verdicts)
        self._nft(index, "add table inet wall\ndelete table inet wall\n" + _TABLE.format(rules=rules))

    def heal(self) -> None:
        """Let all packets pass."""
        for index in range(len(self.addresses)):
            self._nft(index, "add table inet wall\ndelete table inet wall\n")

    def _nft(self, index: int, script: str) -> None:
        run([*self.inside(index), "nft", "-f", "-"], script)


def ip(pid: int, lines: Sequence[str]) -> None:
    run(["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-"], "\n".join(lines))


def run(command: Sequence[str], told: str) -> None:
    subprocess.run(command, input=told, text=True, capture_output=True, check=True, timeout=30)
