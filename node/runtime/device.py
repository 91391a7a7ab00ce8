"""Devices for training, and the memory that they and the machine have.

Imports torch only inside functions, so that the command line starts quickly.
"""

from __future__ import annotations

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


CGROUP = Path("/sys/fs/cgroup")
"""Limits of this process's container (Linux, cgroup version 2)."""


def spare_memory(cgroup: Path = CGROUP) -> int:
    """Return the bytes that the machine has left, or those of its container if they are fewer.

    Files that the system caches count as left, unless they are in use.
    """
    import psutil

    spare = int(psutil.virtual_memory().available)
    try:
        limit, used, stat = ((cgroup / f"memory.{name}").read_text().strip() for name in ("max", "current", "stat"))
        cached = int(dict(line.split() for line in stat.splitlines()).get("inactive_file", 0))
        return min(spare, max(0, int(limit) - int(used) + cached))
    except (OSError, ValueError):  # no such file, or "max"
        return spare
