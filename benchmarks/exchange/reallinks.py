"""All-reduce over the kernel's TCP in network namespaces, with a token bucket for each uplink and downlink, beside gloo.

    python -m benchmarks.exchange.reallinks               as root; 4 peers, 40 MB, 100 Mbit/s, no latency
    python -m benchmarks.exchange.reallinks --mbit 1000 --mb 100
    python -m benchmarks.exchange.reallinks --rtt 80      latency by the switch in user space, below 200 Mbit/s only
    python -m benchmarks.exchange.reallinks --hivemind out/hivemind --pccl out/pccl     beside hivemind and PCCL, too

hivemind runs in a separate virtual environment at the given path, which is created if it is missing; PCCL has to be built into
one (docs/benchmarks.md).

The bound is the time of the bytes that a peer must send, 2·(N−1)/N of the encoded payload, at the rate of its uplink, plus two
round trips. The token buckets count Ethernet frames, so headers (66 of 1514 bytes, with time stamps) cost 4.4 % of the rate.
The programs take turns; the medians are of the turns that count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from thinwire.collectives.topology.shards import grid
from thinwire.compression.registry import dense
from thinwire.sims.processes.testbed import Site

from benchmarks.support import contest, machine
from benchmarks.support.actors import free_port
from benchmarks.support.homelinks import HomeLinks

PORT, PORTS = 7400, (7401, 7499)
QUEUE = "50ms"
"""Longest time that a packet waits in a token bucket; what does not fit is dropped, as at a home router."""


class Bridge:
    """Namespaces of peers 0…n-1 on one bridge, `mbit` each way for each peer, no latency. Use as a context."""

    def __init__(self, peers: int, mbit: float) -> None:
        self._peers, self._mbit = peers, mbit
        self._holders: list[subprocess.Popen[bytes]] = []
        self.sites: list[Site] = []

    def __enter__(self) -> Bridge:
        for _ in range(self._peers + 1):
            holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._holders.append(holder)
            assert holder.stdin is not None and holder.stdout is not None
            holder.stdin.write(b"!")
            holder.stdin.flush()
            holder.stdout.read(1)  # the echo of cat comes from inside the namespace
        hub = self._holders[-1].pid
        self._in(hub, "ip link set lo up", "ip link add hub type bridge", "ip link set hub up")
        for rank, holder in enumerate(self._holders[:-1]):
            address = f"10.78.0.{rank + 1}"
            link = f"ip link add port{rank} type veth peer name eth0 netns {holder.pid}"
            self._in(hub, link, f"ip link set port{rank} master hub up", self._bucket(f"port{rank}"))
            self._in(holder.pid, "ip link set lo up", f"ip addr add {address}/24 dev eth0", "ip link set eth0 up")
            # Segments of 64 KiB would pass a small bucket at once, unlike packets on a line.
            self._in(holder.pid, "ip link set eth0 gso_max_size 16000", self._bucket("eth0"))
            prefix = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
            self.sites.append(Site(address, PORT, PORTS, f"{address}:{PORT}", prefix))
        return self

    def _bucket(self, device: str) -> str:
        burst = max(32_000, int(self._mbit * 1e6 / 8 / 250))
        return f"tc qdisc add dev {device} root tbf rate {self._mbit:g}mbit burst {burst} latency {QUEUE}"

    def _in(self, pid: int, *commands: str) -> None:
        for command in commands:
            subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", *command.split()], check=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()


def main() -> None:
    """Parse the options, let the programs take turns, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--mb", type=float, default=40.0, help="MB (10**6 bytes) of fp32 of each peer")
    parser.add_argument("--mbit", type=float, default=100.0, help="Mbit/s each way of each peer")
    parser.add_argument("--rtt", type=float, default=0.0, help="round trip in ms")
    parser.add_argument("--loss", type=float, default=0.0, help="probability that a packet is lost; needs --rtt")
    parser.add_argument("--codecs", nargs="*", default=["fp32", "int8"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="first turns, which do not count")
    parser.add_argument("--no-gloo", action="store_true")
    parser.add_argument("--hivemind", type=Path, help="virtual environment of hivemind")
    parser.add_argument("--pccl", type=Path, help="virtual environment with PCCL")
    options = parser.parse_args()
    if options.rtt:
        with HomeLinks(options.peers, options.mbit, options.mbit, options.rtt, options.loss) as links:
            rows = measure(options, links.sites)
    else:
        with Bridge(options.peers, options.mbit) as bridge:
            rows = measure(options, bridge.sites)
    print(f"\n{machine.describe()}; {options.mbit:g} Mbit/s each way, {options.rtt:g} ms, {options.mb:g} MB\n")
    print("| program | bound, s | median, s | of the bound | all, s | foreign |\n|---|---|---|---|---|---|")
    for row in rows:
        every = ", ".join(f"{value:.2f}" for value in row["all"])
        share = row["bound"] / row["seconds"]
        print(
            f"| {row['name']} | {row['bound']:.2f} | {row['seconds']:.2f} | {share:.0%} | {every} | {row['foreign']:.0%} |"
        )
    print("\n" + json.dumps({"machine": machine.describe(), "options": vars(options), "rows": rows}, default=str))


def measure(options: argparse.Namespace, sites: Sequence[Site]) -> list[dict[str, Any]]:
    """Return a row for each program: bound, median, all turns, foreign load."""

    def prefix(rank: int) -> Sequence[str]:
        return sites[rank].prefix

    programs: list[tuple[float, contest.Contestant]] = []
    try:
        for name in options.codecs:
            codec, total = dense(name), int(options.mb * 1e6) // 4
            cut = grid(total, codec)
            encoded = sum(codec.nbytes(cut.size(index)) for index in range(len(cut)))
            ours = contest.thinwire(options.peers, options.mb, name, _host(sites), prefix=prefix)
            programs.append((_bound(options, encoded), ours))
        if not options.no_gloo:
            store = sites[0].host
            gloo = contest.gloo(options.peers, options.mb, free_port(), store=store, prefix=prefix)
            programs.append((_bound(options, options.mb * 1e6), gloo))
        if options.hivemind:
            python = contest.hivemind_python(options.hivemind)
            for name, share in (("fp32", 1.0), ("int8", 0.25)):
                hivemind = contest.hivemind(
                    python, options.peers, options.mb, name, lambda rank: sites[rank].host, prefix
                )
                programs.append((_bound(options, share * options.mb * 1e6), hivemind))
        if options.pccl:
            python, master = contest.pccl_python(options.pccl), sites[0].host
            for name, share in (("fp32", 1.0), ("uint8", 0.25)):
                pccl = contest.pccl(python, options.peers, options.mb, name, free_port(), master, prefix)
                programs.append((_bound(options, share * options.mb * 1e6), pccl))
        for _, program in programs:
            program.receive()
        for number in range(options.warm + options.turns):
            for _, program in programs:
                turn = program.turn(counts=number >= options.warm)
                if not all(answer.get("whole", True) for answer in turn.answers):
                    raise RuntimeError(f"{program.name} has failed: {turn.answers}")
                print(
                    f"{program.name}, turn {number}: {turn.seconds:.3f} s, foreign {turn.foreign:.0%}", file=sys.stderr
                )
        return [
            {
                "name": program.name,
                "bound": bound,
                "seconds": program.median(lambda turn: turn.seconds),
                "all": [round(turn.seconds, 3) for turn in program.turns],
                "foreign": program.median(lambda turn: turn.foreign),
            }
            for bound, program in programs
        ]
    finally:
        for _, program in programs:
            program.close()


def _host(sites: Sequence[Site]) -> Callable[[int], dict[str, Any]]:
    return lambda rank: {"host": sites[rank].host}


def _bound(options: argparse.Namespace, nbytes: float) -> float:
    sent = 2 * (1 - 1 / options.peers) * nbytes
    return float(sent / (options.mbit * 1e6 / 8) + 2 * options.rtt / 1e3)


if __name__ == "__main__":
    main()
