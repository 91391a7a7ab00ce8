"""Testbed of level L2: a network namespace for each peer, with the kernel's TCP. Needs root.

The kernel shapes uplinks (TBF). The network in between is netem on a bridge if the kernel has netem, else a switch in
user space (`tun_switch.py`).

No object has a name: a namespace lives as long as a process in it, here a `cat` that ends with this process. Devices
live in namespaces, or as long as their open file. So nothing remains, even after kill -9.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from thinwire.sims.network.toxics import Toxics
from thinwire.sims.processes.testbed import EmulationError, Site, Unplayable
from thinwire.sims.processes.tun_switch import TunSwitch
from thinwire.sims.scenario.scenario import Scenario

TOOLS = ("ip", "tc", "unshare", "nsenter", "cat")
PORT, PORTS = 7400, (7401, 7499)
TUN = Path("/dev/net/tun")

_TUNSETIFF = 0x400454CA
_TUN_NO_HEADER = 0x0001 | 0x1000


def obstacle() -> str:
    """Return what this machine lacks for namespaces; "" if nothing."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    if os.geteuid() != 0:
        return "it needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"it needs the program {missing[0]}"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    if tried.returncode:
        return f"namespaces are not allowed here: {tried.stderr.strip() or tried.returncode}"
    return ""


def has_netem() -> bool:
    """Return True if the kernel has netem; tested in a temporary namespace."""
    command = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(command, capture_output=True).returncode == 0


