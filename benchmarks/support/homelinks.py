"""Emulated home links between the processes of a benchmark: network namespaces, as the simulator has them. Needs root."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from thinwire.sims.processes.netns_testbed import NetnsTestbed
from thinwire.sims.processes.testbed import Site
from thinwire.sims.scenario.parser import parse

from benchmarks.support import machine
from benchmarks.support.actors import Actor

SCENARIO = """name = "home-links"
duration = 3600
[[peers]]
name = "home"
count = {peers}
region = "Germany"
up_mbit = {up}
down_mbit = {down}
[links]
rtt_ms = {rtt}
loss = {loss}
"""
SAMPLE_SECONDS = 0.1
PORT = 7500


class HomeLinks:
    """Peers 0…n-1, each with `up` and `down` Mbit/s and `rtt` ms to every other one; `loss`: of packets. Use as a context.

    The switch between them runs in a thread of this process, whose CPU seconds are the emulation's (`machine.Load`).
    """

    def __init__(self, peers: int, up: float, down: float, rtt: float, loss: float = 0.0) -> None:
        fields = dict(peers=peers, up=float(up), down=float(down), rtt=float(rtt), loss=float(loss))
        self._scenario = parse(SCENARIO.format(**fields))
        self._loop = asyncio.new_event_loop()
        self._done = threading.Event()
        self._samples: list[tuple[float, tuple[int, ...]]] = []
        self.sites: Sequence[Site] = ()

    def __enter__(self) -> HomeLinks:
        self._ground = NetnsTestbed(self._scenario)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.sites = asyncio.run_coroutine_threadsafe(self._ground.open(), self._loop).result(60)
        threading.Thread(target=self._sample, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        asyncio.run_coroutine_threadsafe(self._ground.close(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def measured(self) -> str:
        """Measured rates of a link, as text: one stream of 2 MB upwards, and the round trip."""
        host = self.sites[0].host
        ends = []
        try:
            for listens, site in ((True, self.sites[0]), (False, self.sites[1])):
                ends.append(Actor("probe.py", prefix=site.prefix, host=host, port=PORT, listens=listens))
                if listens:
                    ends[0].receive()
            ends[1].say(size=2_000_000)
            measured = ends[1].receive()
        finally:
            for end in ends:
                end.kill()
        return f"one stream {measured['rate'] * 8 / 1e6:.1f} Mbit/s, round trip {measured['trip'] * 1e3:.1f} ms"

    def carried(self) -> tuple[int, ...]:
        """Bytes that each peer has sent, with all headers."""
        return tuple(_sent(int(site.prefix[-1].split("/")[2])) for site in self.sites)

    def carried_at(self, moment: float) -> tuple[int, ...]:
        """The same at a moment of the monotonic clock that is over."""
        found = next((sent for at, sent in self._samples if at >= moment), None)
        return found or self.carried()

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            try:
                self._samples.append((time.monotonic(), self.carried()))
            except (OSError, StopIteration):
                return  # the namespaces are gone

    def load(self) -> machine.Load:
        """CPU time that the emulation uses from now on."""
        return machine.Load([os.getpid()])


def _sent(pid: int) -> int:
    """Bytes out of the one device that is not loopback, in the namespace of a process."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines if line.split(":")[0].strip() != "lo")
