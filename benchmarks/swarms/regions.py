"""Rounds across the world in virtual time, beside the bound of the links: butterfly and ring.

    python -m benchmarks.swarms.regions        # ten regions, and 4 peers 80 ms apart; 100 Mbit/s, 40 MB of fp32 as int8
    python -m benchmarks.swarms.regions --only regions --parameters 2500000

Every peer is the product's own code on a simulated network. In the ten regions there is a peer in each, with the round trips
and the rates of one connection of `sims/network/regions.py`. "blind" rings have another order in every round; the others
follow the measurements of the peers. The bound is 2 · (N − 1) / N of the payload by the rate of a peer's link, and two round
trips from the leader to the peer farthest from it, the mean over leaders: one to agree on contributors, one on the result.
No bound includes the time to fill and to empty a ring.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean
from typing import Any

from thinwire.collectives.costs.access_links import MBIT
from thinwire.node.membership.presence import Presence
from thinwire.sims.network.regions import PATHS, REGIONS, Path
from thinwire.sims.scenario.scenario import PeerSpec, Scenario
from thinwire.sims.simulation.world import simulate

from benchmarks.support import machine
from benchmarks.swarms.sites import seconds_of

STEPS, STEP = 4, 4.0
MANIFEST = """
[outer]
sync_every = {steps}
[exchange]
straggler_timeout = 300.0
topology = "{topology}"
"""


def scenario(
    options: argparse.Namespace, topology: str, where: list[str], paths: dict[tuple[str, str], Path]
) -> Scenario:
    """A peer at each of these places."""
    rate = options.mbit * MBIT
    return Scenario(
        "regions",
        options.seed,
        options.seconds,
        MANIFEST.format(steps=STEPS, topology=topology),
        tuple(
            PeerSpec(index, f"peer-{index}", place, step_seconds=STEP, up=rate, down=rate)
            for index, place in enumerate(where)
        ),
        parameters=options.parameters,
        paths=paths,
    )


@contextmanager
def blind(really: bool) -> Iterator[None]:
    """Let peers report no measurements, if `really`."""
    spans = Presence.spans
    if really:
        Presence.spans = lambda self: ()  # type: ignore[method-assign]
    try:
        yield
    finally:
        Presence.spans = spans  # type: ignore[method-assign]


def places(name: str, options: argparse.Namespace) -> tuple[list[str], dict[tuple[str, str], Path]]:
    """Return the region of each peer, and the paths between regions."""
    if name == "regions":
        return list(REGIONS), PATHS
    where = [f"place-{index}" for index in range(options.peers)]
    return where, {(a, b): Path(options.rtt / 1e3, 0.0) for a in where for b in where}


def main() -> None:
    """Parse the options, play all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("regions", "equal"))
    parser.add_argument("--peers", type=int, default=4, help="that are equally far from each other")
    parser.add_argument("--rtt", type=float, default=80.0, help="ms between those")
    parser.add_argument("--mbit", type=float, default=100.0, help="of a peer's link, each way")
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=150.0, help="virtual ones")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in (options.only,) if options.only else ("equal", "regions"):
        where, paths = places(name, options)
        farthest = mean(max(paths[a, b].rtt for b in where if a != b) for a in where)
        payload = options.parameters * 8.125 / 8
        bound = 2 * (1 - 1 / len(where)) * payload / (options.mbit * MBIT) + 2 * farthest
        for topology, nothing in (("butterfly", False), ("ring", True), ("ring", False)):
            with blind(nothing):
                run = simulate(scenario(options, topology, where, paths))
            if run.violations:
                raise SystemExit(f"{name}, {topology}: {run.violations[0]}")
            ends = seconds_of(run, STEPS * STEP)
            found = ends[(len(ends) - 1) // 2 :]  # by then every peer has measured all others
            row = {"links": name, "topology": f"blind {topology}" if nothing else topology, "rounds": len(found)}
            rows.append(row | {"seconds": mean(found), "bound": bound, "part": bound / mean(found)})
            print(rows[-1], flush=True)
    print("\n| links | | rounds | seconds | bound, s | of the bound |\n|---|---|---|---|---|---|")
    for row in rows:
        cells = f"{row['rounds']} | {row['seconds']:.3f} | {row['bound']:.3f} | {row['part']:.0%}"
        print(f"| {row['links']} | {row['topology']} | {cells} |")
    print(json.dumps({"machine": machine.describe(), "rows": rows}))


if __name__ == "__main__":
    main()
