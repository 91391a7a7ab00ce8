"""Whole swarms under faults from a seed violate no invariant (docs/simulation.md). `make soak` plays many more."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from typing import Any

import pytest
from thinwire.sims.engine import virtual_loop
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.simulation.world import SimWorld, simulate
from thinwire.sims.trials import trial
from thinwire.sims.trials.driver import examine, fault_text
from thinwire.sims.trials.families import FAMILIES

TRIAL = 2
"""Seeds with `make trial`, which continuous integration runs."""

TOGETHER = 5
"""Seeds of small swarms in one test."""

RINGS, ROUND = 15, 6
"""Number of seeds of rings and of sparse butterflies with `make trial`, and number of their peers."""

MORE = 115
"""Seeds of rings and sparse butterflies with `make soak`."""

SOAK, SOAKED = 62, 20
"""Seeds with `make soak`, and those of one test. Its other 4,000 seeds are those of families and of the harsh mix."""


def _failure(seed: int) -> str:
    found = trial.check(seed)
    return found.text if found is not None else ""


def _ring_failure(seed: int) -> str:
    found = trial.check(seed, ROUND, topology="ring")
    return found.text if found is not None else ""


def _sparse_butterfly_failure(seed: int) -> str:
    found = trial.check(seed, ROUND, topology="sparse-butterfly")
    return found.text if found is not None else ""


def _portions(begin: int, end: int, step: int, *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(range(first, first + step), id=str(first), marks=marks) for first in range(begin, end, step)]


@pytest.mark.trial
@pytest.mark.timeout(900)  # a failing seed is shrunk
@pytest.mark.parametrize(
    "numbers",
    [*_portions(0, TRIAL, 1), *_portions(TRIAL, SOAK, SOAKED, pytest.mark.soak)],
)
def test_diloco_swarm_of_fifty_under_random_faults_violates_no_invariant(numbers: range) -> None:
    failed = list(filter(None, map(_failure, numbers)))
    assert not failed, "\n".join(failed)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "numbers",
    [
        *_portions(0, TOGETHER, TOGETHER),
        *_portions(TOGETHER, RINGS, TOGETHER, pytest.mark.trial),
        *_portions(RINGS, MORE, 4 * TOGETHER, pytest.mark.soak),
    ],
)
def test_ring_swarm_under_random_faults_violates_no_invariant(numbers: range) -> None:
    failed = list(filter(None, map(_ring_failure, numbers)))
    assert not failed, "\n".join(failed)


@pytest.mark.trial
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "numbers",
    [
        *_portions(0, 3, 3),
        *_portions(3, RINGS - 2, TOGETHER),
        *_portions(RINGS - 2, MORE, 4 * TOGETHER, pytest.mark.soak),
    ],
)
def test_sparse_butterfly_swarm_under_random_faults_violates_no_invariant(numbers: range) -> None:
    failed = list(filter(None, map(_sparse_butterfly_failure, numbers)))
    assert not failed, "\n".join(failed)


_TRACES = """
import sys, torch
torch.set_num_threads(int(sys.argv[1]))
from thinwire.sims.trials.trial import PACE, trial
from thinwire.sims.trials.families import FAMILIES, harsh
from thinwire.sims.simulation.world import simulate
played = [trial(11, 5), trial(12, 17), *(harsh(name, 900004) for name in sorted(FAMILIES)[::6])]
for scenario in played:
    print(simulate(scenario, preset=PACE).trace)
"""


@pytest.mark.trial
def test_trial_trace_is_equal_for_any_hash_seed_and_thread_count() -> None:
    """Frames as bytes (few peers) and by reference (17 and more), and lineages that part and meet, of every sixth family."""
    found = set()
    for hashing, threads in (("0", "1"), ("random", "4")):
        env = {**os.environ, "PYTHONHASHSEED": hashing, "OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", _TRACES, threads], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
    assert len(set(found.pop().split())) == 2 + len(sorted(FAMILIES)[::6])


@pytest.mark.trial
def test_failing_trial_is_shrunk_and_prints_its_reproduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many harmless faults and one that violates a false claim, only that one remains."""
    scenario = trial.trial(3, 6)
    harmless = tuple(Fault(2.0 + at, "reset", (at % 6, (at + 1) % 6)) for at in range(6))
    wanted = Fault(5.25, "kill", (2,))
    monkeypatch.setattr("thinwire.sims.simulation.world.SimWorld.ended", _fragile)
    found = examine(scenario.with_(faults=(*harmless, wanted)), preset=trial.PACE, command=lambda seed: f"see {seed}")
    assert found is not None and found.faults == (wanted,) and found.drawn == 7
    assert found.violations[0].oracle == "limits" and "see 3" in found.text and fault_text(wanted) in found.text
    assert eval(fault_text(wanted), {"Fault": Fault}) == wanted  # noqa: S307 - what is printed can be pasted
    assert examine(scenario.with_(faults=harmless), preset=trial.PACE, rerun=True) is None


def test_world_of_an_examined_seed_is_freed_before_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a thousand seeds take gigabytes: the collector does not count arrays."""
    worlds: list[weakref.ref[SimWorld]] = []
    begin = SimWorld.__init__

    def noted(self: SimWorld, *given: Any) -> None:
        begin(self, *given)
        worlds.append(weakref.ref(self))

    async def nothing() -> None:
        pass

    monkeypatch.setattr(SimWorld, "__init__", noted)
    gc.disable()
    try:
        assert examine(trial.trial(3, 4).with_(faults=()), preset=trial.PACE) is None
        virtual_loop.run(nothing(), seed=0)
        assert [world() for world in worlds] == [None]
    finally:
        gc.enable()


def _fragile(self, machine, reason, failure):
    self.invariants.commits.ended(machine.index)
    if reason == "killed":
        self.on_violation("limits", machine.index, "one was killed")


def test_given_faults_replace_those_of_the_seed() -> None:
    scenario = trial.trial(3, 4)
    calm = simulate(scenario, faults=(), preset=trial.PACE)
    assert calm.faults == () and not calm.violations
    assert calm.trace != simulate(scenario, seed=4, faults=(), preset=trial.PACE).trace
