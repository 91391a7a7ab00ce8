"""Histories of runs: lineages, digests of committed rounds, and the times at which peers made progress."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pytest
from kit.scenarios import manifest_of, swarm_of
from thinwire.node.peer import checkpoint_schedule
from thinwire.sims.results.journal import Event
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.scenario.scenario import Scenario
from thinwire.sims.simulation.world import SimulatedRun, simulate
from thinwire.sims.trials.trial import PACE

ROUND = 3.0
"""Longest usual duration of a round of `short_rounds` in seconds: four inner steps, exchange, straggler time-out."""

ORPHAN = 10.0
"""Seconds without a quorum after which survivors found a lineage: the default of `exchange.orphan`."""

REUNION = 5 * ROUND + 10.0
"""Seconds after the last fault in which all peers commit a common round."""

STILL = 3 * ROUND + ORPHAN + 10.0
"""Longest time in seconds that a running peer may spend without progress."""


class Slot(NamedTuple):
    """Round of a fragment in a lineage (its name in hexadecimal digits; "" is the first lineage that had a round)."""

    lineage: str
    fragment: int
    round: int


def short_rounds(peers: int, *faults: Fault, seconds: float, seed: int = 2, **more: object) -> Scenario:
    """Return a swarm with a round every two seconds and an exact codec. `more`: arguments of `swarm_of`."""
    toml = manifest_of("sync_every = 4\n", codec="fp32")
    return swarm_of(peers, toml, seconds=seconds, seed=seed, faults=faults, parameters=2_000, **more)


def save_each_round(patch: pytest.MonkeyPatch) -> None:
    """Let peers write a checkpoint after each round, so that a restart loses no round."""
    patch.setattr(checkpoint_schedule, "SAVE_SECONDS", 0.0)
    patch.setattr(checkpoint_schedule, "SAVE_ROUNDS", 1)


def played(scenario: Scenario) -> SimulatedRun:
    """Play a scenario at the pace of short runs; a swarm may stand still for STILL."""
    return simulate(scenario, preset=PACE, stall=STILL)


def digests_of(run: SimulatedRun, *peers: int, since: float = 0.0, until: float = float("inf")) -> dict[Slot, set[str]]:
    """Return slot -> digests that these peers, or all, had after they committed it in a span of time."""
    found: dict[Slot, set[str]] = {}
    first: dict[int, str] = {}
    for event in run.journal.of("round"):
        lineage = event.fields.get("lineage", "")
        if first.setdefault(event.fields.get("fragment", 0), lineage) == lineage:
            lineage = ""
        if since <= event.at <= until and (not peers or event.peer in peers):
            fields = event.fields
            slot = Slot(lineage, fields.get("fragment", 0), fields["round"])
            found.setdefault(slot, set()).add(fields["digest"])
    return found


def forks(run: SimulatedRun) -> dict[Slot, set[str]]:
    """Return the slots with more than one digest, also of peers that are gone."""
    return {slot: digests for slot, digests in digests_of(run).items() if len(digests) > 1}


def alive(run: SimulatedRun) -> list[int]:
    """Return the peers that run at the end, or would be started again because they gave up."""
    changes = [event for event in run.journal.events if event.name in ("up", "down")]
    return sorted(peer for peer, event in {one.peer: one for one in changes}.items() if not _stopped(event))


def _stopped(event: Event) -> bool:
    return event.name == "down" and event.fields["reason"] in ("killed", "left")


def common(run: SimulatedRun, peers: Iterable[int], since: float, until: float) -> set[tuple[Slot, str]]:
    """Return the slots, with their digests, that all these peers committed in a span of time."""
    each = [
        {(slot, one) for slot, digests in digests_of(run, peer, since=since, until=until).items() for one in digests}
        for peer in peers
    ]
    return set.intersection(*each) if each else set()


def standstills(run: SimulatedRun, *peers: int) -> list[tuple[int, float, float]]:
    """Return (peer, since, seconds) of each span longer than STILL in which a running peer made no progress.

    Progress is a round, a fetched state, a new lineage, and the start of its process.
    """
    found, since = [], dict[int, float]()
    for event in run.journal.events:
        peer = event.peer
        if peer in since and (event.name in ("round", "synced", "lineage", "ready") or _stopped(event)):
            found.append((peer, since[peer], event.at - since[peer]))
            since[peer] = event.at
        if event.name == "up":
            since.setdefault(peer, event.at)
        if _stopped(event):
            since.pop(peer, None)
    found += [(peer, at, run.ended - at) for peer, at in since.items()]
    return [one for one in found if one[2] > STILL and (not peers or one[0] in peers)]


def troubles(run: SimulatedRun, ended: float) -> list[str]:
    """Return all that contradicts one history in a run whose last fault ended at `ended`.

    No slot has two digests. The peers that are alive commit a common round within REUNION, and again at the end. No
    peer stands still. No invariant is violated.
    """
    peers, two = alive(run), [(*slot, len(digests)) for slot, digests in forks(run).items()]
    found = (
        [f"{len(two)} rounds with several digests, first (lineage, fragment, round, digests) {two[0]}"] if two else []
    )
    if not common(run, peers, ended, ended + REUNION):
        found.append(f"no common round of {peers} within {REUNION:.0f} s")
    if not common(run, peers, run.ended - REUNION, run.ended):
        found.append(f"no common round of {peers} at the end")
    found += [f"peer {peer} stands still for {span:.0f} s from {at:.1f} s on" for peer, at, span in standstills(run)]
    return found + [f"{one.oracle} at {one.at:.1f} s, peer {one.peer}: {one.detail}" for one in run.violations[:4]]
