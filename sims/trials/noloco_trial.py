"""Trial for runs of pairs and groups (NoLoCo), like trial.py for runs with one common average.

    python -m thinwire.sims.trials.noloco_trial 17           # run a seed, and shrink its faults if it fails
    python -m thinwire.sims.trials.noloco_trial 0 200        # seeds 0 to 199

A seed has the same peers, links and faults as in `trial.py`, and another manifest.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace

from thinwire.collectives.gossip.owner_group import MESH
from thinwire.collectives.topology.shards import MIN_CHUNK
from thinwire.sims.scenario.scenario import Scenario
from thinwire.sims.trials.driver import FailedSeed, examine
from thinwire.sims.trials.trial import PACE, PARAMETERS, STALL, trial

PEERS = 16

MANIFEST = """
[run]
name = "trial-of-pairs"
[outer]
method = "noloco"
sync_every = 4
gamma = {gamma}
slow_weight_parts = {parts}
[exchange]
codec = "{codec}"
gossip_group_size = {group}
max_weight = 100000
"""

CODECS = ("fp32", "int8(block=256)", "int8(block=64)", "topk(k=64,chunk=4096)|2bit|rice")
"""The first one is exact: with it, γ = β and one part, peers send one vector, otherwise two."""

GAMMAS = (0.7, 0.4)

GROUPS = (2, 2, 3, 4, 9)
"""Sizes of gossip groups; in the largest, chunks have owners."""

SIZES = {1: PARAMETERS, 2: 3 * MIN_CHUNK, 4: 5 * MIN_CHUNK + 100}
"""Parameters by the number of parts of the slow weights: parts of a few chunks, of which one has more."""

PARTS = tuple(SIZES)


def parameters(group: int, parts: int) -> int:
    """Return the number of parameters; in groups whose chunks have owners there are several chunks."""
    return max(SIZES[parts], SIZES[2] if group > MESH else 0)


def trial_of_pairs(seed: int, peers: int = PEERS) -> Scenario:
    """Return the scenario of a seed."""
    rng = random.Random(f"pairs/{seed}")
    codec, gamma, group, parts = rng.choice(CODECS), rng.choice(GAMMAS), rng.choice(GROUPS), rng.choice(PARTS)
    manifest = MANIFEST.format(codec=codec, gamma=gamma, group=group, parts=parts)
    return replace(trial(seed, peers), name="trial-of-pairs", manifest=manifest, parameters=parameters(group, parts))


def command(seed: int) -> str:
    """Return the command that repeats a failed seed."""
    return f"python -m thinwire.sims.trials.noloco_trial {seed}"


def check(seed: int, *, shrink: bool = True) -> FailedSeed | None:
    """Run one seed; return None without a violation."""
    return examine(trial_of_pairs(seed), preset=PACE, stall=STALL, shrink=shrink, command=command)


def main(arguments: Sequence[str]) -> int:
    """Run the given seeds: one, or from the first to below the second. Exit code 1 if one fails."""
    first = int(arguments[0])
    seeds = range(first, int(arguments[1]) if len(arguments) > 1 else first + 1)
    failed = [found for seed in seeds if (found := check(seed)) is not None]
    for found in failed:
        print(found.text)
    print(f"{len(seeds)} seeds, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
