"""Description and load of this machine: a figure from a busy machine is marked as such."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")


def describe() -> str:
    """Processor, cores, system."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    return f"{model or platform.processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def busy() -> float:
    """CPU seconds that all of the machine has spent since it started, what the host took away included."""
    user, nice, system, _, _, interrupt, soft, steal = (int(x) for x in _lines("/proc/stat")[0].split()[1:9])
    return (user + nice + system + interrupt + soft + steal) / TICKS


def family(roots: Iterable[int]) -> list[int]:
    """Processes and all that descend from them."""
    parents: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        if stat := _lines(f"/proc/{entry}/stat"):
            parents.setdefault(int(stat[0].rpartition(")")[2].split()[1]), []).append(int(entry))
    found = list(roots)
    for pid in found:
        found += parents.get(pid, [])
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU seconds of processes with all their threads, to the nanosecond."""
    total = 0
    for pid in pids:
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for thread in threads:
            if line := _lines(f"/proc/{pid}/task/{thread}/schedstat"):
                total += int(line[0].split()[0])
    return total / 1e9


class Load:
    """CPU seconds from now on: of these processes, and what share of the machine all others use."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self._began, self._busy, self._own = time.monotonic(), busy(), cpu_seconds(self._pids)

    def spent(self) -> float:
        """CPU seconds of the processes, those that have ended left out."""
        return cpu_seconds(self._pids) - self._own

    def foreign(self) -> float:
        """0 to 1."""
        cores = (os.cpu_count() or 1) * (time.monotonic() - self._began)
        return max(0.0, busy() - self._busy - self.spent()) / cores


class Memory(NamedTuple):
    """Bytes of memory of a process: resident now, the peak of resident ones since `forget_peak`, and swapped out now."""

    resident: int
    peak: int
    swapped: int


def memory(pid: int) -> Memory:
    """Return the memory of a process; zeros if it has ended."""
    found = dict(line.split(":", 1) for line in _lines(f"/proc/{pid}/status") if line.startswith("Vm"))
    return Memory(*(int(found.get(name, "0").split()[0]) << 10 for name in ("VmRSS", "VmHWM", "VmSwap")))


def forget_peak(pid: int) -> None:
    """The peak of `memory` counts from here on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def wait_until_quiet(limit: float, patience: float, own: Iterable[int] = ()) -> float:
    """Wait until others use less than `limit` of all cores, at most `patience` seconds; the share they use now."""
    end, own = time.monotonic() + patience, list(own)
    while True:
        before, mine, since = busy(), cpu_seconds(own), time.monotonic()
        time.sleep(0.5)
        cores = (os.cpu_count() or 1) * (time.monotonic() - since)
        share = max(0.0, busy() - before - (cpu_seconds(own) - mine)) / cores
        if share < limit or time.monotonic() > end:
            return share


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
