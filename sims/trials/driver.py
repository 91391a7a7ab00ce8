"""Examination of seeds: violations of a run, the command that repeats it, and the faults it needs.

found = examine(scenario, seed=7)          # None without a violation
raise AssertionError(found.text)           # violation, needed faults, command that shows it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
from thinwire.sims.invariants.oracles import Violation
from thinwire.sims.results.journal import WORLD
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.scenario.scenario import Scenario
from thinwire.sims.simulation.world import SimulatedRun, simulate
from thinwire.swarm.membership.presets import WAN, Preset

TRIES = 60
"""Largest number of simulations for shrinking one list of faults."""

Command = Callable[[int], str]
"""Function that returns the command that repeats a seed."""


@dataclass(frozen=True, slots=True)
class FailedSeed:
    """Seed with a violation. `faults` is the smallest list that was found to cause it."""

    seed: int
    violations: tuple[Violation, ...]
    faults: tuple[Fault, ...]
    drawn: int
    command: str

    @property
    def text(self) -> str:
        """Text for people."""
        first = self.violations[0]
        lines = [f"seed {self.seed}: {first.oracle} at {first.at:.2f} s, peer {first.peer}: {first.detail}"]
        lines += [f"{len(self.faults)} of {self.drawn} faults are enough:"]
        lines += [f"    {fault_text(fault)}" for fault in self.faults]
        return "\n".join([*lines, f"repeat it with: {self.command}"])


def fault_text(fault: Fault) -> str:
    """Return a fault as a line of Python, exact."""
    return f"Fault{tuple(msgspec.structs.astuple(fault))!r}"


def examine(
    scenario: Scenario,
    *,
    seed: int | None = None,
    preset: Preset = WAN,
    stall: float | None = None,
    shrink: bool = True,
    rerun: bool = False,
    command: Command = lambda seed: f"thinwire sim FILE --seed {seed}",
) -> FailedSeed | None:
    """Run one seed. Returns None without a violation; `rerun` runs it twice and compares the traces."""

    def play(faults: Sequence[Fault] | None = None) -> SimulatedRun:
        chosen = None if faults is None else tuple(faults)
        return simulate(scenario, seed=seed, faults=chosen, preset=preset, stall=stall, still=True, first=True)

    run = play()
    if not run.violations and rerun:
        again = play()
        if again.trace != run.trace:
            detail = f"{run.trace[:16]}, then {again.trace[:16]}"
            run = replace(run, violations=(Violation(run.ended, "trace", WORLD, detail),))
            shrink = False
    if not run.violations:
        return None
    faults = shrunk(run, play) if shrink else run.faults
    last = play(faults) if shrink else run
    violations = last.violations or run.violations
    return FailedSeed(run.scenario.seed, violations, faults, len(run.faults), command(run.scenario.seed))


def shrunk(run: SimulatedRun, play: Callable[[Sequence[Fault]], SimulatedRun]) -> tuple[Fault, ...]:
    """Return a smallest list of faults that violates the same invariant (delta debugging, Zeller 1999)."""
    wanted = run.violations[0].oracle
    tries = 0

    def fails(faults: Sequence[Fault]) -> bool:
        nonlocal tries
        tries += 1
        return any(violation.oracle == wanted for violation in play(faults).violations)

    # Faults that had not started at the violation are irrelevant.
    faults = [fault for fault in run.faults if fault.at <= run.violations[0].at]
    if len(faults) < len(run.faults) and not fails(faults):
        faults = list(run.faults)
    pieces = 2
    while len(faults) > 1 and tries < TRIES:
        size = -(-len(faults) // pieces)
        for start in range(0, len(faults), size):
            rest = faults[:start] + faults[start + size :]
            if tries < TRIES and fails(rest):
                faults, pieces = rest, max(2, pieces - 1)
                break
        else:
            if size == 1:
                break
            pieces = min(len(faults), 2 * pieces)
    if len(faults) == 1 and tries < TRIES and fails([]):
        faults = []
    return tuple(faults)
