"""Cost of a joiner for a swarm of eight in a simulation: state as a share of the uplinks, and the pace of the rounds.

    python benchmarks/joiner.py

Eight peers train with sparse rounds over links of 80 ms round trip, with five times as much downlink as uplink; the state
is many times larger than what a round moves, and a joiner could take it from all of them at once. One run has a joiner
after the fourth round, the other one has none. Virtual time: the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.sims.engine import virtual_loop
from thinwire.swarm.membership.presets import WAN

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from kit.swarm import Swarm

MEMBERS, BEFORE = 8, 4
DOWN = 5
"""Downlink of every peer in parts of its uplink, as of many home connections."""


@dataclass
class Cost:
    """Figures of one run: bytes and seconds of the transfer, bytes that the members sent meanwhile, gaps between commits."""

    state: int = 0
    seconds: float = 0.0
    sent: int = 0
    gaps: dict[int, float] = field(default_factory=dict)

    @property
    def longest(self) -> float:
        """Longest gap between two commits from the joiner's arrival on, in seconds."""
        return max(gap for number, gap in self.gaps.items() if number > BEFORE)


def measure(*, joins: bool, parameters: int, rounds: int, uplink: float, training: float) -> Cost:
    """Play a swarm with or without a joiner. `uplink`: bytes/s, `training`: seconds of the inner steps of a round."""
    cost = Cost()

    async def play() -> None:
        swarm = Swarm(
            MEMBERS,
            rounds=rounds,
            size=parameters,
            bandwidth=uplink,
            latency=0.04,
            preset=WAN,
            patience=2.0,
            grace=5.0,
            codec="topk(k=64,chunk=4096)|2bit|rice",
            outer='method = "sparseloco"\n',
        )
        members = list(swarm.nodes.values())
        for node in members:
            node.pace, node.transport.downlink.rate = training, DOWN * uplink
        swarm.start()

        def sent() -> int:
            return sum(node.transport.traffic.bulk_up + node.transport.traffic.control_up for node in members)

        loop = asyncio.get_running_loop()
        while members[0].replica.round < BEFORE:
            await asyncio.sleep(0.05)
        began, before = loop.time(), sent()
        if joins:
            joiner = swarm.join(MEMBERS)
            joiner.pace, joiner.transport.downlink.rate = training, DOWN * uplink
            while not (synced := [fields for _, kind, fields in joiner.log if kind == "synced"]):
                await asyncio.sleep(0.05)
            cost.state, cost.seconds, cost.sent = int(str(synced[0]["bytes"])), loop.time() - began, sent() - before
        await swarm.finish(list(range(MEMBERS)), limit=3600.0)
        at = members[0].committed_at
        cost.gaps = {number: at[number] - at[number - 1] for number in sorted(at) if number - 1 in at}

    virtual_loop.run(play(), seed=1, max_callbacks=10**9)
    return cost


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--training", type=float, default=4.0, help="seconds of the inner steps of a round")
    parser.add_argument("--uplinks", type=float, nargs="+", default=[20.0, 100.0], help="Mbit/s of every peer")
    options = parser.parse_args()
    print(
        "| uplink Mbit/s | state MB | transfer s | share of the uplinks | of all bytes sent | longest gap s "
        "| without joiner s |"
    )
    print("|---|---|---|---|---|---|---|")
    for megabits in options.uplinks:
        common = {"parameters": options.parameters, "rounds": options.rounds, "training": options.training}
        alone, cost = (measure(joins=joins, uplink=megabits * 1e6 / 8, **common) for joins in (False, True))
        share = cost.state / (MEMBERS * megabits * 1e6 / 8 * cost.seconds)
        print(
            f"| {megabits:g} | {cost.state / 1e6:.0f} | {cost.seconds:.1f} | {share:.1%} | {cost.state / cost.sent:.0%} "
            f"| {cost.longest:.2f} | {alone.longest:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
