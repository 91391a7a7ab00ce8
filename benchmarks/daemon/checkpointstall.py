"""Seconds that training waits for a checkpoint: written at once, or begun and written by a task, by turns.

    python -m benchmarks.daemon.checkpointstall                   states of 100 and 400 MB, on the disk of the temporary folder

"save" is `Checkpointer.save`: training waits for hashes, files and syncs. "begin" is `Checkpointer.begin`: training waits
for the copy of the private state in memory only, and `Checkpointer.write` takes "writer" seconds beside it. The state is
parameters and outer momentum; the private state is as large (the moments of Adam).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import numpy as np
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.runtime.environment import Environment
from thinwire.node.state.checkpoint_store import CheckpointStore, Saved, SaveOutcome
from thinwire.node.state.checkpointer import Checkpointer
from thinwire.node.state.layout import Layout, Piece
from thinwire.node.state.replica import Replica
from thinwire.node.state.snapshot import PrivateState
from thinwire.swarm.identity.identity import Identity

from benchmarks.support import machine

PIECES = 16
"""Tensors of the model."""


class Trainer:
    """A peer's state of `mb` MB, with as much private state, and its checkpoints in `folder`."""

    def __init__(self, mb: float, folder: Path) -> None:
        size = int(mb * 1e6) // 8 // PIECES * PIECES
        each = size // PIECES
        pieces = tuple(
            Piece(f"w{index}", (each,), "float32", each * index, each * (index + 1)) for index in range(PIECES)
        )
        self.layout = Layout(pieces, size, blake3.blake3(b"checkpointstall").digest())
        rng = np.random.default_rng(1)
        identity = Identity.generate(bytes(32))
        self.replica = Replica(self.layout.digest, rng.standard_normal(size, np.float32), (identity.peer_id,))
        moments = {
            f"{name}/w{index}": rng.standard_normal(each, np.float32) for name in "mv" for index in range(PIECES)
        }
        self.private = PrivateState(moments, {"step": 1})
        environment = Environment(
            time.monotonic, time.time, random.Random(1), RealDisk(), asyncio.to_thread, asyncio.to_thread
        )
        store = CheckpointStore(folder, RealDisk(), identity)
        self._checkpointer = Checkpointer(store, bytes(32), environment, lambda kind, fields: None)

    def commit(self) -> None:
        """Change the state, so that a checkpoint is due."""
        self.replica.state += np.float32(1e-6)
        self.replica.advance(self.replica.members)

    def save(self) -> tuple[float, float]:
        """Return the seconds that training waits, and 0."""
        return _timed(lambda: self._checked(self._checkpointer.save(self.replica, self.layout, self.private))), 0.0

    def begin(self) -> tuple[float, float]:
        """Return the seconds that training waits, and those of the writer."""
        waited = _timed(lambda: self._checkpointer.begin(self.replica, self.layout, self.private))
        began = time.perf_counter()
        self._checked(asyncio.run(self._checkpointer.write(self.layout)))
        return waited, time.perf_counter() - began

    def _checked(self, outcome: SaveOutcome) -> None:
        if not isinstance(outcome, Saved):
            raise RuntimeError(outcome.reason)


def _timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def compare(mb: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one size by turns."""
    own = machine.family([os.getpid()])
    found: dict[str, list[tuple[float, float, float]]] = {"save": [], "begin": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        trainer = Trainer(mb, Path(folder) / "checkpoints")
        for number in range(options.turns + 1):
            for name, one in (("save", trainer.save), ("begin", trainer.begin)):
                trainer.commit()
                machine.wait_until_quiet(0.1, options.quiet, own)
                load = machine.Load(machine.family([os.getpid()]))
                waited, writer = one()
                foreign = load.foreign()
                if number:
                    found[name].append((waited, writer, foreign))
                print(f"{mb:g} MB {number}: {name} {waited:.4f} s, foreign {foreign:.0%}", file=sys.stderr)
    rows = []
    for name, figures in found.items():
        waited, writer, foreign = (statistics.median(each) for each in zip(*figures, strict=True))
        seconds = [round(each[0], 4) for each in figures]
        row = {
            "mb": mb,
            "kind": name,
            "waited": round(waited, 4),
            "writer": round(writer, 3),
            "foreign": round(foreign, 3),
        }
        rows.append({**row, "all_seconds": seconds})
    return rows


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, nargs="+", default=[100.0, 400.0], help="parameters and outer momentum")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    parser.add_argument("--quiet", type=float, default=0.0, help="seconds to wait for a quiet machine before each turn")
    options = parser.parse_args()
    rows = [row for mb in options.mb for row in compare(mb, options)]
    report = {"machine": machine.describe(), "rows": rows}
    print(f"\n{report['machine']}; medians of {options.turns} turns\n")
    print("| state | kind | training waits s | writer s | foreign CPU |\n|---|---|---|---|---|")
    for row in rows:
        cells = [f"{row['mb']:g} MB", row["kind"], f"{row['waited']:.4f}", row["writer"] or "", f"{row['foreign']:.0%}"]
        print("| " + " | ".join(map(str, cells)) + " |")
    print("\n" + json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
