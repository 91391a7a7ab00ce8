"""Trial for every change: many peers, a short run, faults of a few kinds, all from one seed.

    python -m thinwire.sims.trials.trial 17               # run a seed, and shrink its faults if it fails
    python -m thinwire.sims.trials.trial 0 200            # seeds 0 to 199
    python -m thinwire.sims.trials.trial 17 --peers 8     # with fewer peers
    python -m thinwire.sims.trials.trial 17 --ring        # with a ring topology
    python -m thinwire.sims.trials.trial 17 --sparse-butterfly   # with sparse payloads, averaged by owners
    python -m thinwire.sims.trials.trial 17 --family demo # of another outer method or collective, see families.py
    python -m thinwire.sims.trials.trial 0 200 --family all    # each seed with the next family
    python -m thinwire.sims.trials.trial 0 200 --mix harsh     # the same with more and worse faults

The seed determines everything about a run: kinds and number of faults, codec, links.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

from thinwire.collectives.costs.access_links import MBIT
from thinwire.node.peer.peer import OWN_STATE, PATIENCE
from thinwire.sims.network.regions import REGIONS
from thinwire.sims.scenario.faults import KINDS, LIES, QUIET, SEVERE, draw
from thinwire.sims.scenario.scenario import PeerSpec, Scenario
from thinwire.sims.trials import families
from thinwire.sims.trials.driver import FailedSeed, examine
from thinwire.swarm.choices import Topology
from thinwire.swarm.membership.presets import LAN, Preset

PEERS = 50
SECONDS = 25.0
CALM = 10.0
"""Seconds after which no fault is active."""

STALL = 12.0
"""Longest time in seconds without a round while no fault is active."""

PARAMETERS = 1500

PACE: Preset = replace(
    LAN,
    probe_period=0.5,
    ping_min=0.2,
    ping_max=0.45,
    suspicion=2.5,
    gossip_period=0.2,
    push_pull_period=3.0,
    gossip_to_dead=8.0,
    reconnect_period=2.0,
    refute_period=0.2,
    tick=0.2,
)
"""Membership timing that is quick enough for runs of less than a minute."""

MIXED = 4
"""Kinds of faults in one run: few enough that each has an effect."""

CHURN = ("kill", "restart", "pause", "partition", "one-way", "clog", "loss", "half-open", "reset", "liar")
"""Kinds of faults in small runs with rings or sparse butterflies: those that affect the data plane."""

MixName: TypeAlias = Literal["usual", "harsh", "departures"]
"""Faults of a seed of a family: those of `families.churn`, `families.harsh` or `families.departures`."""

_MANIFEST = """
[run]
name = "trial"
[outer]
sync_every = 4
[exchange]
aggregation = "{rule}"
codec = "{codec}"
straggler_timeout = 1.0
max_weight = 100000
topology = "{topology}"
"""

_SPARSE_BUTTERFLY = """
[run]
name = "trial"
[outer]
method = "sparseloco"
sync_every = 4
[exchange]
codec = "topk(k=16,chunk=256)|2bit|rice"
collective = "sparse-butterfly"
straggler_timeout = 1.0
max_weight = 100000
"""


def trial(seed: int, peers: int = PEERS, topology: Topology | Literal["sparse-butterfly"] = "butterfly") -> Scenario:
    """Return the scenario of a seed. `topology`: that of the manifest, or "sparse-butterfly"."""
    rng = random.Random(f"trial/{seed}")
    regions = rng.sample(REGIONS, 3)
    specs = tuple(
        PeerSpec(
            index,
            f"peer-{index}",
            rng.choice(regions),
            step_seconds=rng.uniform(0.5, 0.55),
            up=rng.choice((20, 50, 300)) * MBIT,
            down=300 * MBIT,
            join=0.0 if not index else 0.05 if index < peers - 2 else rng.uniform(4.0, 10.0),
        )
        for index in range(peers)
    )
    usual = sorted(KINDS.keys() - SEVERE.keys())
    rates, kinds = ((6.0, 12.0, 24.0), usual) if topology == "butterfly" else ((3.0, 6.0, 12.0), CHURN)
    mix = {kind: rng.choice(rates) for kind in rng.sample(kinds, MIXED)}
    codec = rng.choice(("fp32", "int8(block=256)"))
    rule = "clip" if seed % 2 else "mean"  # With equal shares, ties show the order of summation.
    return Scenario(
        name="trial",
        seed=seed,
        duration=SECONDS,
        manifest=_SPARSE_BUTTERFLY
        if topology == "sparse-butterfly"
        else _MANIFEST.format(codec=codec, topology=topology, rule=rule),
        peers=specs,
        parameters=PARAMETERS,
        jitter=0.2,
        loss=rng.choice((0.0, 0.0, 0.005)),
        faults=draw(seed, mix, peers, CALM / QUIET, liars=sorted(LIES)),
        interval=SECONDS,
    )


def check(
    seed: int,
    peers: int = PEERS,
    *,
    topology: Topology | Literal["sparse-butterfly"] = "butterfly",
    shrink: bool = True,
    rerun: bool = False,
) -> FailedSeed | None:
    """Run one seed; return None without a violation."""
    flags = (f" --peers {peers}" if peers != PEERS else "") + (f" --{topology}" if topology != "butterfly" else "")

    def command(seed: int) -> str:
        return f"python -m thinwire.sims.trials.trial {seed}{flags}"

    return examine(trial(seed, peers, topology), preset=PACE, stall=STALL, shrink=shrink, rerun=rerun, command=command)


def check_family(seed: int, name: str, *, mix: MixName = "usual", shrink: bool = True) -> FailedSeed | None:
    """Run one seed of a family ("all": the next one in turn); return None without a violation.

    The turns leave out translators, whose seeds are played separately, and those of the harsh mixes merge, whose single
    round ends before most of the faults.
    """
    usual = mix == "usual"
    make = {"usual": families.scenario, "harsh": families.harsh, "departures": families.departures}[mix]
    turns = [one for one in families.FAMILIES if one != "translators" and (usual or one != "merge")]
    name = turns[seed % len(turns)] if name == "all" else name

    def command(seed: int) -> str:
        return f"python -m thinwire.sims.trials.trial {seed} --family {name}{'' if usual else f' --mix {mix}'}"

    scenario, stall = make(name, seed), families.FAMILIES[name].stall
    if not usual:  # After an outage of all, each peer first searches for a newer state than its own.
        stall += OWN_STATE * PATIENCE
    return examine(scenario, preset=PACE, stall=stall, shrink=shrink, command=command)


def main(arguments: Sequence[str]) -> int:
    """Run the given seeds: one, or from the first to below the second. Exit code 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m thinwire.sims.trials.trial")
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int, nargs="?")
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--ring", action="store_const", const="ring", default="butterfly", dest="topology")
    parser.add_argument(
        "--sparse-butterfly", action="store_const", const="sparse-butterfly", default="butterfly", dest="topology"
    )
    parser.add_argument("--family", choices=("all", *families.FAMILIES))
    parser.add_argument("--mix", choices=get_args(MixName), default="usual")
    given = parser.parse_args(arguments)
    if given.mix != "usual":
        given.family = given.family or "all"
    seeds = range(given.first, given.first + 1 if given.end is None else given.end)
    failed = 0
    for number, seed in enumerate(seeds):
        print(f"\rseed {seed}: {number} of {len(seeds)} played, {failed} failed", end="", file=sys.stderr, flush=True)
        if given.family:
            found = check_family(seed, given.family, mix=given.mix)
        else:
            found = check(seed, given.peers, topology=given.topology)
        if found is not None:
            failed += 1
            print(f"\n{found.text}", flush=True)
    print(f"\n{len(seeds)} seeds, {failed} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
