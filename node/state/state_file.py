"""File with a state that peers read while rounds continue, where memory for a copy is short."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from thinwire.compression.core.types import Floats
from thinwire.node.runtime.disk import ScratchFile
from thinwire.node.runtime.environment import Environment
from thinwire.swarm.messages.registry import CHUNK_BYTES

SECONDS = 10.0
"""Maximum duration of writing a state to a file: the round that changes the state waits for it."""


def write_state(environment: Environment, directory: Path, state: Floats) -> ScratchFile | None:
    """Write a state to a file in the run's directory; return None if a copy in memory is better.

    A copy is better if it leaves at least as much memory as it takes, or if the disk is slow or broken, or would have less room
    left than the file takes.
    """
    if environment.spare() >= 2 * state.nbytes:
        return None
    raw, until = state.view(np.uint8).data, environment.now() + SECONDS
    try:
        file = environment.disk.scratch(directory, 2 * state.nbytes)
        for start in range(0, len(raw), CHUNK_BYTES):
            file.write(raw[start : start + CHUNK_BYTES])
            if environment.now() > until:
                return None
    except OSError:
        return None
    return file
