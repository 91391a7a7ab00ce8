"""Seconds until crashes are known, and false deaths, of swarms of rosters in virtual time.

    python -m benchmarks.swarms.membership                      up to 256 peers, a minute; 1,024 with --full
    python -m benchmarks.swarms.membership --sizes 1024         only this size, with WAN

The rosters are the product's, the network is that of the tests: latencies of 20 to 140 ms each way, 1 % of messages lost.
All figures follow from seeds, so they are the same on every machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from thinwire.swarm.membership.presets import LAN, LOCAL, WAN, Preset

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from kit.roster_world import RosterWorld

PRESETS = {"WAN": WAN, "LAN": LAN, "LOCAL": LOCAL}
FAR, NEAR = (0.02, 0.14), (0.0005, 0.002)
"""Latencies each way in seconds."""

CRASH = 70.0
"""Virtual second of the crashes."""

SIZES = ((10, 1, 15), (64, 2, 3), (256, 8, 1), (1024, 32, 1))
"""Peers, crashed peers, and seeds of one row."""

STATED = {10: "13.1 / 13.3 (18.0), 1.2", 64: "21.3 / 22.1 (29.2), 1.5", 256: "27.9 / 28.6 (34.2), 2.4"}
STATED[1024] = "33.5 / 34.3 (38.4), 3.1"
"""Figures of the project's specification for WAN, in the columns of the table."""


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="also 1,024 peers, which take some minutes")
    parser.add_argument("--sizes", type=int, nargs="+", choices=sorted(STATED), help="only these, with WAN")
    parser.add_argument(
        "--hours", type=float, default=2.0, help="virtual hours of 16 peers for each row of false deaths"
    )
    options = parser.parse_args()
    wanted = options.sizes or [count for count, _, _ in SIZES if options.full or count < 1024]
    print(
        "| preset | peers (crashed) | first / 99 % know, s | p95 of 99 % | false deaths | messages per peer and s | stated |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in PRESETS:
        for count, crashed, seeds in SIZES:
            if count not in wanted or (name != "WAN" and (count > 64 or options.sizes)):
                continue
            firsts, lasts, rate, false = detection(
                PRESETS[name], count, crashed, seeds, NEAR if name == "LOCAL" else FAR
            )
            stated = STATED[count] if name == "WAN" else ""
            print(
                f"| {name} | {count} ({crashed}) | {statistics.median(firsts):.1f} / {statistics.median(lasts):.1f} "
                f"| {percentile(lasts, 0.95):.1f} | {false} | {rate:.1f} | {stated} |",
                flush=True,
            )
    if options.sizes:
        return
    print("\n| preset | loss | stalls of the event loop | peer-hours | false deaths | per peer-hour | doubts refuted |")
    print("|---|---|---|---|---|---|---|")
    for name, loss, stall in conditions():
        hours = options.hours if not stall else min(options.hours, 0.5)
        deaths, doubts = false_deaths(PRESETS[name], loss, stall, hours)
        shown = f"{stall:g} s, one of the peers every 60 s" if stall else "none"
        print(
            f"| {name} | {loss:.0%} | {shown} | {16 * hours:g} | {deaths} | {deaths / 16 / hours:.2f} | {doubts} |",
            flush=True,
        )


def conditions() -> Iterator[tuple[str, float, float]]:
    """Yield preset, loss and stall of each row."""
    for name in ("WAN", "LAN"):
        for loss in (0.0, 0.05, 0.1, 0.2):
            yield name, loss, 0.0
        for stall in (10.0, 20.0):
            yield name, 0.01, stall


def detection(
    preset: Preset, count: int, crashed: int, seeds: int, latency: tuple[float, float]
) -> tuple[list[float], list[float], float, int]:
    """Crash some of `count` peers; return the seconds until the first peer and 99 % know, and the idle message rate.

    The last figure counts the healthy peers that others announced as dead, from the start until all know of the crashes.
    """
    firsts, lasts, rates, false = list[float](), list[float](), list[float](), 0
    victims = range(3, 3 + 7 * crashed, 7)
    for seed in range(seeds):
        world = RosterWorld(seed, preset, latency=latency, loss=0.01)
        world.full(count)
        world.run(CRASH - 10.0)  # until the first news of all peers has been passed on
        before = world.sent
        world.run(CRASH)
        rates.append((world.sent - before) / 10.0 / count)
        for victim in victims:
            world.crash(victim)
        if not world.run(CRASH + 120.0, world.agreed):
            raise RuntimeError("the rosters do not agree")
        for victim in victims:
            peer = world.names[victim]
            times = sorted(at - CRASH for at, _, event in world.log if event.kind == "dead" and event.peer == peer)
            firsts.append(times[0])
            lasts.append(times[int(0.99 * (len(times) - 1))])
        crashes = {world.names[victim] for victim in victims}
        false += sum(event.kind == "dead" and event.peer not in crashes for _, _, event in world.log)
    return firsts, lasts, statistics.mean(rates), false


def false_deaths(preset: Preset, loss: float, stall: float, hours: float) -> tuple[int, int]:
    """Run 16 healthy peers; return how many deaths they announced, and how many suspicions were refuted."""
    world = RosterWorld(7, preset, latency=FAR, loss=loss)
    world.full(16)
    until, turn = 3600.0 * hours, 0
    while world.now < until:
        if stall:
            world.stall(turn % 16, stall)
            turn += 1
        world.run(min(until, world.now + 60.0))
    kinds = [event.kind for _, _, event in world.log]
    return kinds.count("dead"), kinds.count("refuted")


def percentile(values: list[float], part: float) -> float:
    """Return the value that this part of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


if __name__ == "__main__":
    main()
