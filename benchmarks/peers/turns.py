"""Messages between the peers of a benchmark and the script that runs them (contest.py): lines of JSON."""

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
"""Elements of each array of a payload; the last array may be shorter."""

WIDTH = 1000
"""Width of the square layers of a model; only the size of this model matters."""


def blocks(megabytes: float) -> int:
    """Return the number of layers of a model with this many MB of fp32; at least one."""
    return max(1, round(megabytes * 1e6 / 4 / (WIDTH * WIDTH + WIDTH)))


def arrays(megabytes: float, seed: int) -> list[NDArray[np.float32]]:
    """Return a payload of this many MB (10**6 bytes): normally distributed float32."""
    rng, left, made = np.random.default_rng(seed), int(megabytes * 1e6) // 4, []
    while left:
        made.append(rng.standard_normal(min(left, PIECE), np.float32))
        left -= made[-1].size
    return made


def say(**fields: Any) -> None:
    """Send one line to the script."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def listen() -> dict[str, Any]:
    """Return the next line of the script. Ends the process at the end of the input."""
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
    """Sleep until this time of the monotonic clock, which all processes of a machine share."""
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)
