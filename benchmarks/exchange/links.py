"""An all-reduce between peers whose links are unequal: chunks assigned equally and by bandwidth, by turns in one session.

    python -m benchmarks.exchange.links                   100, 100, 100 and 10 Mbit/s, 60 ms round trip, 20 MB, int8

With N peers a link passes (1 + s · (N − 2)) times the encoded size each way, where s is the part that its peer owns: 1/N when
parts are equal. The least times below are those of the slowest link, and of the best division. Each peer measures its own link
in the turns that do not count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from typing import Any

from thinwire.collectives.topology.bandwidth_shares import PeerLoad, allot, seconds
from thinwire.collectives.topology.shards import grid
from thinwire.compression.registry import dense

from benchmarks.exchange.wan import PORTS, free_ports
from benchmarks.support import contest, machine
from benchmarks.support.peer_script import PEERS, environment

BUFFER = 32 << 10
"""Bytes that the imitation takes at once: to their senders they look delivered."""

WARM = 3
"""Turns in which links are measured."""


def main() -> None:
    """Parse the options, measure by turns, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", default="100,100,100,10", help="Mbit/s each way of every peer's link")
    parser.add_argument("--mb", type=float, default=20.0, help="MB (10**6 bytes) of fp32 a peer")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--rtt", type=float, default=60.0, help="round trip in ms")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--quiet", type=float, default=5.0, help="seconds to wait before a turn for the machine to be quiet"
    )
    options = parser.parse_args()
    rates = [float(text) * 1e6 / 8 for text in options.mbit.split(",")]
    first = free_ports(2 * PORTS)
    links = {"peers": len(rates), "rate": rates, "delay": options.rtt / 2e3, "ports": [first, first + 2 * PORTS]}
    links["buffer"] = BUFFER
    shaper = subprocess.Popen(
        [sys.executable, str(PEERS / "shaper.py"), json.dumps(links)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shaper.stdin is not None and shaper.stdout is not None
    try:
        assert json.loads(shaper.stdout.readline())["ready"]
        found = measure(options, len(rates), first, shaper.pid)
    finally:
        shaper.stdin.close()
        shaper.wait(20)
    codec, least = dense(options.codec), bounds(options, rates)
    print(f"\n{machine.describe()}")
    print(f"{options.mbit} Mbit/s, {options.rtt:g} ms, {options.mb:g} MB, {codec.spec}\n")
    print("| parts | link alone s | median s | ratio | all s | foreign CPU |")
    print("|---|---|---|---|---|---|")
    for name, (median, every, foreign) in found.items():
        listed = ", ".join(f"{value:.2f}" for value in every)
        bound = least[name]
        print(f"| {name} | {bound:.2f} | {median:.2f} | {median / bound:.2f} | {listed} | {foreign:.0%} |")
    print(f"\nequal parts take {found['equal'][0] / found['by bandwidth'][0]:.2f} times as long")


def bounds(options: argparse.Namespace, rates: list[float]) -> dict[str, float]:
    """Least seconds: the links', and two round trips to agree."""
    codec, total = dense(options.codec), int(options.mb * 1e6) // 4
    cut = grid(total, codec)
    size = sum(codec.nbytes(cut.size(index)) for index in range(len(cut))) / len(cut)
    loads, run, more = [PeerLoad(int(rate), int(rate)) for rate in rates], *divmod(len(cut), len(rates))
    equal = [run + (at < more) for at in range(len(rates))]
    return {
        name: size * max(seconds(loads, owned)) + 2 * options.rtt / 1e3
        for name, owned in (("equal", equal), ("by bandwidth", allot(len(cut), loads) or equal))
    }


def measure(
    options: argparse.Namespace, peers: int, first: int, shaper: int
) -> dict[str, tuple[float, list[float], float]]:
    """Name -> median, all turns and foreign load; both divisions take turns."""

    def place(start: int, bandwidth: bool, rank: int) -> dict[str, Any]:
        via = [f"127.1.{rank + 1}.{other + 1}" for other in range(peers)]
        ports = [start + 1, start + PORTS]
        return {"host": f"127.0.0.{rank + 1}", "port": start, "ports": ports, "via": via, "bandwidth": bandwidth}

    programs: dict[str, contest.Contestant] = {}
    try:
        for number, name in enumerate(("equal", "by bandwidth")):
            start = first + number * PORTS
            programs[name] = contest.thinwire(peers, options.mb, options.codec, partial(place, start, bool(number)))
            programs[name].helpers = [shaper]
            programs[name].receive()
        for turn in range(WARM + options.turns):
            for name, program in programs.items():
                machine.wait_until_quiet(0.1, options.quiet, [shaper])
                made = program.turn(counts=turn >= WARM)
                if not all(answer["whole"] for answer in made.answers) or len({a["digest"] for a in made.answers}) > 1:
                    raise RuntimeError(f"results differ, or a peer is missing: {made.answers}")
                known = ", ".join("/".join(f"{8e-6 * rate:.0f}" for rate in answer["link"]) for answer in made.answers)
                print(
                    f"turn {turn}, {name}: {made.seconds:.3f} s, foreign {made.foreign:.0%}; {known}", file=sys.stderr
                )
        return {
            name: (
                program.median(lambda made: made.seconds),
                [made.seconds for made in program.turns],
                program.median(lambda made: made.foreign),
            )
            for name, program in programs.items()
        }
    finally:
        for program in programs.values():
            program.close()


if __name__ == "__main__":
    main()
