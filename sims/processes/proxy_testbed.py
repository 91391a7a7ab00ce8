"""Testbed of level L1: daemons on 127.x.y.z, each connection through a shaped proxy. Needs no root.

Peers listen at secret addresses and advertise those of the proxy. The proxy asks the system which process owns a
dialling socket, because on loopback all connections come from one address.
"""

from __future__ import annotations

import os
import random
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from thinwire.sims.processes.proxy import Proxy, ProxyAccessLink
from thinwire.sims.processes.testbed import EmulationError, Site
from thinwire.sims.scenario.scenario import Scenario

SPARE_PORTS = 24
"""Ports of a peer beside its gate: one for bulk data, the others for members that are being connected."""

_TRIES = 20


class ProxyTestbed:
    """Testbed with proxies, see PeerNetworks. `scenario` defines the links."""

    def __init__(self, scenario: Scenario) -> None:
        self._peers = scenario.peers
        self.proxy = Proxy([ProxyAccessLink(peer.up, peer.down) for peer in scenario.peers], seed=scenario.seed)
        self._processes: dict[int, int] = {}
        self._loss: dict[tuple[int, int], float] = {}
        for i, sender in enumerate(scenario.peers):
            for j, receiver in enumerate(scenario.peers):
                if i == j:
                    continue
                path = self.proxy.path(i, j)
                path.latency, path.bandwidth = scenario.latency(i, j), scenario.stream(i, j)
                path.jitter = scenario.jitter * path.latency + sender.jitter + receiver.jitter
                path.loss = 1 - (1 - scenario.loss) * (1 - sender.loss) * (1 - receiver.loss)
                self._loss[i, j] = path.loss

    async def open(self) -> Sequence[Site]:
        if not sys.platform.startswith("linux"):
            raise EmulationError("--real needs Linux", "its loopback has the many addresses that this takes")
        _allow_descriptors(len(self._peers) * (SPARE_PORTS + 2 + 8 * len(self._peers)))
        reason = ""
        for _ in range(_TRIES):
            network, port = random.SystemRandom().randrange(16, 240), random.SystemRandom().randrange(20_000, 30_000)
            sites = []
            try:
                for i in range(len(self._peers)):
                    real, shown = f"127.{network}.1.{i + 1}", f"127.{network}.2.{i + 1}"
                    await self.proxy.reach(self._find_dialler, i, shown, real, range(port, port + SPARE_PORTS + 1))
                    sites.append(Site(real, port, (port + 1, port + SPARE_PORTS), f"{shown}:{port}"))
            except OSError as error:
                reason = error.strerror or str(error)
                await self.proxy.close()
                continue
            return sites
        raise EmulationError(f"cannot open the proxies: {reason}", "raise the limit of open files, `ulimit -n`")

    def meet(self, processes: Mapping[int, int]) -> None:
        self._processes = {process: peer for peer, process in processes.items()}

    def hold(self, i: int, j: int) -> None:
        self.proxy.path(i, j).hold()

    def release(self, i: int, j: int) -> None:
        self.proxy.path(i, j).release()

    def lose(self, probability: float) -> None:
        for (i, j), usual in self._loss.items():
            self.proxy.path(i, j).loss = 1 - (1 - usual) * (1 - probability)

    def disturb(self, kind: str, i: int, j: int, seconds: float) -> None:
        for one in self.proxy.between(i, j):
            match kind:
                case "half-open":
                    one.half_open(j, seconds)
                case "slow-close":
                    one.slow_close(seconds)
                case _:
                    one.reset()

    def spoil(self, kind: str, i: int, j: int) -> None:
        for pair in ((i, j), (j, i)):
            self.proxy.path(*pair).spoil = kind

    async def close(self) -> None:
        await self.proxy.close()

    def _find_dialler(self, address: tuple[str, int]) -> int | None:
        socket = _socket_at(address)
        owner = next((process for process in self._processes if socket and socket in _sockets(process)), None)
        return None if owner is None else self._processes[owner]


def _socket_at(address: tuple[str, int]) -> str | None:
    """Return the name in /proc of the TCP socket that is bound to `address`; None without one."""
    host, port = address[0], address[1]
    wanted = bytes(reversed([int(part) for part in host.split(".")])).hex().upper() + f":{port:04X}"
    with open("/proc/net/tcp", encoding="ascii") as table:
        for line in table:
            fields = line.split()
            if fields[1] == wanted:
                return f"socket:[{fields[9]}]"
    return None


def _sockets(process: int) -> set[str]:
    """Return the names in /proc of all sockets of a process."""
    found = set()
    try:
        for entry in os.scandir(Path("/proc", str(process), "fd")):
            try:
                found.add(os.readlink(entry.path))
            except OSError:
                continue  # Closed meanwhile.
    except OSError:
        pass  # The process has ended.
    return found


def _allow_descriptors(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        top = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, top), hard))
