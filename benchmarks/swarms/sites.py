"""Two sites of four peers behind one line each, in virtual time: the butterfly beside the hierarchy, with the same seed.

    python -m benchmarks.swarms.sites                  # 10 MB of fp32 as int8; 1 Gbit/s inside, 50 Mbit/s shared; half a minute
    python -m benchmarks.swarms.sites --sites 3 --members 4 --mbit 20

Every peer is the product's own code on a simulated network, where the line of a site is shared by all its peers. The figures
are the time from the last announcement to the commit, the mean over rounds, and the bytes that leave a site in one. The bound
is the time that the lines alone need: 2 n (1 - n/N) of the payload as a butterfly, 2 (1 - 1/G) as a hierarchy.
"""

from __future__ import annotations

import argparse
import json
from statistics import mean
from typing import Any

from thinwire.collectives.costs.access_links import MBIT
from thinwire.sims.network.regions import Path
from thinwire.sims.planner.site_bytes import butterfly_bytes, hierarchy_bytes
from thinwire.sims.scenario.scenario import PeerSpec, Scenario
from thinwire.sims.simulation.world import SimulatedRun, simulate

from benchmarks.support import machine

STEPS, STEP = 4, 1.0
INSIDE = 1000.0
"""Mbit/s of a peer's own link."""

MANIFEST = """
[outer]
sync_every = {steps}
[exchange]
straggler_timeout = 300.0
topology = "{topology}"
"""


def scenario(options: argparse.Namespace, topology: str) -> Scenario:
    """So many sites of so many peers, far from each other."""
    count = options.sites * options.members
    names = [f"site-{index}" for index in range(options.sites)]
    paths = {(a, b): Path(0.0005 if a == b else options.rtt / 1e3, 0.0) for a in names for b in names}
    peers = tuple(
        PeerSpec(
            index,
            f"peer-{index}",
            names[index % options.sites],
            step_seconds=STEP,
            up=INSIDE * MBIT,
            down=INSIDE * MBIT,
            site=names[index % options.sites],
        )
        for index in range(count)
    )
    return Scenario(
        "sites",
        options.seed,
        options.seconds,
        MANIFEST.format(steps=STEPS, topology=topology),
        peers,
        parameters=options.parameters,
        paths=paths,
        lines={name: (options.mbit * MBIT, options.mbit * MBIT) for name in names},
    )


def seconds_of(run: SimulatedRun, computing: float) -> list[float]:
    """From the last announcement to the last commit, round by round from the second; a round's steps take `computing`."""
    ends: dict[int, float] = {}
    for event in run.journal.events:
        if event.name == "round":
            number = int(str(event.fields["round"]))
            ends[number] = max(ends.get(number, 0.0), event.at)
    numbers = sorted(ends)
    return [ends[number] - ends[number - 1] - computing for number in numbers[1:]]


def main() -> None:
    """Parse the options, play both, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=50.0, help="of a site's line, each way")
    parser.add_argument("--rtt", type=float, default=40.0, help="ms between sites")
    parser.add_argument("--parameters", type=int, default=2_500_000)
    parser.add_argument("--seconds", type=float, default=120.0, help="virtual ones")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    groups, payload = [options.members] * options.sites, options.parameters * 8.0625 / 8
    rows: list[dict[str, Any]] = []
    for topology, model in (("butterfly", butterfly_bytes), ("hierarchy", hierarchy_bytes)):
        run = simulate(scenario(options, topology))
        if run.violations:
            raise SystemExit(f"{topology}: {run.violations[0]}")
        found, bound = seconds_of(run, STEPS * STEP)[2:], model(payload, groups) / (options.mbit * MBIT)
        rows.append({"topology": topology, "rounds": len(found), "seconds": mean(found), "line alone": bound})
    factor = rows[0]["seconds"] / rows[1]["seconds"]
    print("| | rounds | seconds | line alone, s |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['topology']} | {row['rounds']} | {row['seconds']:.3f} | {row['line alone']:.3f} |")
    print(f"\nfactor {factor:.2f}")
    print(json.dumps({"machine": machine.describe(), "rows": rows, "factor": factor}))


if __name__ == "__main__":
    main()
