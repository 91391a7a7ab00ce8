"""Trace digests of many simulated swarms: proof that a change of the code does not change the behaviour.

    python tests/tools/traces.py > before.txt                # 20 seeds of every family and four shipped scenarios
    python tests/tools/traces.py --check before.txt          # play them again; exit code 1 when a trace differs
    python tests/tools/traces.py --check before.txt --quick  # two seeds of every family, no scenario

Each line is `family seed trace violations`. A trace hashes every frame on the wire, every event and every digest of a run, so
equal traces mean that two versions of the code did the same, bit for bit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path

from thinwire.sims.scenario.parser import load
from thinwire.sims.simulation.world import simulate
from thinwire.sims.trials import families
from thinwire.sims.trials.trial import PACE

SEEDS = 20
SCENARIOS = ("home-fibre-8", "transatlantic-100mbit", "churn-storm", "weak-peers-pipeline")
QUICK = 2
"""Seeds of each family with --quick."""

Job = tuple[str, int]


def play(job: Job) -> str:
    """Play one run; return its line."""
    name, seed = job
    if name in families.FAMILIES:
        run = simulate(families.scenario(name, seed), preset=PACE, stall=families.FAMILIES[name].stall)
    else:
        run = simulate(load(name))
    return f"{name} {seed} {run.trace} {len(run.violations)}"


def jobs(quick: bool) -> list[Job]:
    """The runs to play, the longest first."""
    seeds = QUICK if quick else SEEDS
    found: list[Job] = [] if quick else [(name, 0) for name in SCENARIOS]
    return found + [(name, seed) for name in families.FAMILIES for seed in range(seeds)]


def main(words: Sequence[str]) -> int:
    """Print the lines, or compare them with a file. Exit code 1 when one differs."""
    parser = argparse.ArgumentParser(prog="python tests/tools/traces.py")
    parser.add_argument("--check", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args(words)
    before = {} if given.check is None else {_job(line): line for line in given.check.read_text().splitlines()}
    differ = 0
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        for line in pool.imap(play, jobs(given.quick)):
            if given.check is None:
                print(line, flush=True)
            elif before.get(_job(line)) != line:
                differ += 1
                print(f"before: {before.get(_job(line), 'not played')}\nnow:    {line}", flush=True)
    if given.check is not None:
        print(f"{len(jobs(given.quick))} runs, {differ} differ")
    return bool(differ)


def _job(line: str) -> tuple[str, str]:
    name, seed = line.split()[:2]
    return name, seed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
