"""Milliseconds of an all-reduce of a few values: `swarm.average` beside torch's gloo, by turns.

    python -m benchmarks.exchange.tiny        2 peers, 1 and 1000 values; two minutes

`swarm.average` meets by name and number, agrees on the group, exchanges and votes. gloo only sums.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.support import machine
from benchmarks.support.actors import Actor, close, free_port

RUN = '[run]\nname = "tiny"\n[model]\nkind = "custom"\n'


def main() -> None:
    """Parse the options, average by turns, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 1000], help="values of float32")
    parser.add_argument("--count", type=int, default=100, help="averages of one turn")
    parser.add_argument("--turns", type=int, default=5, help="of each program with each size")
    parser.add_argument("--quiet", type=float, default=5.0, help="seconds to wait before a turn for a quiet machine")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        programs = {"thinwire": ours(Path(folder), options.peers), "gloo": gloo(options.peers)}
        for name, actors in programs.items():
            stack.callback(close, actors)
            invite = ""
            for actor in actors:
                actor.receive()
            for actor in actors:
                actor.say(invite=invite)
                if name == "thinwire":  # gloo's come together or not at all
                    invite = invite or actor.receive()["invite"]
            for actor in actors if name == "gloo" else actors[1:]:
                actor.receive()
        rows = [row for size in options.sizes for row in compare(programs, size, options)]
    print(f"\n{machine.describe()}; {options.peers} peers\n")
    print("| values | program | median ms | 99 % below ms | CPU ms of all | foreign CPU |\n|---|---|---|---|---|---|")
    for row in rows:
        cells = (row["values"], row["program"], f"{row['median']:.2f}", f"{row['most']:.2f}", f"{row['cpu']:.2f}")
        print("| " + " | ".join(map(str, cells)) + f" | {row['foreign']:.0%} |")
    print("\n" + json.dumps({"machine": machine.describe(), "rows": rows}, indent=1))


def compare(programs: dict[str, list[Actor]], size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both by turns; the first turn warms up."""
    took: dict[str, list[float]] = {name: [] for name in programs}
    cpu: dict[str, list[float]] = {name: [] for name in programs}
    foreign: dict[str, list[float]] = {name: [] for name in programs}
    pids = [actor.process.pid for actors in programs.values() for actor in actors]
    for number in range(options.turns + 1):
        for name, actors in programs.items():
            machine.wait_until_quiet(0.1, options.quiet if number else 0.0, pids)
            load = machine.Load(actor.process.pid for actor in actors)
            moment = time.monotonic() + 0.05
            for actor in actors:
                actor.say(at=moment, count=options.count, size=size)
            answers = [actor.receive() for actor in actors]
            others, spent = load.foreign(), load.spent()
            if not all(answer["right"] and answer["count"] == options.peers for answer in answers):
                raise RuntimeError(f"{name}: a wrong result: {answers}")
            if number:
                took[name] += [1e3 * max(each) for each in zip(*(answer["took"] for answer in answers), strict=True)]
                cpu[name].append(1e3 * spent / options.count)
                foreign[name].append(others)
    return [
        {
            "values": size,
            "program": name,
            "median": statistics.median(found),
            "most": sorted(found)[len(found) * 99 // 100],
            "cpu": statistics.median(cpu[name]),
            "foreign": statistics.median(foreign[name]),
        }
        for name, found in took.items()
    ]


def ours(place: Path, peers: int) -> list[Actor]:
    """Processes of thinwire."""
    toml = place / "run.toml"
    toml.write_text(RUN)
    return [
        Actor(
            "average_peer.py",
            rank=rank,
            peers=peers,
            home=str(place / str(rank)),
            toml="" if rank else str(toml),
        )
        for rank in range(peers)
    ]


def gloo(peers: int) -> list[Actor]:
    """Processes with gloo."""
    port = free_port()
    return [Actor("comparison/gloo_small.py", rank=rank, peers=peers, port=port) for rank in range(peers)]


if __name__ == "__main__":
    main()
