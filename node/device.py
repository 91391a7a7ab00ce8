"""Which device computes. Imports torch, so only inside functions: the rest of the command line must not wait for it."""

from __future__ import annotations

from typing import ClassVar

from thinwire.swarm.errors import HintedError


class DeviceError(HintedError):
    """The device asked for is not in this machine; the hint names those that are."""

    exit_code: ClassVar[int] = 3


def devices() -> list[str]:
    """The devices there are, as torch names them."""
    import torch

    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def choose_device(wanted: str) -> str:
    """Resolve "auto", "cpu", "cuda" or "cuda:N" to a device that is there. Raises DeviceError."""
    if wanted == "cpu":
        return "cpu"
    there = devices()
    if wanted == "auto":
        return there[1] if len(there) > 1 else "cpu"
    name = "cuda:0" if wanted == "cuda" else wanted
    if name not in there:
        raise DeviceError(
            f"there is no device {wanted} here", f"devices here: {', '.join(there)}; choose with --device"
        )
    return name
