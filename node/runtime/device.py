"""Choice of the compute device.

Imports torch only inside functions, so that the command line starts quickly.
"""

from __future__ import annotations

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
