"""An all-reduce on links that lose packets, in network namespaces with the kernel's TCP, beside its bound.

    python -m benchmarks.exchange.lossy       as root; 4 peers, 20 Mbit/s each way, 80 ms, no loss and 1 %, 20 MB, int8

The bound is that of benchmarks/exchange/wan.py: the bytes that a peer sends, divided by its rate, plus two round trips. "with
headers" is the time of the same bytes in packets of 1500 bytes, 52 of which are IP's and TCP's. A lost packet is sent again,
so with loss p a link carries at most 1 − p of its rate; no bound includes that. The links of 20 Mbit/s are what two cores can
emulate packet by packet; the window of a link, its rate by its round trip, is that of 5 ms at 320 Mbit/s.

Between two turns nothing is sent for longer than 10 s, as between two rounds of training: a connection that BBR has seen busy
for 10 s is slowed to four packets a round trip for 0.2 s, to measure the round trip of an empty link; with `--apart 0` that
is in every second turn or so. Rings are in another order in every turn, because nothing measures the links here, and a link
that is used for the first time begins slowly: so some turns do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from thinwire.collectives.topology.shards import grid
from thinwire.collectives.transport.tcp_options import CONGESTION, has_congestion_control
from thinwire.compression.registry import dense

from benchmarks.support import contest, machine
from benchmarks.support.homelinks import HomeLinks

PACKET, HEADERS = 1500, 52
"""Bytes of a packet, and those of them that are IP's and TCP's, with time stamps."""


def main() -> None:
    """Parse the options, measure every case, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--mb", type=float, default=20.0, help="MB (10**6 bytes) of fp32 a peer")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--mbit", type=float, default=20.0, help="Mbit/s each way of every peer's link")
    parser.add_argument("--rtt", type=float, default=80.0, help="round trip in ms")
    parser.add_argument("--loss", type=float, nargs="+", default=[0.0, 0.01], help="probability that a packet is lost")
    parser.add_argument("--topology", nargs="+", default=["butterfly", "ring"])
    parser.add_argument("--streams", type=int, default=2, help="of a link")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--warm", type=int, default=4, help="turns before those, which do not count")
    parser.add_argument("--apart", type=float, default=11.0, help="seconds without a byte before a turn")
    parser.add_argument(
        "--quiet", type=float, default=5.0, help="seconds to wait before a turn for the machine to be quiet"
    )
    options = parser.parse_args()
    rows = []
    for loss in options.loss:
        for topology in options.topology:
            with HomeLinks(options.peers, options.mbit, options.mbit, options.rtt, loss) as links:
                rows.append(measure(options, loss, topology, links))
            print(rows[-1], file=sys.stderr, flush=True)
    print(f"\n{machine.describe()}; congestion control: {CONGESTION if has_congestion_control() else 'the default'}\n")
    print(
        "| loss | | links alone, s | with headers, s | median, s | of the bound | of that with headers | all, s | foreign CPU |"
        "\n|---|---|---|---|---|---|---|---|---|"
    )
    for row in rows:
        every = ", ".join(f"{value:.2f}" for value in row["all"])
        name = f"{row['loss']:.1%} | {row['topology']}"
        cells = f"{row['bound']:.2f} | {row['gross']:.2f} | {row['seconds']:.2f}"
        parts = f"{row['part']:.0%} | {row['gross'] / row['seconds']:.0%}"
        print(f"| {name} | {cells} | {parts} | {every} | {row['foreign']:.0%} |")
    print("\n" + json.dumps({"machine": machine.describe(), "options": vars(options), "rows": rows}))


def measure(options: argparse.Namespace, loss: float, topology: str, links: HomeLinks) -> dict[str, Any]:
    """Turns of one topology."""
    codec, total = dense(options.codec), int(options.mb * 1e6) // 4
    cut = grid(total, codec)
    encoded = sum(codec.nbytes(cut.size(index)) for index in range(len(cut)))
    sent, trips = 2 * (1 - 1 / options.peers) * encoded / (options.mbit * 1e6 / 8), 2 * options.rtt / 1e3
    bound, gross = sent + trips, sent * PACKET / (PACKET - HEADERS) + trips
    ours = contest.thinwire(
        options.peers,
        options.mb,
        options.codec,
        lambda rank: {"host": links.sites[rank].host, "streams": options.streams},
        topology=topology,
        prefix=lambda rank: links.sites[rank].prefix,
    )
    ours.helpers = [os.getpid()]
    try:
        ours.receive()
        for number in range(options.warm + options.turns):
            time.sleep(options.apart)
            machine.wait_until_quiet(0.1, options.quiet, [os.getpid()])
            turn = ours.turn(counts=number >= options.warm)
            if not all(answer["whole"] for answer in turn.answers) or len({a["digest"] for a in turn.answers}) > 1:
                raise RuntimeError(f"results differ, or a peer is missing: {turn.answers}")
            print(f"{topology}, turn {number}: {turn.seconds:.3f} s, foreign {turn.foreign:.0%}", file=sys.stderr)
        seconds = ours.median(lambda turn: turn.seconds)
        return {
            "loss": loss,
            "topology": topology,
            "bound": bound,
            "gross": gross,
            "seconds": seconds,
            "part": bound / seconds,
            "all": [round(turn.seconds, 3) for turn in ours.turns],
            "foreign": ours.median(lambda turn: turn.foreign),
        }
    finally:
        ours.close()


if __name__ == "__main__":
    main()
