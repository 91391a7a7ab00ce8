"""Churn of six real daemons, with the figures and all violations of one history.

    PYTHONPATH=tests python tests/tools/one_history.py --seconds 600 --seed 1

Kills, stops and restarts daemons for this time, then waits until all have one digest. Exit code 1 if a round has two
digests, all never have one, or a daemon ends by itself; exceeded time bounds only are printed, because they depend on
the machine. `--keep FOLDER`: keep the homes of the daemons, with their logs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kit.daemons import Machine
from kit.real.churn import EVERY, ONE_DIGEST, Churn, Figures

STEPS, GRACE = 60, 2.0
"""Inner steps of a round (it takes 0.3 to 1 s), and how long a round waits for a late member."""


def churned(
    path: Path, *, seconds: float, seed: int, every: float = EVERY, say: Callable[[str], object] = lambda text: None
) -> Figures:
    """Return the figures of a run in this folder."""
    # A lost home is a lost key, and in the end no key might be left that may invite: all keys are admitted.
    # Half of the members may be down at a time, which quorums above two thirds do not survive without a lineage.
    open_run = "quorum = 0.5\n[admission]\nmode = 'open'\ntrial_rounds = 0"
    machine = Machine(path, steps=STEPS, grace=GRACE, seed=seed, exchange=open_run)
    try:
        churn = Churn(machine, seed, every=every, say=say)
        churn.begin()
        churn.play(seconds)
        churn.settle(6 * ONE_DIGEST)
        return churn.figures()
    finally:
        machine.end()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=EVERY, help="mean time between two faults")
    parser.add_argument("--keep", type=Path)
    os.environ["THINWIRE_PORT"] = "0"  # of the daemons, which share this machine
    wanted = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="one-history-") as folder:
        path = wanted.keep or Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        found = churned(
            path / "swarm",
            seconds=wanted.seconds,
            seed=wanted.seed,
            every=wanted.every,
            say=lambda text: print(text, flush=True),
        )
    print(found)
    return 1 if found.violations else 0


if __name__ == "__main__":
    sys.exit(main())
