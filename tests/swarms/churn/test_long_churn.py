"""Hours of churn: 32 peers with the product's membership preset and rounds of a minute."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import median

import pytest
from kit.scenarios import play, swarm_of
from thinwire.sims.scenario.faults import Fault
from thinwire.swarm.membership.presets import WAN

PEERS, STEP, STEPS = 32, 2.0, 30
MANIFEST = f"[outer]\nsync_every = {STEPS}\n"
SESSION, AWAY, QUIET = 3600.0, (30.0, 1200.0), 600.0
"""Mean seconds between two faults of a peer, range of their durations, and the end without faults."""


def churn(seed: int, seconds: float) -> list[Fault]:
    """Return faults of all peers: crashes with a later return, stops, and cuts from the network."""
    rng, faults = random.Random(seed), []
    for index in range(PEERS):
        at = 60.0 + rng.expovariate(1 / SESSION)
        while at < seconds - QUIET - AWAY[1]:
            kind, away = rng.choice(("restart", "restart", "restart", "pause", "isolate")), rng.uniform(*AWAY)
            faults.append(Fault(at, kind, (index,), away))
            at += away + rng.expovariate(1 / SESSION)
    return sorted(faults, key=lambda fault: (fault.at, fault.peers))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("hours", [8.0])
def test_hours_of_churn_leave_no_gap_between_commits_above_three_rounds(hours: float) -> None:
    seconds = hours * 3600.0
    faults = churn(1, seconds)
    assert len(faults) > PEERS * (hours - 1) / 2
    run = play(swarm_of(PEERS, MANIFEST, step=STEP, seconds=seconds, faults=faults), preset=WAN, stall=None)
    commits: dict[tuple[int, str], list[float]] = {}
    for event in run.journal.events:
        if event.name == "round":
            commits.setdefault((event.fields["round"], event.fields["digest"]), []).append(event.at)
    # A peer that is cut off for longer than `exchange.orphan` continues alone, and gives way when it is back.
    swarm = sorted(min(times) for times in commits.values() if len(times) >= PEERS // 2)
    gaps = [later - earlier for earlier, later in pairwise(swarm)]
    print(f"{len(faults)} faults, {len(swarm)} rounds, median {median(gaps):.1f} s, longest gap {max(gaps):.1f} s")
    assert median(gaps) < 1.5 * STEP * STEPS and max(gaps) <= 3 * median(gaps)
    assert seconds - swarm[-1] < 3 * median(gaps)
    last = max(commits, key=lambda key: (key[0], len(commits[key])))
    assert len(commits[last]) >= PEERS - 1, (
        "all peers are back; the end may come before the last one has applied the round"
    )
