"""Cost of a joiner for a swarm in a simulation: its share of the members' uplinks, and the pace of the rounds.

    python -m benchmarks.swarms.joiner       # a minute on one core

Four or eight peers train with sparse rounds over links of 80 ms round trip, with five times as much downlink as uplink;
the state is many times larger than what a round moves, and a joiner could take it from all of them at once. One run has
a joiner after the fourth round, the other one has none. Virtual time: the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.sims.engine import virtual_loop
from thinwire.swarm.membership.presets import WAN

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from kit.swarm import Swarm

BEFORE = 4
"""Rounds before the joiner comes."""

DOWN = 5
"""Downlink of every peer in parts of its uplink, as of many home connections."""


@dataclass
class Cost:
    """Figures of one run.

    state, fetches: bytes and number of the fetched states. sent: bulk bytes for the joiner of all members, from its arrival
    until it is a member. fetched, seconds: seconds until it has the state, and until it is a member. share: `sent` as a share
    of what the uplinks could have sent in these seconds. rounds: number of rounds in them. gaps: seconds between two commits
    by round.
    """

    state: int = 0
    fetches: int = 0
    sent: int = 0
    fetched: float = 0.0
    seconds: float = 0.0
    share: float = 0.0
    rounds: int = 0
    gaps: dict[int, float] = field(default_factory=dict)

    @property
    def longest(self) -> float:
        """Longest gap between two commits from the joiner's arrival until it is a member, in seconds."""
        return max(gap for number, gap in self.gaps.items() if BEFORE < number < BEFORE + max(2, self.rounds))

    @property
    def normal(self) -> float:
        """Longest gap between two commits before that, in seconds."""
        return max(gap for number, gap in self.gaps.items() if number <= BEFORE)


def measure(
    members: int,
    *,
    joins: bool,
    parameters: int,
    rounds: int,
    uplink: float,
    training: float,
    codec: str = "topk(k=64,chunk=4096)|2bit|rice",
    outer: str = 'method = "sparseloco"\n',
    joiners: int = 1,
    apart: float = 0.0,
) -> Cost:
    """Play a swarm with or without joiners. `uplink`: bytes/s, `training`: seconds of the inner steps of a round.

    The run ends after `rounds` rounds, or with joiners as soon as they are members. joiners: their number; apart: seconds
    between their arrivals. Several joiners have one Cost: the sums of their bytes, and the times of the last one.
    """
    cost = Cost(rounds=rounds - BEFORE)

    async def play() -> None:
        swarm = Swarm(
            members,
            rounds=rounds,
            size=parameters,
            bandwidth=uplink,
            latency=0.04,
            preset=WAN,
            patience=2.0,
            straggler_timeout=5.0,
            codec=codec,
            outer=outer,
        )
        olds = list(swarm.nodes.values())
        for node in olds:
            node.pace, node.transport.downlink.rate = training, DOWN * uplink
        swarm.start()
        loop = asyncio.get_running_loop()
        while olds[0].replica.round < BEFORE:
            await asyncio.sleep(0.05)
        if joins:
            began = loop.time()
            news = []
            for number in range(joiners):
                news.append(swarm.join(members + number))
                news[-1].pace, news[-1].transport.downlink.rate = training, DOWN * uplink
                await asyncio.sleep(apart)
            while not {joiner.id for joiner in news}.issubset(olds[0].replica.members):
                await asyncio.sleep(0.05)
                assert olds[0].replica.round < rounds, "a joiner does not become a member"
            synced = [(at, fields) for joiner in news for at, kind, fields in joiner.log if kind == "synced"]
            cost.state, cost.fetches = sum(int(str(fields["bytes"])) for _, fields in synced), len(synced)
            cost.fetched, cost.seconds = max(at for at, _ in synced) - began, loop.time() - began
            cost.sent = sum(joiner.transport.traffic.bulk_down for joiner in news)
            cost.share = cost.sent / (members * uplink * cost.seconds)
            cost.rounds = olds[0].replica.round - BEFORE
            for node in swarm.nodes.values():
                node.kill()
        else:
            await swarm.finish(list(range(members)), limit=3600.0)
        at = olds[0].committed_at
        cost.gaps = {number: at[number] - at[number - 1] for number in sorted(at) if number - 1 in at}

    virtual_loop.run(play(), seed=1, max_callbacks=10**9)
    return cost


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=30, help="most rounds to wait for the joiner")
    parser.add_argument("--training", type=float, default=4.0, help="seconds of the inner steps of a round")
    parser.add_argument("--members", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--uplinks", type=float, nargs="+", default=[20.0], help="Mbit/s of every peer")
    parser.add_argument("--dense", action="store_true", help="int8 and momentum instead of sparse rounds")
    options = parser.parse_args()
    print(
        "| peers | uplink Mbit/s | state MB | has it after s | member after s (rounds) | share of the uplinks "
        "| longest gap s | without joiner s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    common = {"parameters": options.parameters, "training": options.training}
    if options.dense:
        common |= {"codec": "int8(block=256)", "outer": 'method = "diloco"\n'}
    for members in options.members:
        for megabits in options.uplinks:
            alone = measure(members, joins=False, rounds=BEFORE + 3, uplink=megabits * 1e6 / 8, **common)
            cost = measure(members, joins=True, rounds=options.rounds, uplink=megabits * 1e6 / 8, **common)
            print(
                f"| {members} | {megabits:g} | {cost.state / 1e6:.0f} | {cost.fetched:.1f} | {cost.seconds:.1f} "
                f"({cost.rounds}) | {cost.share:.1%} | {cost.longest:.2f} | {alone.longest:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
