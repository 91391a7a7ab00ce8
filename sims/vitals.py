"""What must hold at all times, looked at every second: who is here, rounds go on, nothing grows without bound.

A fault is an excuse for those that it touches, while it lasts and for a while after; never for anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thinwire.collectives.outbox import LONGEST
from thinwire.node.duties import DuplicateKey
from thinwire.node.peer import Refused
from thinwire.sims.lineages import Lineages
from thinwire.sims.link import CONTROL_WINDOW
from thinwire.sims.machine import Machine, Process
from thinwire.sims.network import EPOCH
from thinwire.sims.oracles import Oracles, Tell
from thinwire.swarm.broadcast import MAX_QUEUE
from thinwire.swarm.errors import HintedError
from thinwire.swarm.preset import Preset
from thinwire.swarm.protocol import PeerId

LOOK_SECONDS = 1.0
"""How often it is looked."""

ROUNDS = 3
"""Rounds after which all are in step again."""

ARRIVAL = 90.0
"""Seconds after a fault in which who is looking for the swarm may give up."""

SKEW = 100.0
"""Seconds that a wall clock may be off before its peer's records are not to be believed any more."""


class Vitals:
    """`machines` by index; those in `honest` keep their promises. `settle`: seconds in which rosters are right again after
    the last fault. `pause`: seconds without a round, with nothing wrong, that are too many.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        honest: Iterable[int],
        oracles: Oracles | Lineages,
        tell: Tell,
        *,
        preset: Preset,
        settle: float,
        pause: float,
        window: int,
    ) -> None:
        self._machines, self._oracles, self._tell = machines, oracles, tell
        self._honest = [machines[index] for index in honest]
        self._ids = {machine.identity.peer_id: machine.index for machine in self._honest}
        self._settle, self._pause, self._window = settle, pause, window
        self._doubt = preset.suspicion_stretch * preset.suspicion_min(len(machines)) + 4 * preset.probe_period
        self._round = len(machines) * preset.probe_period
        self._touched: dict[int, float] = {}
        self._changed: dict[int, float] = {}
        self._told: dict[int, float] = {}
        self._wrong: dict[int, float] = {}
        self._quiet_since = self._moved_at = 0.0
        self._start = 0
        self._here: dict[Process, int] = {}
        self._rounds = ROUNDS * oracles.turns

    def touch(self, peers: Iterable[int], until: float) -> None:
        """These peers are not what they should be until then."""
        for index in peers:
            self._touched[index] = max(self._touched.get(index, 0.0), until)

    def change(self, peers: Iterable[int], now: float) -> None:
        """These peers come or go, which takes the others a moment to learn. It is no excuse for being thought dead."""
        for index in peers:
            self._changed[index] = now

    def excuses(self, machine: Machine, failure: BaseException, now: float) -> bool:
        """Whether a peer may give up, with a word of what is wrong: when a fault has kept it from the others, or a wrong clock
        has one of them refuse it.

        That another has its key is never true here.
        """
        if not isinstance(failure, HintedError) or isinstance(failure, DuplicateKey):
            return False
        refused = isinstance(failure, Refused) and any(map(_skewed, self._machines))
        return refused or now <= self._touched.get(machine.index, -ARRIVAL) + ARRIVAL

    def disturb(self, until: float) -> None:
        """Something happens, until then, that takes the swarm time to get over."""
        self._quiet_since, self._start = max(self._quiet_since, until), self._oracles.frontier

    def buried(self, by: Machine, victim: PeerId, now: float) -> None:
        """A roster says that a peer is dead."""
        index = self._ids.get(victim)
        if index is None or by.index not in self._ids.values():
            return
        machine = self._machines[index]
        if now <= self._wrong.get(by.index, -self._doubt) + self._doubt:
            return  # a clock that is wrong refuses records that refute
        if not machine.up or now <= self._touched.get(index, -self._doubt) + self._doubt:
            return
        self._tell("buried", by.index, f"peer {index}, which is well")

    def look(self, now: float) -> None:
        """Check everything."""
        self._wrong |= {machine.index: now for machine in self._machines if _skewed(machine)}
        running = [machine for machine in self._honest if machine.process is not None and machine.process.ready]
        for machine in running:
            assert machine.process is not None
            self._bans(machine, machine.process)
            self._caps(machine, machine.process)
        frontier = self._oracles.frontier
        # What only those knew who are gone is no round that the others must get beyond; who comes with a round has made none.
        here = {m.process: m.process.peer.replica.round for m in running if m.process is not None}
        stayed = here.keys() & self._here.keys()
        if max((here[one] for one in stayed), default=0) > max((self._here[one] for one in stayed), default=0):
            self._moved_at = now
        self._here = here
        if now > self._quiet_since + self._settle:
            self._rosters(running, now)
        if now <= self._quiet_since:
            self._start = frontier
        elif frontier >= self._start + self._rounds and self._oracles.together:
            self._lockstep(running, frontier, now)
        since = max(self._quiet_since, self._moved_at)
        if now > since + self._pause:
            self._tell("progress", -1, f"no round after {max(here.values(), default=0)} for {now - since:.0f} s")
            self._moved_at = now
        for machine in self._honest:
            process = machine.process
            since = max(self._quiet_since, self._told.get(machine.index, 0.0))
            if process is not None and not process.ready and now > since + self._pause:
                self._tell("progress", machine.index, "does not get in")
                self._told[machine.index] = now

    def _excused(self, machine: Machine, now: float) -> bool:
        if now <= self._last(machine) + self._settle:
            return True
        return _skewed(machine)

    def _last(self, machine: Machine) -> float:
        """When something has last befallen this machine."""
        return max(self._touched.get(machine.index, -self._settle), self._changed.get(machine.index, -self._settle))

    def _bans(self, machine: Machine, process: Process) -> None:
        transport = process.transport
        banned = sorted(process.peer.session.roster.banned)
        banned += list(transport.banned) if transport is not None else []
        for peer in banned:
            if peer in self._ids:
                self._tell("banned", machine.index, f"peer {self._ids[peer]} is banned")

    def _rosters(self, running: list[Machine], now: float) -> None:
        there = {m.identity.peer_id for m in self._machines if m.process is not None and m.process.ready}
        skewed = {m.identity.peer_id for m in self._machines if self._excused(m, now)}
        skewed |= {m.identity.peer_id for m in running if m.process is not None and m.process.peer.session.roster.left}
        coming = {m.identity.peer_id for m in self._machines if m.process is not None and not m.process.ready}
        fallen = {m.identity.peer_id: self._changed.get(m.index, 0.0) for m in self._machines if not m.up}
        everybody = tuple(sorted(there))
        for machine in running:
            if machine.process is None or machine.identity.peer_id in skewed:
                continue
            view = machine.process.peer.session.roster.view
            if view.peers == everybody:
                continue
            seen = set(view.peers)
            came = self._changed.get(machine.index, 0.0)
            # Who came after a death may have heard of the dead from one that did not know, and has to find out by itself.
            new = now <= came + self._round + self._settle
            unknown = {peer for peer, at in fallen.items() if new and at < came}
            ghosts, unseen = seen - there - skewed - coming - unknown, there - seen - skewed
            if ghosts or unseen:
                self._tell("roster", machine.index, f"{len(unseen)} peers are missing, {len(ghosts)} are ghosts")

    def _lockstep(self, running: list[Machine], frontier: int, now: float) -> None:
        for machine in running:
            process = machine.process
            if process is None or now <= self._last(machine) + self._settle / 4:
                continue
            at = process.peer.replica.round
            if frontier - max(at, self._start) > self._rounds:
                self._tell("lockstep", machine.index, f"in round {at} when others are in round {frontier}")

    def _caps(self, machine: Machine, process: Process) -> None:
        session = process.peer.session
        sizes = {
            **session.sizes(),
            "news": (len(session.roster._news), MAX_QUEUE),
        }
        for lanes in (session._outbox._control, session._outbox._bulk):
            for lane in lanes.values():
                waiting = len(lane._urgent) + len(lane._later)
                if waiting > sizes.get("lane", (0, 0))[0]:
                    sizes["lane"] = (waiting, LONGEST)
        if process.transport is not None:
            for most, limit in zip(process.transport.peaks, (CONTROL_WINDOW, self._window), strict=True):
                if most > limit:
                    sizes["pipe"] = (most, limit)
        for name, (size, limit) in sizes.items():
            if size > limit:
                self._tell("caps", machine.index, f"{name}: {size} of {limit}")


def _skewed(machine: Machine) -> bool:
    """Whether its wall clock is so wrong that others do not believe its records."""
    return abs(machine.clocks.wall() - machine.clocks.now() - EPOCH) > SKEW
