"""Rounds of a swarm, and the admission of a joiner, while 5,000 half-open connections load one of its peers, by turns.

    python -m benchmarks.swarms.flood

Two daemons train. In every other turn `peers/flooder.py` opens connections to all ports of the founder and reopens those
that it closes. Each turn measures the mean duration of a round, then a third daemon joins: seconds from its first event
to its state, without the loading of torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks.daemon.idle import spawn, status
from benchmarks.support import machine

RUN = """[run]
name = "flood"
[model]
layers = 1
width = 32
heads = 2
context = 32
[outer]
sync_every = 50
"""
PORTS = range(21_000, 29_000)
"""Ports of the founder that other machines reach; the loopback sockets of libzmq have other ones."""

FLOODER = Path(__file__).parents[1] / "peers" / "flooder.py"
PATIENCE = 120.0
"""Seconds after which a missing event ends the benchmark."""


class Peer:
    """One daemon and its event log."""

    def __init__(self, home: Path, *arguments: str, text: Path) -> None:
        self._home, self._offset, self.events = home, 0, list[dict[str, Any]]()
        common = ["--data", str(text), "--threads", "1", "--log", "json", "--home", str(home)]
        self.process = spawn(*arguments, *common)

    def wait(self, kind: str, after: float = 0.0, **fields: object) -> dict[str, Any]:
        """Return its first event of a kind with these values after a moment (monotonic seconds)."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and self.process.poll() is None:
            for event in self.poll():
                if event["kind"] == kind and event["at"] > after and fields.items() <= event.items():
                    return event
            time.sleep(0.02)
        raise RuntimeError(f"no {kind} after {PATIENCE:g} s")

    def poll(self) -> list[dict[str, Any]]:
        """Return all events so far."""
        for log in self._home.glob("state/runs/*/events.jsonl"):
            text = log.read_bytes()[self._offset :]
            lines = text[: text.rfind(b"\n") + 1]
            self._offset += len(lines)
            self.events += map(json.loads, lines.splitlines())
        return self.events

    def invite(self) -> str:
        """Return its newest invite."""
        self.wait("ready")
        while not (invite := status(self._home).get("invite")):
            time.sleep(0.1)
        return str(invite)

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait()


def main() -> None:
    """Parse the options, measure by turns, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="of each kind")
    parser.add_argument("--seconds", type=float, default=10.0, help="of one turn, without the joiner")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--rate", type=float, default=100.0, help="connections opened per second after the first ones")
    options = parser.parse_args()
    rows: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        place = Path(folder)
        (place / "run.toml").write_text(RUN)
        text = place / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog. " * 2000)
        ports = ["--port", str(PORTS[0]), "--ports", f"{PORTS[1]}-{PORTS[-1]}"]
        founder = Peer(place / "a", "start", str(place / "run.toml"), "--wait-for", "2", *ports, text=text)
        stack.callback(founder.close)
        other = Peer(place / "b", "join", founder.invite(), "--port", "0", text=text)
        stack.callback(other.close)
        founder.wait("round", contributors=2)
        for turn in range(2 * options.turns):
            flooded = turn % 2 == 1
            with ExitStack() as during:
                if flooded:
                    during.callback(flood(founder, options.count, options.rate))
                row = measure(founder, other, options.seconds)
                joiner = Peer(place / f"j{turn}", "join", founder.invite(), "--port", "0", text=text)
                during.callback(joiner.close)
                start = joiner.wait("start")["at"]
                row["join"] = joiner.wait("ready")["at"] - start
                row["contributes"] = founder.wait("round", start, contributors=3)["at"] - start
            founder.wait("round", time.monotonic(), contributors=2)
            rows[flooded].append(row)
            shown = {key: round(value, 3) for key, value in row.items()}
            print(f"turn {turn + 1}: {'flooded' if flooded else 'calm'}: {shown}", file=sys.stderr, flush=True)
    medians = {kind: {key: statistics.median(row[key] for row in rows[kind]) for key in rows[kind][0]} for kind in rows}
    print(f"\n{machine.describe()}; {options.turns} turns of each kind\n")
    print("| | s a round | join s | worst | contributes after s | descriptors | resident MB | foreign CPU |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, row in medians.items():
        worst = max(one["join"] for one in rows[kind])
        name = f"{options.count} half-open connections" if kind else "calm"
        print(
            f"| {name} | {row['round']:.3f} | {row['join']:.2f} | {worst:.2f} | {row['contributes']:.2f} "
            f"| {row['descriptors']:.0f} | {row['resident']:.0f} | {row['foreign']:.0%} |"
        )
    ratios = sorted(flooded["round"] / calm["round"] for calm, flooded in zip(rows[False], rows[True], strict=True))
    print(f"\nrounds: {medians[True]['round'] / medians[False]['round'] - 1:+.1%} by medians; by turns: ", end="")
    print(", ".join(f"{ratio - 1:+.1%}" for ratio in ratios))
    print("\n" + json.dumps({"machine": machine.describe(), "calm": rows[False], "flooded": rows[True]}))


def flood(founder: Peer, count: int, rate: float) -> Any:
    """Start a flood of all ports of a peer; return the function that ends it."""
    connections = psutil.Process(founder.process.pid).net_connections("tcp")
    ports = {c.laddr.port for c in connections if c.status == "LISTEN" and c.laddr.port in PORTS}
    command = [sys.executable, str(FLOODER), *(f"127.0.0.1:{port}" for port in sorted(ports))]
    process = subprocess.Popen(
        [*command, "--count", str(count), "--rate", str(rate)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    print(f"flood: {process.stdout.readline().strip()}", file=sys.stderr)

    def end() -> None:
        print(f"flood: {process.communicate()[0].splitlines()[-1]}", file=sys.stderr)

    return end


def measure(founder: Peer, other: Peer, seconds: float) -> dict[str, float]:
    """Return the mean seconds of a round, and what the flooded daemon uses meanwhile."""
    pids = [founder.process.pid, other.process.pid]
    load, began = machine.Load(pids), time.monotonic()
    time.sleep(seconds)
    ends = [event["at"] for event in founder.poll() if event["kind"] == "round" and event["at"] > began]
    return {
        "round": (ends[-1] - ends[0]) / (len(ends) - 1),
        "descriptors": float(len(os.listdir(f"/proc/{pids[0]}/fd"))),
        "resident": machine.memory(pids[0]).resident / 1e6,
        "foreign": load.foreign(),
    }


if __name__ == "__main__":
    main()
