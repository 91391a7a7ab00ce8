"""Speed of a simulated swarm on one core, in virtual seconds per CPU second.

    python -m benchmarks.swarms.simulation              # fifty peers, and seeds of the trial; a minute
    python -m benchmarks.swarms.simulation --full       # and a thousand peers, in pairs and groups; a quarter of an hour, 6 GiB
    python -m benchmarks.swarms.simulation --control    # only the bytes of control messages, by peers

Fifty peers in ten regions that all average with all (DiLoCo, made-up model), in three settings: a round every 30 s and one each
2.5 s at the pace of the internet, and the seeds that continuous integration plays (a round every 3.4 s, five times as many
messages of membership, faults). CPU seconds are those of this process, all threads, system calls included; a real-time
factor is virtual seconds by CPU seconds, the arrival of the peers included.

Control messages: all frames without a payload that peers on one network send about rounds, headers and signatures included,
in rounds without faults.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import Counter
from typing import Any

from thinwire.collectives.costs.access_links import MBIT
from thinwire.sims.network.packets import Packer, Packet
from thinwire.sims.network.regions import REGIONS
from thinwire.sims.scenario.parser import load
from thinwire.sims.scenario.scenario import PeerSpec, Scenario
from thinwire.sims.simulation.world import SimulatedRun, simulate
from thinwire.sims.trials import trial
from thinwire.swarm.frame import Frame

from benchmarks.support import machine

PEERS = 50
SEEDS = (0, 1, 2, 3, 5, 8)
SIZES = (4, 8, 16, 32, 64)
KIND = dict.fromkeys(("Ready",), "Ready") | dict.fromkeys(("ResultRecord", "Vote"), "Record and Vote")
KIND |= {"Propose": "Propose"} | dict.fromkeys(("Commit", "CompactCommit"), "Commit")
KIND |= dict.fromkeys(
    ("Prepare", "ViewChange", "Promise", "Blame", "Ask", "Behind", "Decline", "Leave", "Fetch"), "others"
)
"""Column of each message of a round."""
MANIFEST = """
[run]
name = "figures"
[outer]
sync_every = {steps}
"""


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="also a thousand peers for ten virtual minutes, twice")
    parser.add_argument("--peers", type=int, default=1000, help="how many peers --full plays")
    parser.add_argument("--control", action="store_true", help="only the bytes of control messages")
    options = parser.parse_args()
    if options.control:
        return control()
    simulate(trial.trial(0, 4), preset=trial.PACE)  # what is imported and compiled once
    report: dict[str, Any] = {"machine": machine.describe()}
    rows = []
    for name, steps, duration in (("30 s", 30.0, 600.0), ("2.5 s", 2.5, 120.0)):
        seconds, run = spent(swarm(int(4 * steps), duration))
        report[f"factor_rounds_{name.replace(' ', '')}"] = round(duration / seconds, 1)
        rows.append((f"{PEERS} peers, a round every {name}", f"{duration / seconds:.0f} × real time", rounds(run)))
    trials = [spent(trial.trial(seed), preset=trial.PACE, stall=trial.STALL, first=True)[0] for seed in SEEDS]
    report["seconds_per_seed"] = round(sum(trials) / len(trials), 2)
    report["factor_trial"] = round(trial.SECONDS * len(trials) / sum(trials), 1)
    rows.append(
        (f"a seed of the trial ({PEERS} peers, {trial.SECONDS:.0f} s)", f"{report['seconds_per_seed']} CPU s", "")
    )
    for kind in ("gossip", "groups") if options.full else ():
        scenario = load(f"thousand-peers-{kind}", peers=options.peers)
        began = time.monotonic()
        seconds, run = spent(scenario)
        wall, peak = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        figures = {"peers": options.peers, "wall": round(wall), "cpu": round(seconds), "peak_gib": round(peak, 2)}
        report[kind] = figures
        what = f"{options.peers} peers, {scenario.duration:.0f} s of {kind}"
        rows.append((what, f"{wall:.0f} s ({seconds:.0f} CPU s), {peak:.1f} GiB at most", rounds(run)))
    print(f"\n{report['machine']}\n")
    print("| what | figure | |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print("\n" + json.dumps(report))


def control() -> None:
    """Print the bytes of control messages of rounds, by number of peers."""
    print(
        "| peers | a peer and round | of it Ready | Record and Vote | Propose | Commit | others | leader's Propose and Commit |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for count in SIZES:
        sent, pack = Counter[str](), Packer.pack

        def note(packer: Packer, frame: Frame, sent: Counter[str] = sent, pack: Any = pack) -> Packet:
            packet: Packet = pack(packer, frame)
            if (column := KIND.get(type(frame.message).__name__)) is not None:
                sent[column] += packet.size
            return packet

        Packer.pack = note  # type: ignore[method-assign, assignment]
        try:
            run = simulate(swarm(10, 40.0, count))
        finally:
            Packer.pack = pack  # type: ignore[method-assign]
        if run.violations:
            raise RuntimeError(str(run.violations[0]))
        last = [one.round for one in run.journal.samples[-1].peers if one is not None]
        made = sum(last) / len(last)
        per = {kind: sent[kind] / made / count for kind in ("Ready", "Record and Vote", "Propose", "Commit", "others")}
        led = (per["Propose"] + per["Commit"]) * count
        cells = [f"{value / 1000:.1f} kB" for value in (sum(per.values()), *per.values(), led)]
        print(f"| {count} | " + " | ".join(cells) + " |", flush=True)


def swarm(steps: int, duration: float, count: int = PEERS) -> Scenario:
    """Full peers on cable, with `steps` inner steps of 0.25 s a round."""
    peers = tuple(
        PeerSpec(index, f"peer-{index}", REGIONS[index % len(REGIONS)], 0.25, 20 * MBIT, 200 * MBIT, join=0.02 * index)
        for index in range(count)
    )
    manifest = MANIFEST.format(steps=steps)
    return Scenario("figures", 1, duration, manifest, peers, parameters=1500, jitter=0.2, interval=10.0)


def spent(scenario: Scenario, **options: Any) -> tuple[float, SimulatedRun]:
    """CPU seconds that a simulation takes. Raises RuntimeError if it violates an invariant."""
    before = time.process_time()
    run = simulate(scenario, **options)
    seconds = time.process_time() - before
    if run.violations:
        raise RuntimeError(str(run.violations[0]))
    return seconds, run


def rounds(run: SimulatedRun) -> str:
    """Mean number of rounds of a peer, as text."""
    last = [one.round for one in run.journal.samples[-1].peers if one is not None]
    return f"{sum(last) / len(last):.0f} rounds each"


if __name__ == "__main__":
    main()
