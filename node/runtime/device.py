"""Devices for training, and the memory that they and the machine have.

Imports torch only inside functions, so that the command line starts quickly.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from thinwire.swarm.identity.errors import HintedError


class DeviceError(HintedError):
    """The requested device is not in this machine; the hint names the available ones."""

    exit_code: ClassVar[int] = 3


def devices() -> list[str]:
    """Return the available devices, as torch names them."""
    import torch

    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def choose_device(wanted: str) -> str:
    """Resolve "auto", "cpu", "cuda" or "cuda:N" to an available device. Raises DeviceError."""
    if wanted == "cpu":
        return "cpu"
    there = devices()
    if wanted == "auto":
        return there[1] if len(there) > 1 else "cpu"
    name = "cuda:0" if wanted == "cuda" else wanted
    if name not in there:
        raise DeviceError(
            f"this machine has no device {wanted}", f"available: {', '.join(there)}; choose with --device"
        )
    return name


def memory_of_process(device: str) -> tuple[int, int]:
    """Return the bytes of main memory that this process occupies, and those that it has reserved on a GPU."""
    import psutil

    reserved = 0
    if device.startswith("cuda"):
        import torch

        reserved = torch.cuda.memory_reserved(device)
    return psutil.Process().memory_info().rss, reserved


def return_freed_memory() -> None:
    """Return the memory that was freed to the system (glibc only).

    The C library retains freed pieces of up to 32 MiB, separately for each thread. After steps in two threads it would retain
    the memory of all gradients twice.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


CGROUPS = Path("/sys/fs/cgroup")
"""Limits of groups of processes, such as a container or a service (Linux, cgroup version 2)."""


def spare_memory(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes of memory that the machine has left, or this process's groups if they have fewer.

    Files that the system caches count as left, unless they are in use. own: the file that names our group.
    """
    import psutil

    spare = int(psutil.virtual_memory().available)
    return min([spare, *(_left(group, spare) for group in _groups(cgroups, own))])


def whole_memory(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes of memory and swap of the machine, or those that our groups may have, used or not."""
    import psutil

    memory, swap = int(psutil.virtual_memory().total), int(psutil.swap_memory().total)
    return swap + min([memory, *(_limit(group, memory) for group in _groups(cgroups, own))])


def _groups(cgroups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of our group and those around it."""
    try:
        named = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    group = cgroups / named.strip("/")
    while group.is_relative_to(cgroups):
        yield group
        group = group.parent


def _limit(cgroup: Path, none: int) -> int:
    """Return the bytes that a group may use, `none` if it has no limit."""
    try:
        return min(none, int((cgroup / "memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return none


def _left(cgroup: Path, spare: int) -> int:
    """Return the bytes that a group has left, `spare` if it has no limit."""
    try:
        limit, used, stat = ((cgroup / f"memory.{name}").read_text().strip() for name in ("max", "current", "stat"))
        cached = int(dict(line.split() for line in stat.splitlines()).get("inactive_file", 0))
        return max(0, int(limit) - int(used) + cached)
    except (OSError, ValueError):  # no such file, or "max"
        return spare
