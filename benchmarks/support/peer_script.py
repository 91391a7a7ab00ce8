"""Scripts of benchmarks/peers: their folder, and the environment in which they find the modules of benchmarks."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with the root of the repository on Python's path, and with changes.

    Other interpreters, such as those of the environments of torchft and hivemind, import benchmarks from there.
    """
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | changes
