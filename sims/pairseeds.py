"""The trial for runs of pairs and groups (NoLoCo): what seeds.py is for runs in which all average together.

    python -m thinwire.sims.pairseeds 17           # run a seed, and shrink what it needs when it fails
    python -m thinwire.sims.pairseeds 0 200        # seeds 0 to 199

A seed has the peers, links and faults that it has there, and a manifest of its own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace

from thinwire.sims.driver import Finding, examine
from thinwire.sims.faults import Fault
from thinwire.sims.scenario import Scenario
from thinwire.sims.seeds import PACE, STALL, trial

PEERS = 16

_MANIFEST = """
[run]
name = "trial-of-pairs"
[outer]
method = "noloco"
steps = 4
gamma = {gamma}
[exchange]
codec = "{codec}"
group = {group}
max_weight = 100000
"""

CODECS = ("fp32", "int8(block=256)", "int8(block=64)")
"""The first is exact: with γ = β one vector travels, otherwise two."""

GAMMAS = (0.7, 0.4)

GROUPS = (2, 2, 3, 4)
"""Peers that average with each other."""


def trial_of_pairs(seed: int, peers: int = PEERS) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(f"pairs/{seed}")
    manifest = _MANIFEST.format(codec=rng.choice(CODECS), gamma=rng.choice(GAMMAS), group=rng.choice(GROUPS))
    return replace(trial(seed, peers), name="trial-of-pairs", manifest=manifest)


def command(seed: int, faults: Sequence[Fault] | None = None) -> str:
    """What to type to see a seed fail again."""
    return f"python -m thinwire.sims.pairseeds {seed}"


def check(seed: int, *, shrink: bool = True) -> Finding | None:
    """Run one seed; None when all is well."""
    return examine(trial_of_pairs(seed), preset=PACE, stall=STALL, shrink=shrink, command=command)


def main(words: Sequence[str]) -> int:
    """Run the seeds that are named: one, or a first and the one after the last. Exit code 1 when one fails."""
    first = int(words[0])
    seeds = range(first, int(words[1]) if len(words) > 1 else first + 1)
    failed = [found for seed in seeds if (found := check(seed)) is not None]
    for found in failed:
        print(found.text)
    print(f"{len(seeds)} seeds, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
