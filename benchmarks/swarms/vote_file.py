"""Milliseconds that an acceptor waits until its promise or vote is on disk.

    python -m benchmarks.swarms.vote_file                     records of 2, 16 and 256 peers, in the temporary folder: a minute
    python -m benchmarks.swarms.vote_file --folder /mnt/card  on another disk

"save" is `VoteFile.save`: it overwrites a file of fixed size and syncs it. "replace" writes a draft, syncs and renames
it, and syncs the directory. "none" overwrites without a sync. The three run by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from thinwire.collectives.consensus.members.vote_store import VoteRecord
from thinwire.node.membership.known_peers_file import replace_file
from thinwire.node.runtime.disk import RealDisk
from thinwire.node.state.vote_file import VoteFile
from thinwire.swarm.messages.registry import LIFE, Ballot, Contribution, Proposal

from benchmarks.support import machine


def vote(peers: int, number: int) -> VoteRecord:
    """Return a vote for a ballot with so many peers; records with different numbers differ."""
    rng = random.Random(peers)
    ids = tuple(sorted(rng.randbytes(32) for _ in range(peers)))
    contributors = tuple(Contribution(peer, 1, 1 << 20, rng.randbytes(32)) for peer in ids)
    ballot = Ballot(number, ids[0])
    proposal = Proposal(1, 0, ballot, ids, ids, contributors, (), None, (), lives=rng.randbytes(LIFE * peers))
    return VoteRecord(b"", 1, ballot, proposal, rng.randbytes(32))


class Unsynced(RealDisk):
    """Disk whose overwritten data is not synced."""

    def overwrite(self, path: Path, data: bytes) -> None:
        with open(path, "r+b", buffering=0) as file:
            file.write(data)


def compare(peers: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure records with so many peers by turns."""
    own = machine.family([os.getpid()])
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        store = VoteFile(folder / "votes", RealDisk(), random.Random(1), time.time)
        unsynced = VoteFile(folder / "unsynced", Unsynced(), random.Random(1), time.time)

        def replace(record: VoteRecord) -> None:
            replace_file(folder / "replaced", RealDisk(), msgspec.msgpack.encode(record))

        kinds: dict[str, Callable[[VoteRecord], None]]
        kinds = {"save": store.save, "replace": replace, "none": unsynced.save}
        found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
        for turn in range(options.turns):
            records = [vote(peers, turn * options.saves + index + 1) for index in range(options.saves)]
            for kind, function in kinds.items():
                machine.wait_until_quiet(0.1, options.quiet, own)
                load, times = machine.Load(own), []
                for record in records:
                    began = time.perf_counter()
                    function(record)
                    times.append(1e3 * (time.perf_counter() - began))
                found[kind].append((statistics.median(times), max(times), load.foreign()))
                print(f"{peers} peers, turn {turn}: {kind} {found[kind][-1][0]:.3f} ms", file=sys.stderr)
        size = len(msgspec.msgpack.encode(vote(peers, 1)))
        for kind, turns in found.items():
            median, longest, foreign = zip(*turns, strict=True)
            row = {"peers": peers, "bytes": size, "kind": kind, "ms": round(statistics.median(median), 3)}
            row |= {"longest_ms": round(max(longest), 2), "foreign": round(statistics.median(foreign), 3)}
            rows.append({**row, "all_ms": [round(each, 3) for each in median]})
    return rows


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 16, 256], help="peers of the ballot voted for")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--saves", type=int, default=50, help="saves in each turn")
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    parser.add_argument("--quiet", type=float, default=0.0, help="seconds to wait for a quiet machine before each turn")
    options = parser.parse_args()
    rows = [row for peers in options.peers for row in compare(peers, options)]
    report = {"machine": machine.describe(), "rows": rows}
    print(f"\n{report['machine']}; medians of {options.turns} turns of {options.saves} saves\n")
    print("| peers | record | kind | median ms | longest ms | foreign CPU |\n|---|---|---|---|---|---|")
    for row in rows:
        cells = [row["peers"], f"{row['bytes']} B", row["kind"], row["ms"], row["longest_ms"], f"{row['foreign']:.0%}"]
        print("| " + " | ".join(map(str, cells)) + " |")
    print("\n" + json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
