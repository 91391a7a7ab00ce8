"""Makes the faults of a scenario happen to real processes and the ground between them; faults.py says what they mean."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from typing import Protocol

from .faults import Fault
from .ground import Ground, Unplayable

NEVER = {
    "clock-jump": "the clock of a real machine is not ours",
    "clock-drift": "the clock of a real machine is not ours",
    "slow-disk": "the disk of a real machine is not ours",
    "no-space": "the disk of a real machine is not ours",
    "liar": "a real daemon has no code that lies",
}
"""Kinds that need virtual time, and why."""


class Processes(Protocol):
    """The processes of the peers, by index."""

    def kill(self, index: int, *, again: bool) -> bool:
        """SIGKILL; False when there is none. `again`: it will be revived."""
        ...

    def send(self, index: int, number: int) -> bool:
        """Another signal; False when there is no process."""
        ...

    def revive(self, index: int) -> None:
        """Let it play again, in its old home."""
        ...

    def rot(self, index: int, rng: random.Random) -> None:
        """Flip a bit of what it has on disk."""
        ...

    def __len__(self) -> int: ...


class RealFaults:
    """`begin` and `end` a fault. `later(seconds, action)` calls back."""

    def __init__(
        self, ground: Ground, processes: Processes, seed: int, later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self._ground, self._processes, self._later = ground, processes, later
        self._rng = random.Random(f"{seed}/real")

    def begin(self, fault: Fault) -> None:
        """Raises Unplayable."""
        if fault.kind in NEVER:
            raise Unplayable(NEVER[fault.kind])
        ground, first = self._ground, fault.peers[0] if fault.peers else 0
        match fault.kind:
            case "kill" | "restart":
                self._processes.kill(first, again=fault.kind == "restart")
            case "bit-rot":
                self._processes.kill(first, again=True)
                self._processes.rot(first, self._rng)
            case "pause":
                self._processes.send(first, signal.SIGSTOP)
            case "loss":
                ground.lose(fault.amount)
            case "half-open" | "reset" | "slow-close":
                ground.disturb(fault.kind, first, fault.peers[1], fault.seconds)
            case "corrupt" | "duplicate" | "reorder":
                ground.spoil(fault.kind, first, fault.peers[1])
            case "swizzle-clog":
                self._swizzle(fault)
            case _:
                for i, j in self._cuts(fault):
                    ground.hold(i, j)

    def end(self, fault: Fault) -> None:
        """What `begin` has begun is over."""
        ground, first = self._ground, fault.peers[0] if fault.peers else 0
        match fault.kind:
            case "restart" | "bit-rot":
                self._processes.revive(first)
            case "pause":
                self._processes.send(first, signal.SIGCONT)
            case "loss":
                ground.lose(0.0)
            case "corrupt" | "duplicate" | "reorder":
                ground.spoil("", first, fault.peers[1])
            case "partition" | "isolate" | "one-way" | "clog":
                for i, j in self._cuts(fault):
                    ground.release(i, j)

    def _cuts(self, fault: Fault) -> Iterator[tuple[int, int]]:
        """Pairs (from, to) that cannot be crossed."""
        inside = fault.peers
        if fault.kind in ("partition", "isolate"):
            outside = [index for index in range(len(self._processes)) if index not in inside]
            for i in inside:
                for j in outside:
                    yield from ((i, j), (j, i))
        elif fault.kind == "one-way":
            yield from ((inside[0], other) for other in inside[1:])
        else:
            yield from ((inside[0], inside[1]), (inside[1], inside[0]))

    def _swizzle(self, fault: Fault) -> None:
        """Each peer is cut off at a moment of its own in the first half, and comes back at one in the second."""
        for index in fault.peers:
            pairs = list(self._cuts(Fault(0.0, "isolate", (index,))))
            first, last = sorted((self._rng.uniform(0, 0.5), self._rng.uniform(0.5, 1)))
            self._later(first * fault.seconds, lambda pairs=pairs: self._each(self._ground.hold, pairs))  # type: ignore[misc]
            self._later(last * fault.seconds, lambda pairs=pairs: self._each(self._ground.release, pairs))  # type: ignore[misc]

    def _each(self, action: Callable[[int, int], None], pairs: list[tuple[int, int]]) -> None:
        for i, j in pairs:
            action(i, j)
