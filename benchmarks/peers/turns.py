"""The peers' end of a benchmark: lines of JSON with the script that runs them (see contest.py)."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE = 1_000_000
"""Elements of the arrays that a payload is made of (the last one is shorter)."""

WIDTH = 1000
"""Of the square layers of a model that is there for its size."""


def blocks(megabytes: float) -> int:
    """Number of these layers in so many MB of fp32; at least one."""
    return max(1, round(megabytes * 1e6 / 4 / (WIDTH * WIDTH + WIDTH)))


def arrays(megabytes: float, seed: int) -> list[NDArray[np.float32]]:
    """A payload of so many MB (10**6 bytes) of normally distributed float32."""
    rng, left, made = np.random.default_rng(seed), int(megabytes * 1e6) // 4, []
    while left:
        made.append(rng.standard_normal(min(left, PIECE), np.float32))
        left -= made[-1].size
    return made


def say(**fields: Any) -> None:
    """Send a line."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def listen() -> dict[str, Any]:
    """The next line. Ends the process at the end of the input."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(0)
    received: dict[str, Any] = json.loads(line)
    return received


def die() -> None:
    """Report the time, and SIGKILL this process."""
    say(dies=time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def until(moment: float) -> None:
    """Sleep until a moment of the monotonic clock, which all processes of a machine share."""
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)
