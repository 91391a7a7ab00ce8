"""Memory of simulations: without restarts nothing is left in reference cycles, and ended processes are freed."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
from thinwire.sims.peers.machine import Process
from thinwire.sims.results.journal import Journal
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.simulation.world import simulate
from thinwire.sims.trials.trial import PACE

from tests.kit.scenarios import manifest_of, swarm_of

RESETS = (Fault(5.0, "refuse", (1, 2), seconds=2.0), Fault(10.0, "isolate", (3,), seconds=2.0))
"""Faults that break links and end no process."""


def piled_up(outer: str, seconds: float) -> Counter[str]:
    """Return the types of our own objects that only the garbage collector frees after so many seconds of a swarm."""
    found: Counter[str] = Counter()

    def look(journal: Journal) -> None:
        if journal.samples[-1].at < seconds or found:
            return
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            names = (f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
            found.update(name for name in names if name.startswith("thinwire."))
        finally:
            gc.set_debug(0)
            gc.garbage.clear()

    run = simulate(swarm_of(6, manifest_of(outer), seconds=seconds, faults=RESETS), preset=PACE, watch=look)
    assert not run.violations
    return found


@pytest.mark.parametrize("outer", ["sync_every = 4", 'method = "noloco"\nsync_every = 4'], ids=["diloco", "noloco"])
def test_swarm_without_restarts_leaves_no_reference_cycles(outer: str) -> None:
    assert not piled_up(outer, 30.0)


def test_ended_processes_are_freed_when_there_are_as_many_as_peers() -> None:
    peers, alive = 4, list[int]()
    faults = [Fault(5.0 + 2.0 * number, "restart", (1 + number % 3,), seconds=0.5) for number in range(15)]

    def look(journal: Journal) -> None:
        alive.append(sum(isinstance(one, Process) for one in gc.get_objects()))

    run = simulate(swarm_of(peers, manifest_of("sync_every = 4"), seconds=40.0, faults=faults), preset=PACE, watch=look)
    assert not run.violations and sum(event.name == "down" for event in run.journal.events) > 15
    assert max(alive) <= 2 * peers + 1