class NetnsTestbed:
    """Testbed with namespaces, see PeerNetworks. `netem`: None to use it if available."""

    def __init__(self, scenario: Scenario, *, netem: bool | None = None) -> None:
        self._scenario, self._count = scenario, len(scenario.peers)
        self._netem = netem
        self._holders: list[subprocess.Popen[bytes]] = []
        self._devices: list[int] = []
        self._switch: TunSwitch | None = None
        self._lost = 0.0
        self.paths = {(i, j): self._path(i, j) for i in range(self._count) for j in range(self._count) if i != j}
        self.addresses = [f"10.77.{i >> 8}.{(i & 255) + 1}" for i in range(self._count)]

    def _path(self, i: int, j: int) -> Toxics:
        scenario = self._scenario
        sender, receiver = scenario.peers[i], scenario.peers[j]
        latency = scenario.latency(i, j)
        return Toxics(
            latency=latency,
            jitter=scenario.jitter * latency + sender.jitter + receiver.jitter,
            loss=1 - (1 - scenario.loss) * (1 - sender.loss) * (1 - receiver.loss),
            bandwidth=scenario.stream(i, j),
        )

    async def open(self) -> Sequence[Site]:
        if reason := obstacle():
            raise EmulationError(f"--namespaces does not work on this machine: {reason}", "use --real instead")
        try:
            if self._netem is None:
                self._netem = has_netem()
            # One for each peer; with netem, one more for the bridge between them.
            for _ in range(self._count + self._netem):
                self._holders.append(_holder())
            if self._netem:
                self._create_bridge()
            else:
                self._create_tun()
        except (OSError, subprocess.SubprocessError) as error:
            await self.close()
            reason = getattr(error, "stderr", "") or getattr(error, "strerror", "") or str(error)
            raise EmulationError(f"cannot make the namespaces: {reason}", "use --real, which needs none") from None
        return [
            Site(address, PORT, PORTS, f"{address}:{PORT}", ("nsenter", f"--net=/proc/{holder.pid}/ns/net"))
            for address, holder in zip(self.addresses, self._holders, strict=False)
        ]

    def _create_tun(self) -> None:
        for i, address in enumerate(self.addresses):
            device, name = _tun(self._holders[i].pid)
            self._devices.append(device)
            _batch(
                self._holders[i].pid,
                ["link set lo up", f"addr add {address}/16 dev {name}", f"link set {name} mtu 1500 txqueuelen 200 up"],
            )
            rate = int(self._scenario.peers[i].up * 8)
            _tc(
                self._holders[i].pid, f"qdisc add dev {name} root tbf rate {rate}bit burst {_burst(rate)} latency 300ms"
            )
        down = [peer.down for peer in self._scenario.peers]
        self._switch = TunSwitch(self.paths, down, self.addresses, self._scenario.seed)
        self._switch.start(self._devices)

    def _create_bridge(self) -> None:
        hub = self._holders[self._count].pid
        _batch(hub, ["link set lo up", "link add hub type bridge", "link set hub up"])
        for i, address in enumerate(self.addresses):
            pid = self._holders[i].pid
            _batch(
                hub,
                [
                    f"link add port{i} type veth peer name eth0 netns {pid}",
                    f"link set port{i} master hub",
                    f"link set port{i} up",
                ],
            )
            _batch(pid, ["link set lo up", f"addr add {address}/16 dev eth0", "link set eth0 up"])
            down = int(self._scenario.peers[i].down * 8)
            _tc(hub, f"qdisc add dev port{i} root tbf rate {down}bit burst {_burst(down)} latency 300ms")
            for line in self.uplink_commands(i):
                _tc(pid, line)

    def uplink_commands(self, i: int) -> Iterator[str]:
        """Yield a class per destination; they share the uplink's rate, and each has its own delay."""
        up = int(self._scenario.peers[i].up * 8)
        share = max(8000, up // self._count)
        yield "qdisc add dev eth0 root handle 1: htb default 2"
        yield f"class add dev eth0 parent 1: classid 1:1 htb rate {up}bit"
        yield f"class add dev eth0 parent 1:1 classid 1:2 htb rate {share}bit ceil {up}bit"
        for j in range(self._count):
            if j != i:
                number = f"{j + 16:x}"
                yield f"class add dev eth0 parent 1:1 classid 1:{number} htb rate {share}bit ceil {up}bit"
                yield f"qdisc add dev eth0 parent 1:{number} handle {number}: {self.netem_of(i, j)}"
                match = f"protocol ip u32 match ip dst {self.addresses[j]}/32"
                yield f"filter add dev eth0 parent 1: {match} flowid 1:{number}"

    def netem_of(self, i: int, j: int) -> str:
        """Return the netem options of the path from host i to host j."""
        path = self.paths[i, j]
        loss = 100.0 if path.held else 100 * path.loss
        options = f"netem limit 20000 delay {path.latency * 1e3:.3f}ms {path.jitter * 1e3:.3f}ms loss {loss:.4f}%"
        return options + (f" rate {int(path.bandwidth * 8)}bit" if path.bandwidth is not None else "")

    def _update(self, i: int, j: int) -> None:
        if self._netem and self._holders:
            number = f"{j + 16:x}"
            line = f"qdisc change dev eth0 parent 1:{number} handle {number}: {self.netem_of(i, j)}"
            _tc(self._holders[i].pid, line)

    def meet(self, processes: Mapping[int, int]) -> None:
        """Do nothing: every peer has a separate address."""

    def hold(self, i: int, j: int) -> None:
        self.paths[i, j].hold()
        self._update(i, j)

    def release(self, i: int, j: int) -> None:
        self.paths[i, j].release()
        self._update(i, j)

    def lose(self, probability: float) -> None:
        for (i, j), path in self.paths.items():
            path.loss = 1 - (1 - self._path(i, j).loss) * (1 - probability)
            self._update(i, j)

    def disturb(self, kind: str, i: int, j: int, seconds: float) -> None:
        raise Unplayable("the kernel handles the connections between namespaces")

    def spoil(self, kind: str, i: int, j: int) -> None:
        raise Unplayable("the kernel drops packets with a false checksum before they reach a connection")

    async def close(self) -> None:
        if self._switch is not None:
            self._switch.stop()
            self._switch = None
        for device in self._devices:
            os.close(device)
        self._devices = []
        for holder in self._holders:
            holder.kill()
        for holder in self._holders:
            await asyncio.to_thread(holder.wait)
        self._holders = []


def _holder() -> subprocess.Popen[bytes]:
    """Start a process in a new namespace that ends with this process.

    Raises OSError, subprocess.SubprocessError.
    """
    holder = subprocess.Popen(
        ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdin.write(b"!")
    holder.stdin.flush()
    if holder.stdout.read(1) != b"!":  # The echo of cat comes from inside the namespace.
        raise subprocess.SubprocessError("a namespace did not start")
    return holder


def _batch(pid: int, lines: Sequence[str]) -> None:
    _run(["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-"], "\n".join(lines))


def _tc(pid: int, line: str) -> None:
    _run(["nsenter", f"--net=/proc/{pid}/ns/net", "tc", *line.split()], "")


def _run(command: Sequence[str], commands: str) -> None:
    subprocess.run(command, input=commands, text=True, capture_output=True, check=True, timeout=30)


def _burst(rate: int) -> str:
    """Return the bytes of a token bucket: those of 10 ms, a tick of a slow kernel; at least four packets."""
    return str(max(6000, rate // 8 // 100))


def _tun(pid: int) -> tuple[int, str]:
    """Create a TUN device in the namespace of a process; return descriptor and name. Raises OSError."""
    device = os.open(TUN, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # The kernel replaces %d by a number: the device starts in our namespace, which may have others.
        answer = fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"twtun%d", _TUN_NO_HEADER))
        name = answer[:16].rstrip(b"\0").decode()
        _run(["ip", "link", "set", name, "netns", str(pid)], "")
    except BaseException:
        os.close(device)
        raise
    return device, name
