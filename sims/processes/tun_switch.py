"""Switch between TUN devices in user space, for kernels without netem, which cannot delay.

Every peer's device sends its packets here. A packet is dropped where the link is cut or by chance, waits for its
latency, then for the receiver's downlink, and is written to the receiver's device. TCP is the kernel's own.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import random
from collections.abc import Mapping

from thinwire.sims.network.toxics import Toxics

BUFFER_SECONDS = 0.5
"""Maximum seconds that packets wait for a downlink before the next one is dropped."""

_PACKET = 65_536
_TURN = 64
"""Packets that are taken from one device before the others have their turn."""


class TunSwitch:
    """`paths`: (i, j) -> faults of the link. `down`: bytes/s of each downlink. `addresses`: IPv4 by peer."""

    def __init__(
        self, paths: Mapping[tuple[int, int], Toxics], down: list[float], addresses: list[str], seed: int
    ) -> None:
        self._paths, self._down = paths, down
        self._index_of = {bytes(int(part) for part in address.split(".")): i for i, address in enumerate(addresses)}
        self._devices: list[int] = []
        self._rng = random.Random(seed)
        self._last: dict[tuple[int, int], float] = {}
        self._free = [0.0] * len(down)
        self._sent: dict[tuple[int, int], float] = {}
        self._heap: list[tuple[float, int, int, bool, bytes]] = []
        self._number = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self.dropped = 0

    def start(self, devices: list[int]) -> None:
        """Switch between open, non-blocking devices (descriptors, by index of the peer)."""
        self._devices = devices
        for i, device in enumerate(devices):
            asyncio.get_running_loop().add_reader(device, self._read, i)

    def stop(self) -> None:
        """Leave the devices alone; they stay open."""
        for device in self._devices:
            asyncio.get_running_loop().remove_reader(device)
        if self._timer is not None:
            self._timer.cancel()
        self._devices = []

    def _read(self, i: int) -> None:
        now = asyncio.get_running_loop().time()
        for _ in range(_TURN):
            try:
                packet = os.read(self._devices[i], _PACKET)
            except OSError:
                break
            # IPv4 only: the destination is at a fixed place.
            j = self._index_of.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if j is not None and j != i:
                self._depart(i, j, packet, now)
        self._wake()

    def _depart(self, i: int, j: int, packet: bytes, now: float) -> None:
        path = self._paths[i, j]
        if path.held or (path.loss and self._rng.random() < path.loss):
            self.dropped += 1
            return
        due = now + path.latency + (self._rng.expovariate(1 / path.jitter) if path.jitter else 0.0)
        if path.bandwidth is not None:
            # The limit of one connection, applied to all connections from i to j together.
            sent = max(self._sent.get((i, j), 0.0), now) + len(packet) / path.bandwidth
            if sent > now + BUFFER_SECONDS:
                self.dropped += 1
                return
            self._sent[i, j] = sent
            due += sent - now
        # The internet seldom reorders within a flow, and TCP takes it for loss.
        due = self._last[i, j] = max(due, self._last.get((i, j), 0.0))
        heapq.heappush(self._heap, (due, next(self._number), j, False, packet))

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            self._timer = asyncio.get_running_loop().call_at(self._heap[0][0], self._deliver)

    def _deliver(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._heap and self._heap[0][0] <= now:
            due, _, j, passed, packet = heapq.heappop(self._heap)
            if not passed:
                done = max(self._free[j], due) + len(packet) / self._down[j]
                if done > now + BUFFER_SECONDS:
                    self.dropped += 1
                    continue
                self._free[j] = done
                heapq.heappush(self._heap, (done, next(self._number), j, True, packet))
                continue
            try:
                os.write(self._devices[j], packet)
            except OSError:
                self.dropped += 1  # The queue of the device is full, or the device is closed.
        self._timer = None
        self._wake()
