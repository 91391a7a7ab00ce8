"""Injector of faults into real processes and their network; scenario/faults.py defines the kinds."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from typing import Protocol

from thinwire.sims.processes.testbed import PeerNetworks, Unplayable
from thinwire.sims.scenario.faults import Fault, flaps, outages

NEVER = {
    "clock-jump": "the clock of a real machine cannot be changed",
    "clock-drift": "the clock of a real machine cannot be changed",
    "slow-disk": "the disk of a real machine cannot be disturbed",
    "lost-folder": "the disk of a real machine cannot be disturbed",
    "no-space": "the disk of a real machine cannot be disturbed",
    "lying-sync": "the disk of a real machine cannot be disturbed",
    "refuse": "a testbed can hold data back, but refuse no connections",
    "refuse-one-way": "a testbed can hold data back, but refuse no connections",
    "liar": "a real daemon has no code that lies",
}
"""Kinds that need virtual time -> reason."""


class Processes(Protocol):
    """Processes of the peers, by index."""

    def kill(self, index: int, *, again: bool) -> bool:
        """Send SIGKILL; return False without a process. `again`: it will be revived."""
        ...

    def send(self, index: int, number: int) -> bool:
        """Send another signal; return False without a process."""
        ...

    def revive(self, index: int) -> None:
        """Let the peer play again, in its old home directory."""
        ...

    def rot(self, index: int, rng: random.Random) -> None:
        """Flip a bit of the peer's files."""
        ...

    def __len__(self) -> int: ...


class ProcessFaultInjector:
    """Applies faults with `begin` and `end`. `later(seconds, action)` calls back."""

    def __init__(
        self,
        networks: PeerNetworks,
        processes: Processes,
        seed: int,
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._networks, self._processes, self._later = networks, processes, later
        self._rng = random.Random(f"{seed}/real")

    def begin(self, fault: Fault) -> None:
        """Start a fault. Raises Unplayable."""
        if fault.kind in NEVER:
            raise Unplayable(NEVER[fault.kind])
        networks, first = self._networks, fault.peers[0] if fault.peers else 0
        match fault.kind:
            case "kill" | "restart":
                self._processes.kill(first, again=fault.kind == "restart")
            case "majority-lost":
                for index in fault.peers:
                    self._processes.kill(index, again=False)
            case "outage":
                self._outage(fault)
            case "bit-rot":
                self._processes.kill(first, again=True)
                self._processes.rot(first, self._rng)
            case "pause":
                self._processes.send(first, signal.SIGSTOP)
            case "loss":
                networks.lose(fault.amount)
            case "half-open" | "reset" | "slow-close":
                networks.disturb(fault.kind, first, fault.peers[1], fault.seconds)
            case "corrupt" | "duplicate" | "reorder":
                networks.spoil(fault.kind, first, fault.peers[1])
            case "swizzle-clog":
                self._swizzle(fault)
            case "flap":
                for turn, moment in enumerate(flaps(fault)):
                    act, pairs = (networks.release if turn % 2 else networks.hold), list(self._cuts(fault))
                    self._later(moment, lambda act=act, pairs=pairs: self._each(act, pairs))  # type: ignore[misc]
            case _:
                for i, j in self._cuts(fault):
                    networks.hold(i, j)

    def end(self, fault: Fault) -> None:
        """End a fault that `begin` has started."""
        networks, first = self._networks, fault.peers[0] if fault.peers else 0
        match fault.kind:
            case "restart" | "bit-rot":
                self._processes.revive(first)
            case "pause":
                self._processes.send(first, signal.SIGCONT)
            case "loss":
                networks.lose(0.0)
            case "corrupt" | "duplicate" | "reorder":
                networks.spoil("", first, fault.peers[1])
            case "partition" | "isolate" | "one-way" | "clog":
                for i, j in self._cuts(fault):
                    networks.release(i, j)

    def _cuts(self, fault: Fault) -> Iterator[tuple[int, int]]:
        """Yield pairs (from, to) that cannot communicate."""
        inside = fault.peers
        if fault.kind in ("partition", "isolate"):
            outside = [index for index in range(len(self._processes)) if index not in inside]
            for i in inside:
                for j in outside:
                    yield from ((i, j), (j, i))
        elif fault.kind == "one-way":
            yield from ((inside[0], other) for other in inside[1:])
        else:
            for other in inside[1:]:
                yield from ((inside[0], other), (other, inside[0]))

    def _outage(self, fault: Fault) -> None:
        """Kill each peer that runs at its moment, and start it again at another."""
        killed: set[int] = set()

        def kill(index: int) -> None:
            if self._processes.kill(index, again=True):
                killed.add(index)

        def revive(index: int) -> None:
            if index in killed:
                self._processes.revive(index)

        for index, (death, back) in outages(fault).items():
            self._later(death, lambda index=index: kill(index))  # type: ignore[misc]
            self._later(back, lambda index=index: revive(index))  # type: ignore[misc]

    def _swizzle(self, fault: Fault) -> None:
        """Cut each peer off at a random moment in the first half, and reconnect it at one in the second half."""
        for index in fault.peers:
            pairs = list(self._cuts(Fault(0.0, "isolate", (index,))))
            first, last = sorted((self._rng.uniform(0, 0.5), self._rng.uniform(0.5, 1)))
            self._later(first * fault.seconds, lambda pairs=pairs: self._each(self._networks.hold, pairs))  # type: ignore[misc]
            self._later(last * fault.seconds, lambda pairs=pairs: self._each(self._networks.release, pairs))  # type: ignore[misc]

    def _each(self, action: Callable[[int, int], None], pairs: list[tuple[int, int]]) -> None:
        for i, j in pairs:
            action(i, j)
