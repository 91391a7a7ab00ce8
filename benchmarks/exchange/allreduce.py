"""Seconds of an all-reduce on loopback: ours, encrypted and fault-tolerant, beside gloo, hivemind and PCCL, by turns.

    python -m benchmarks.exchange.allreduce                                    4 peers, 40 and 100 MB, against gloo
    python -m benchmarks.exchange.allreduce --full --hivemind out/hivemind     every size, 2 and 4 peers, and hivemind
    python -m benchmarks.exchange.allreduce --topology butterfly ring          ours with owners, and as a ring

Every peer is a process. A turn of thinwire encodes the arrays, announces their hashes, agrees on the members, exchanges sealed
chunks, screens and averages them, votes on the result and decodes it into arrays of the caller.
"shared": through shared memory, otherwise over TCP on loopback. gloo's only sums, in place and in the clear.
Seconds count from a common start to the last peer's end; MB are 10**6 bytes of fp32 of one peer;
s/GB are CPU seconds of a peer for each GB of its arrays; "loop CPU s" are those of the thread of a peer's event loop.
hivemind gets a virtual environment of its own at the path given, made when it is not there; PCCL has to be built into one
(docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.support import contest, machine
from benchmarks.support.actors import free_port

OTHER_SIZES = (40.0, 100.0)
PCCL = {"int8": "uint8"}
"""Codecs that have another name in PCCL."""

WARM_UP = 2
"""Turns that do not count: after them all memory that a round needs is there, in gloo as in ours."""

GLOO, OURS, OURS8 = "gloo fp32", "thinwire fp32", "thinwire int8"
SHARED, SHARED8 = f"{OURS} shared", f"{OURS8} shared"


def main() -> None:
    """Parse the options, run every combination, print a table, then the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[4])
    parser.add_argument("--mb", type=float, nargs="+", default=[40.0, 100.0])
    parser.add_argument("--full", action="store_true", help="2 and 4 peers with 4, 40, 100 and 256 MB")
    parser.add_argument("--turns", type=int, default=7, help="of each program in each combination")
    parser.add_argument(
        "--only", nargs="+", default=[GLOO, OURS, SHARED, OURS8, SHARED8], help="programs of torch and ours"
    )
    parser.add_argument(
        "--topology", nargs="+", choices=("butterfly", "ring"), default=["butterfly"], help="topologies of ours"
    )
    parser.add_argument("--hivemind", type=Path, help="virtual environment of hivemind")
    parser.add_argument("--pccl", type=Path, help="virtual environment with PCCL")
    parser.add_argument(
        "--quiet", type=float, default=5.0, help="seconds to wait before a turn for the machine to be quiet"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures as well")
    options = parser.parse_args()
    if options.full:
        options.peers, options.mb = [2, 4], [4.0, 40.0, 100.0, 256.0]
    hivemind = contest.hivemind_python(options.hivemind) if options.hivemind else ""
    pccl = contest.pccl_python(options.pccl) if options.pccl else ""
    rows = []
    for peers in options.peers:
        for mb in options.mb:
            rows += compare(peers, mb, options, hivemind, pccl)
    print(f"\n{machine.describe()}\n")
    print(table(rows))
    text = json.dumps({"machine": machine.describe(), "rows": rows}, indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    else:
        print("\n" + text)


def compare(peers: int, mb: float, options: argparse.Namespace, hivemind: str, pccl: str) -> list[dict[str, Any]]:
    """All programs by turns with one size. hivemind, pccl: their interpreters, "" to leave them out."""
    contestants = []
    try:
        for name in options.only:
            if name == GLOO:
                contestants.append(contest.gloo(peers, mb, free_port()))
                continue
            codec, _, medium = name.removeprefix("thinwire ").partition(" ")
            contestants += [
                contest.thinwire(peers, mb, codec, topology=topology, shared=medium == "shared")
                for topology in options.topology
            ]
        if hivemind and mb in OTHER_SIZES:
            contestants += [contest.hivemind(hivemind, peers, mb, codec) for codec in ("fp32", "int8")]
        if pccl and mb in OTHER_SIZES:
            contestants += [contest.pccl(pccl, peers, mb, codec, free_port()) for codec in ("fp32", "uint8")]
        for each in contestants:
            ready = each.receive()
            assert all(answer["ready"] for answer in ready)
            for _ in range(WARM_UP):
                each.turn(counts=False)
        pids = [pid for each in contestants for pid in machine.family(p.pid for p in each.processes)]
        for number in range(options.turns):
            for each in contestants:
                machine.wait_until_quiet(0.1, options.quiet, pids)
                turn = each.turn()
                good = all(answer.get("whole", True) for answer in turn.answers)
                if not good or len({answer.get("digest") for answer in turn.answers}) > 1:
                    raise RuntimeError(f"{each.name}: results differ, or a peer is missing: {turn.answers}")
                print(
                    f"{peers} peers {mb:g} MB {number + 1}: {each.name:14} {turn.seconds:.4f} s"
                    f"  cpu {turn.cpu:.3f} s  loop {turn.loop:.3f} s  foreign {turn.foreign:.0%}",
                    file=sys.stderr,
                )
        return [summary(peers, mb, each, contestants) for each in contestants]
    finally:
        for each in contestants:
            each.close()


def summary(peers: int, mb: float, each: contest.Contestant, all_of_them: list[contest.Contestant]) -> dict[str, Any]:
    """The figures of one program with one size; ratios are of medians."""
    seconds = each.median(lambda turn: turn.seconds)
    others = {other.name: other.median(lambda turn: turn.seconds) for other in all_of_them if other is not each}
    return {
        "peers": peers,
        "mb": mb,
        "program": each.name,
        "seconds": round(seconds, 4),
        "all_seconds": [round(turn.seconds, 4) for turn in each.turns],
        "mb_per_s": round(mb / seconds, 1),
        "cpu_seconds": round(each.median(lambda turn: turn.cpu), 3),
        "cpu_seconds_per_gb": round(each.median(lambda turn: turn.cpu) / (peers * mb / 1e3), 2),
        "loop_cpu_seconds": round(each.median(lambda turn: turn.loop), 4),
        "peak_mb": round(each.peak / 1e6),
        "extra_mb": round(each.extra / 1e6),
        "error": max(answer.get("error", 0.0) for turn in each.turns for answer in turn.answers),
        "foreign": round(each.median(lambda turn: turn.foreign), 3),
        "times_as_fast_as": {name: round(other / seconds, 3) for name, other in others.items()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    figures = "peers", "MB", "program", "seconds", "MB/s", "CPU s", "s/GB", "loop CPU s", "peak MB", "above start"
    titles = *figures, "× gloo", "× hivemind", "× PCCL", "foreign CPU"
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in rows:
        than = row["times_as_fast_as"]
        codec = row["program"].removesuffix(" shared").rpartition(" ")[2]
        others = f"hivemind {codec}", f"pccl {PCCL.get(codec, codec)}"
        cells = (
            row["peers"],
            f"{row['mb']:g}",
            row["program"],
            f"{row['seconds']:.3f}",
            f"{row['mb_per_s']:.0f}",
            f"{row['cpu_seconds']:.2f}",
            f"{row['cpu_seconds_per_gb']:.2f}",
            f"{row['loop_cpu_seconds']:.3f}" if row["loop_cpu_seconds"] else "",
            row["peak_mb"],
            row["extra_mb"],
            f"{than[GLOO]:.2f}" if GLOO in than else "",
            *(f"{than[other]:.1f}" if other in than else "" for other in others),
            f"{row['foreign']:.0%}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
