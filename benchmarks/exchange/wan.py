"""Time of an all-reduce on ordinary internet links, which a proxy imitates, beside the least that they allow.

    python -m benchmarks.exchange.wan                     4 peers, 100 Mbit/s each way and 80 ms round trip, 40 MB, int8

The least time is 2·(N-1)/N·bytes / bandwidth + 2 round trips. `bytes` is the encoded size of one peer's values. In the first
round trip the peers agree on the participants, in the second one on the result. The proxy is measured first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

from thinwire.collectives.topology.shards import grid
from thinwire.compression.registry import dense

from benchmarks.support import contest, machine
from benchmarks.support.peer_script import PEERS, environment

PORTS = 12
"""Ports of each peer: gate, bulk, and those where members are met."""


def main() -> None:
    """Parse the options, check the imitated links, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--mb", type=float, default=40.0, help="MB (10**6 bytes) of fp32 a peer")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--mbit", type=float, default=100.0, help="Mbit/s each way of every peer's link")
    parser.add_argument("--rtt", type=float, default=80.0, help="round trip in ms")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--quiet", type=float, default=5.0, help="seconds to wait before a turn for the machine to be quiet"
    )
    options = parser.parse_args()
    rate, rtt, first = options.mbit * 1e6 / 8, options.rtt / 1e3, free_ports(PORTS)
    links = {"peers": options.peers, "rate": rate, "delay": rtt / 2, "ports": [first, first + PORTS]}
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
        measured = asyncio.run(check(options.peers, first))
        report = measure(options, rate, rtt, first, shaper.pid)
    finally:
        shaper.stdin.close()
        shaper.wait(20)
    report |= {"machine": machine.describe(), "links": measured}
    print(f"\n{report['machine']}")
    print(
        f"links: asked {options.mbit:g} Mbit/s and {options.rtt:g} ms; measured one stream {measured['stream_mbit']} Mbit/s, "
        f"all others to one {measured['incast_mbit']} Mbit/s, round trip {measured['rtt_ms']} ms\n"
    )
    print("| peers | MB fp32 | codec | encoded MB | link alone s | median s | ratio | foreign CPU |")
    print("|---|---|---|---|---|---|---|---|")
    print(
        f"| {options.peers} | {options.mb:g} | {options.codec} | {report['encoded_mb']} | {report['link_seconds']} "
        f"| {report['seconds']} | {report['ratio']} | {report['foreign']:.0%} |"
    )
    print("\n" + json.dumps(report, indent=1))


def measure(options: argparse.Namespace, rate: float, rtt: float, first: int, shaper: int) -> dict[str, Any]:
    """Return the figures of `options.turns` all-reduces through the links. first: port of each peer's gate."""
    codec, total = dense(options.codec), int(options.mb * 1e6) // 4
    cut = grid(total, codec)
    encoded = sum(codec.nbytes(cut.size(index)) for index in range(len(cut)))
    least = 2 * (options.peers - 1) / options.peers * encoded / rate + 2 * rtt

    def place(rank: int) -> dict[str, Any]:
        via = [f"127.1.{rank + 1}.{other + 1}" for other in range(options.peers)]
        return {"host": f"127.0.0.{rank + 1}", "port": first, "ports": [first + 1, first + PORTS], "via": via}

    ours = contest.thinwire(options.peers, options.mb, options.codec, place)
    ours.helpers = [shaper]
    try:
        ours.receive()
        for number in range(options.turns + 1):
            machine.wait_until_quiet(0.1, options.quiet, [shaper])
            turn = ours.turn(counts=number > 0)
            if not all(answer["whole"] for answer in turn.answers) or len({a["digest"] for a in turn.answers}) > 1:
                raise RuntimeError(f"results differ, or a peer is missing: {turn.answers}")
            print(f"turn {number}: {turn.seconds:.3f} s, foreign {turn.foreign:.0%}", file=sys.stderr)
        seconds = ours.median(lambda turn: turn.seconds)
        return {
            "encoded_mb": round(encoded / 1e6, 2),
            "link_seconds": round(least, 3),
            "seconds": round(seconds, 3),
            "all_seconds": [round(turn.seconds, 3) for turn in ours.turns],
            "ratio": round(seconds / least, 3),
            "foreign": round(ours.median(lambda turn: turn.foreign), 3),
        }
    finally:
        ours.close()


async def check(peers: int, port: int) -> dict[str, float]:
    """Return the round-trip time, and the rates into host 0: of one stream, and of all other hosts together."""
    size = 6 << 20

    async def sink(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = int.from_bytes(await reader.readexactly(4))
        while left:
            left -= len(await reader.read(min(left, 1 << 16)))
        writer.write(b"!")
        await writer.drain()
        writer.close()

    async def send(source: int, amount: int) -> None:
        reader, writer = await asyncio.open_connection(f"127.1.{source + 1}.1", port)
        await asyncio.sleep(0.3)  # The handshake of the connection is over.
        writer.write(amount.to_bytes(4) + bytes(amount))
        await reader.readexactly(1)
        writer.close()

    async def timed(*sends: Any) -> float:
        start = time.perf_counter()
        await asyncio.gather(*sends)
        return time.perf_counter() - start - 0.3

    async with await asyncio.start_server(sink, "127.0.0.1", port):
        trip = statistics.median([await timed(send(1, 1)) for _ in range(5)])
        stream = await timed(send(1, size))
        incast = await timed(*(send(source, size) for source in range(1, peers)))
    return {
        "rtt_ms": round(trip * 1e3, 1),
        "stream_mbit": round(size * 8 / 1e6 / (stream - trip), 1),
        "incast_mbit": round((peers - 1) * size * 8 / 1e6 / (incast - trip), 1),
    }


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive ports that are free now."""
    while True:
        first = random.randrange(20_000, 30_000)
        try:
            for port in range(first, first + count):
                socket.create_server(("0.0.0.0", port)).close()
        except OSError:
            continue
        return first


if __name__ == "__main__":
    main()
