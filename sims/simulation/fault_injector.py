"""Injector of faults into the machines and links of a world; scenario/faults.py defines the kinds."""

from __future__ import annotations

import errno
import math
import random
from collections.abc import Callable, Sequence, Set

from thinwire.sims.network.network import SimNet
from thinwire.sims.peers.lies import make_liar
from thinwire.sims.peers.machine import Machine
from thinwire.sims.scenario.faults import Fault, flaps, outages

DISTANT = frozenset({"partition", "isolate", "refuse", "loss", "swizzle-clog"})
"""Faults that may affect every peer, not only the named ones."""

HARMLESS = frozenset({"slow-disk", "no-space", "clock-drift", "liar"})
"""Faults that do not excuse a missing answer."""

PRIVATE = HARMLESS | {"clock-jump"}
"""Faults that only the affected peers notice."""


class FaultInjector:
    """Applies faults. `begin` returns whether the fault had an effect; only then `end` undoes it."""

    def __init__(self, net: SimNet, machines: Sequence[Machine]) -> None:
        self._net, self._machines = net, machines
        self._kinds: dict[str, tuple[Callable[[Fault], bool], Callable[[Fault], None]]] = {
            "kill": (self._kill, _do_nothing),
            "restart": (self._kill, self._boot),
            "lost-folder": (self._lose_folder, self._boot),
            "pause": (self._pause, self._resume),
            "outage": (self._outage, _do_nothing),
            "majority-lost": (self._lose_majority, _do_nothing),
            "partition": (self._split, self._reunite),
            "refuse": (self._split, self._reunite),
            "refuse-one-way": (self._refuse_one_way, self._admit_one_way),
            "flap": (self._flap, _do_nothing),
            "isolate": (self._split, self._reunite),
            "one-way": (self._one_way, self._both_ways),
            "clog": (self._clog, self._unclog),
            "swizzle-clog": (self._swizzle, _do_nothing),
            "loss": (self._lose, self._end_loss),
            "half-open": (self._half_open, _do_nothing),
            "reset": (self._reset, _do_nothing),
            "slow-close": (self._slow_close, _do_nothing),
            "corrupt": (self._relay, self._end_relay),
            "duplicate": (self._relay, self._end_relay),
            "reorder": (self._relay, self._end_relay),
            "clock-jump": (self._jump, self._jump_back),
            "clock-drift": (self._drift, self._drift_back),
            "slow-disk": (self._slow_disk, self._fast_disk),
            "no-space": (self._fill, self._empty),
            "bit-rot": (self._rot, self._boot),
            "lying-sync": (self._lie_about_syncs, self._lose_power),
            "liar": (self._lie, self._end_lie),
        }

    @property
    def kinds(self) -> Set[str]:
        """Kinds of faults that can be applied."""
        return self._kinds.keys()

    def begin(self, fault: Fault) -> bool:
        return self._kinds[fault.kind][0](fault)

    def end(self, fault: Fault) -> None:
        self._kinds[fault.kind][1](fault)

    def touched(self, fault: Fault) -> Sequence[int]:
        """Return the peers that a fault may put out of reach, now or shortly before."""
        if fault.kind in HARMLESS:
            return ()
        translated = any(machine.translator is not None for machine in self._machines)
        relays = [one for one in self._machines if one.up and one.translator is None and one.index not in fault.peers]
        # Without a relay, no two peers behind address translators reach each other.
        return range(len(self._machines)) if fault.kind in DISTANT or (translated and not relays) else fault.peers

    def _of(self, fault: Fault) -> list[Machine]:
        return [self._machines[index] for index in fault.peers]

    def _ids(self, fault: Fault) -> list[bytes]:
        return [machine.identity.peer_id for machine in self._of(fault)]

    def _groups(self, fault: Fault) -> list[list[bytes]]:
        others = [machine.identity.peer_id for machine in self._machines if machine.index not in fault.peers]
        return [self._ids(fault), others]

    # Processes

    def _kill(self, fault: Fault) -> bool:
        machine = self._of(fault)[0]
        if machine.process is None or not machine.process.ready:
            return False  # A peer that is not ready yet has nothing to lose.
        machine.kill("killed", crash=True)
        return True

    def _lose_folder(self, fault: Fault) -> bool:
        if not self._kill(fault):
            return False
        self._of(fault)[0].lose_disk()
        return True

    def _outage(self, fault: Fault) -> bool:
        """Kill each running peer at a random time, and restart it later."""
        now, killed = self._net.loop.time(), set[int]()

        def kill(machine: Machine) -> None:
            if machine.up:
                machine.kill("killed", crash=True)
                killed.add(machine.index)

        def boot(machine: Machine) -> None:
            if machine.index in killed:
                machine.boot()

        for index, (death, back) in outages(fault).items():
            self._net.at(now + death, kill, self._machines[index])
            self._net.at(now + back, boot, self._machines[index])
        return True

    def _lose_majority(self, fault: Fault) -> bool:
        for machine in self._of(fault):
            machine.gone = True
            machine.kill("killed", crash=True)
        return True

    def _boot(self, fault: Fault) -> None:
        self._of(fault)[0].boot()

    def _pause(self, fault: Fault) -> bool:
        machine = self._of(fault)[0]
        if not machine.up or machine.frozen:
            return False
        machine.freeze()
        return True

    def _resume(self, fault: Fault) -> None:
        self._of(fault)[0].thaw()

    def _lie(self, fault: Fault) -> bool:
        machine = self._of(fault)[0]
        machine.lie = fault.detail
        if machine.process is not None and machine.process.ready:
            make_liar(machine.process, fault.detail)
        return True

    def _end_lie(self, fault: Fault) -> None:
        machine = self._of(fault)[0]
        machine.lie = ""
        if machine.up:
            machine.kill("a liar is restarted", crash=False)
            machine.boot()

    # Links

    def _split(self, fault: Fault) -> bool:
        self._net.partition(self._groups(fault), refuse=fault.kind == "refuse")
        return True

    def _reunite(self, fault: Fault) -> None:
        self._net.partition(self._groups(fault), refuse=fault.kind == "refuse", end=True)

    def _refuse_one_way(self, fault: Fault) -> bool:
        first, *others = self._ids(fault)
        for other in others:
            self._net.refuse(first, other, one_way=True)
        return True

    def _admit_one_way(self, fault: Fault) -> None:
        first, *others = self._ids(fault)
        for other in others:
            self._net.admit(first, other, one_way=True)

    def _flap(self, fault: Fault) -> bool:
        now, (first, *others) = self._net.loop.time(), self._ids(fault)
        for turn, moment in enumerate(flaps(fault)):
            for other in others:
                self._net.at(now + moment, self._net.mend if turn % 2 else self._net.cut, first, other)
        return True

    def _one_way(self, fault: Fault) -> bool:
        first, *others = self._ids(fault)
        for other in others:
            self._net.cut(first, other, one_way=True)
        return True

    def _both_ways(self, fault: Fault) -> None:
        first, *others = self._ids(fault)
        for other in others:
            self._net.mend(first, other, one_way=True)

    def _clog(self, fault: Fault) -> bool:
        first, second = self._ids(fault)[:2]
        self._net.clog(first, second)
        return True

    def _unclog(self, fault: Fault) -> None:
        first, second = self._ids(fault)[:2]
        self._net.unclog(first, second)

    def _swizzle(self, fault: Fault) -> bool:
        """Clog one peer after the other in the first half, and unclog them in another order in the second.

        FoundationDB does the same.
        """
        rng, loop = random.Random(f"{fault.at}/{fault.peers}"), self._net.loop
        ids = [machine.identity.peer_id for machine in self._machines]
        for order, first, act in ((fault.peers, 0.0, self._net.clog), (fault.peers, 0.5, self._net.unclog)):
            for turn, index in enumerate(rng.sample(order, len(order))):
                when = loop.time() + fault.seconds * (first + 0.5 * turn / len(order))
                for other in ids:
                    if other != ids[index]:
                        self._net.at(when, act, ids[index], other)
        return True

    def _lose(self, fault: Fault) -> bool:
        self._net.lose(self._lossy(fault), fault.amount, fault.until if fault.seconds else math.inf)
        return True

    def _end_loss(self, fault: Fault) -> None:
        self._net.keep(self._lossy(fault), fault.amount, fault.until)

    def _lossy(self, fault: Fault) -> list[bytes]:
        return self._ids(fault) or [machine.identity.peer_id for machine in self._machines]

    def _linked(self, fault: Fault) -> bool:
        return all(peer in self._net.peers for peer in self._ids(fault)[:2])

    def _half_open(self, fault: Fault) -> bool:
        if self._linked(fault):
            first, second = self._ids(fault)[:2]
            self._net.half_open(first, second, fault.seconds)
        return self._linked(fault)

    def _reset(self, fault: Fault) -> bool:
        if self._linked(fault):
            first, second = self._ids(fault)[:2]
            self._net.sever(self._net.peers[first], self._net.peers[second], "reset")
        return self._linked(fault)

    def _slow_close(self, fault: Fault) -> bool:
        if self._linked(fault):
            first, second = self._ids(fault)[:2]
            self._net.slow_close(first, second, fault.seconds)
        return self._linked(fault)

    def _relay(self, fault: Fault) -> bool:
        first, second = self._ids(fault)[:2]
        self._net.relay(first, second, fault.kind)
        return True

    def _end_relay(self, fault: Fault) -> None:
        first, second = self._ids(fault)[:2]
        self._net.relay(first, second, "")

    # Clocks and disks

    def _jump(self, fault: Fault) -> bool:
        self._of(fault)[0].clocks.jump += fault.amount
        return True

    def _jump_back(self, fault: Fault) -> None:
        if fault.seconds:
            self._of(fault)[0].clocks.jump -= fault.amount

    def _drift(self, fault: Fault) -> bool:
        self._of(fault)[0].clocks.drift(fault.amount)
        return True

    def _drift_back(self, fault: Fault) -> None:
        self._of(fault)[0].clocks.drift(0.0)

    def _slow_disk(self, fault: Fault) -> bool:
        self._of(fault)[0].disk.delay = fault.amount
        return True

    def _fast_disk(self, fault: Fault) -> None:
        self._of(fault)[0].disk.delay = 0.0

    def _fill(self, fault: Fault) -> bool:
        self._of(fault)[0].disk.broken = errno.ENOSPC
        return True

    def _empty(self, fault: Fault) -> None:
        self._of(fault)[0].disk.broken = 0

    def _lie_about_syncs(self, fault: Fault) -> bool:
        disk = self._of(fault)[0].disk
        disk.lying = disk.lied = True
        return True

    def _lose_power(self, fault: Fault) -> None:
        machine = self._of(fault)[0]
        if up := machine.up:
            machine.kill("killed", crash=True)
        machine.disk.lying = False
        if up:
            machine.boot()

    def _rot(self, fault: Fault) -> bool:
        machine = self._of(fault)[0]
        return bool(machine.disk.rot()) and self._kill(fault)


def _do_nothing(fault: Fault) -> None:
    pass
