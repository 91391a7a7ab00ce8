"""Invariants that are checked every second: membership, progress of rounds, bounded resources.

A fault excuses the peers that it affects, while it lasts and for a while after; it excuses nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thinwire.node.membership.join import DuplicateKey, Refused
from thinwire.sims.invariants.fragments import FragmentInvariants
from thinwire.sims.invariants.on_commit import CommitInvariants
from thinwire.sims.invariants.oracles import OnViolation
from thinwire.sims.network.link import CONTROL_WINDOW
from thinwire.sims.peers.machine import SEARCH_SECONDS, Machine, Process
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.membership.broadcast_queue import MAX_QUEUE
from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.messages.registry import PeerId

LOOK_SECONDS = 1.0
"""Interval in seconds between two checks."""

ROUNDS = 3
"""Rounds after which all peers are in step again."""

REUNION_ROUNDS, REUNION_SECONDS = 5, 10.0
"""Rounds and seconds after the last fault in which lineages become one.

Peers of one lineage have the seconds, too, to be in step. Asynchronous rounds take less than a second, but a peer that is
behind needs up to 3 s for its links, a patience until it believes that, two for the results of a commit that it knows, and
one to fetch the state; a patience is 2 s.
"""

ORPHAN, SPARE = 10.0, 10.0
"""Seconds without a quorum until the remaining peers found a lineage, and more until a round."""

SOONEST = 0.5
"""Least fraction of `exchange.orphan` between a round and a lineage founded with its state.

It is below 1 because peers may report rounds late.
"""

ARRIVAL = 90.0
"""Seconds after a fault during which a peer that searches for the swarm may give up."""

SKEW = 100.0
"""Error of a wall clock in seconds from which on its peer's records are not accepted."""


TWICE, BAN_SECONDS = "double-vote", 15.0
"""Lie of a peer that must be banned, and the seconds in which that must happen."""


class AlwaysInvariants:
    """Checker of these invariants. `machines` by index; those in `honest` are checked.

    `settle`: seconds after the last fault in which rosters become correct. `pause`: longest time in seconds without a
    round and without a fault. `still`: longest time in seconds that a running peer stays in one round after the last fault
    that affected it, whatever other faults there are (None: not checked). `orphan`: seconds without a quorum after which
    the manifest lets peers found a lineage.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        honest: Iterable[int],
        oracles: CommitInvariants | FragmentInvariants,
        on_violation: OnViolation,
        *,
        preset: Preset,
        settle: float,
        pause: float,
        window: int,
        still: float | None = None,
        orphan: float = 0.0,
    ) -> None:
        self._machines, self._oracles, self._on_violation = machines, oracles, on_violation
        self._honest = [machines[index] for index in honest]
        self._ids = {machine.identity.peer_id: machine.index for machine in self._honest}
        self._liars: dict[int, float] = {}
        self._settle, self._pause, self._window = settle, pause, window
        self._doubt = preset.suspicion_stretch * preset.suspicion_min(len(machines)) + 4 * preset.probe_period
        self._round = len(machines) * preset.probe_period
        self._touched: dict[int, float] = {}
        self._changed: dict[int, float] = {}
        self._reported_at: dict[int, float] = {}
        self._wrong: dict[int, float] = {}
        self._quiet_since = self._moved_at = self._faults_end = self._lost_at = 0.0
        self._start = 0
        self._here: dict[Process, int] = {}
        self._rounds, self._reunion_rounds = ROUNDS * oracles.turns, REUNION_ROUNDS * oracles.turns
        self._still, self._soonest = still, SOONEST * orphan
        self._committed: dict[tuple[int, int], float] = {}
        self._since: dict[int, tuple[Process, int, float]] = {}

    def touch(self, peers: Iterable[int], until: float) -> None:
        """Excuse these peers until then, when a fault ends."""
        self._faults_end = max(self._faults_end, until)
        for index in peers:
            self._touched[index] = max(self._touched.get(index, 0.0), until)

    def change(self, peers: Iterable[int], now: float) -> None:
        """Note that these peers come or go, which others take a moment to learn; they must not call them dead."""
        for index in peers:
            self._changed[index] = now

    def excuses(self, machine: Machine, failure: BaseException, now: float) -> bool:
        """Return True if a peer may give up with an error message.

        It may if a fault has separated it from the others, or if a wrong clock makes one of them refuse it. The error
        that another process has its key is never justified here.
        """
        if not isinstance(failure, HintedError) or isinstance(failure, DuplicateKey):
            return False
        refused = isinstance(failure, Refused) and any(map(_skewed, self._machines))
        return refused or now <= self._touched.get(machine.index, -ARRIVAL) + ARRIVAL

    def disturb(self, until: float) -> None:
        """Note an event, lasting until then, from which the swarm needs time to recover."""
        self._quiet_since, self._start = max(self._quiet_since, until), self._oracles.frontier

    def committed(self, machine: Machine, place: tuple[int, int], now: float) -> None:
        """Note that a peer knows that a round is decided. `place`: fragment and round."""
        if machine.index in self._ids.values():
            self._committed.setdefault(place, now)

    def founded(self, machine: Machine, lineage: str, now: float, place: tuple[int, int] = (0, 0)) -> None:
        """Check that a peer may found a lineage: only faults can separate it from a quorum, and only for long.

        `place`: fragment and round with whose state the lineage begins. A peer that has just started need not wait.
        """
        quiet = now - max(self._quiet_since, self._faults_end)  # a full disk excuses no round, but it prevents votes
        honest = machine.index in self._ids.values()
        searches = now <= self._changed.get(machine.index, -SEARCH_SECONDS) + SEARCH_SECONDS + SPARE
        if honest and quiet > ORPHAN + SPARE and not searches and not self._excused(machine, now):
            self._on_violation(
                "lineage", machine.index, f"founds {lineage[:8]}, though nothing has happened for {quiet:.0f} s"
            )
        waited = now - self._committed.get(place, -self._soonest)
        started = now < self._changed.get(machine.index, -self._soonest) + self._soonest
        if honest and waited < self._soonest and not started:
            self._on_violation("lineage", machine.index, f"founds {lineage[:8]} {waited:.1f} s after round {place[1]}")

    def declared_dead(self, by: Machine, victim: PeerId, now: float) -> None:
        """Check that a roster may declare a peer dead."""
        index = self._ids.get(victim)
        if index is None or by.index not in self._ids.values():
            return
        machine = self._machines[index]
        if now <= self._wrong.get(by.index, -self._doubt) + self._doubt:
            return  # A wrong clock refuses records that refute the suspicion.
        if machine.process is None or not machine.process.ready:
            return  # It is down; or it has just begun to join, and its only contact has died: it knows none of the others.
        if now <= self._touched.get(index, -self._doubt) + self._doubt:
            return
        self._on_violation("false-death", by.index, f"peer {index}, which is well")

    def look(self, now: float) -> None:
        """Check all invariants."""
        self._wrong |= {machine.index: now for machine in self._machines if _skewed(machine)}
        running = [machine for machine in self._honest if machine.process is not None and machine.process.ready]
        overdue = self._overdue(now) if running else []
        for machine in running:
            assert machine.process is not None
            self._bans(machine, machine.process)
            self._double_votes(machine, machine.process, overdue, now)
            self._limits(machine, machine.process)
        frontier = self._oracles.frontier
        staying = [machine for machine in running if not machine.gone]  # A peer that leaves makes no more rounds.
        # A round that only dead peers know is not a round that the others must reach; a peer that joins with a round
        # has not made it.
        here = {m.process: m.process.peer.replica.round for m in running if m.process is not None}
        stayed = here.keys() & self._here.keys()
        if max((here[one] for one in stayed), default=0) > max((self._here[one] for one in stayed), default=0):
            self._moved_at = now
        self._here = here
        if now > self._quiet_since + self._settle:
            self._rosters(running, now)
        if now <= self._quiet_since:
            self._start = frontier
        elif now > self._quiet_since + REUNION_SECONDS and self._oracles.together:
            if frontier >= self._start + self._rounds:
                self._lockstep(staying, frontier, now)
            if frontier >= self._start + self._reunion_rounds:
                self._one_lineage(staying, now)
        if self._still is not None:
            self._standstill(running, self._still, now)
        # The peers with the state have left or are down, and the founder does not begin again: the others can only wait.
        founder = self._machines[0].process
        begins = founder is not None and founder.lifecycle is not None and founder.peer.known_peers.returns
        if not begins and not any(machine.holds for machine in self._honest):
            self._lost_at = now
        since = max(self._quiet_since, self._moved_at, self._lost_at)
        if now > since + self._pause:
            self._on_violation(
                "progress", -1, f"no round after {max(here.values(), default=0)} for {now - since:.0f} s"
            )
            self._moved_at = now
        coming = [one for one in self._honest if one.process is not None and not (one.process in here and one.holds)]
        gates = {machine.address for machine in self._machines if machine.up} if coming else set()
        for machine in coming:
            process = machine.process
            if process is not None and process.invite is not None and not machine.holds:
                # All peers that its invite names are gone, and it has met no other.
                if gates.isdisjoint(seed.address for seed in process.invite.seeds):
                    self._reported_at[machine.index] = now
            since = max(self._quiet_since, self._reported_at.get(machine.index, 0.0), self._lost_at)
            if process is not None and not process.ready and now > since + self._pause:
                self._on_violation("progress", machine.index, "does not get in")
                self._reported_at[machine.index] = now

    def _excused(self, machine: Machine, now: float) -> bool:
        if now <= self._last(machine) + self._settle:
            return True
        return _skewed(machine)

    def _last(self, machine: Machine) -> float:
        """Return the time of the last event that affected this machine."""
        return max(self._touched.get(machine.index, -self._settle), self._changed.get(machine.index, -self._settle))

    def _bans(self, machine: Machine, process: Process) -> None:
        transport = process.transport
        banned = process.peer.session.roster.peers.banned
        for peer in (*sorted(banned), *(transport.banned if transport is not None else ())):
            # A peer whose disk has lost a synced vote or proposal may have signed another one, which is evidence.
            if peer in self._ids and not self._machines[self._ids[peer]].disk.lied:
                self._on_violation("banned", machine.index, f"peer {self._ids[peer]} is banned")

    def _overdue(self, now: float) -> list[Machine]:
        """Return the machines that have voted twice for so long that all others must have banned them."""
        found = []
        for liar in self._machines:
            if liar.lie != TWICE or not liar.up:
                self._liars.pop(liar.index, None)
            elif now > self._liars.setdefault(liar.index, now) + BAN_SECONDS:
                found.append(liar)
        return found

    def _double_votes(self, machine: Machine, process: Process, overdue: Sequence[Machine], now: float) -> None:
        for liar in overdue:
            if (
                not self._excused(machine, now)
                and liar.identity.peer_id not in process.peer.session.roster.peers.banned
            ):
                self._on_violation("double-vote", machine.index, f"peer {liar.index} votes twice and is not banned")

    def _rosters(self, running: list[Machine], now: float) -> None:
        ready = {m.identity.peer_id: m.process for m in self._machines if m.process is not None and m.process.ready}
        there = set(ready)
        skewed = {m.identity.peer_id for m in self._machines if self._excused(m, now)}
        skewed |= {peer for peer, process in ready.items() if process.peer.session.roster.left}
        coming = {m.identity.peer_id for m in self._machines if m.process is not None and not m.process.ready}
        fallen = {m.identity.peer_id: self._changed.get(m.index, 0.0) for m in self._machines if not m.up}
        sorted_there = tuple(sorted(there))
        for machine in running:
            if machine.process is None or machine.identity.peer_id in skewed:
                continue
            roster = machine.process.peer.session.roster
            # Peers that lie may be banned; that no honest one is, `_bans` checks.
            out, view = set(roster.peers.banned), roster.peers.view
            expected = tuple(peer for peer in sorted_there if peer not in out) if out else sorted_there
            if view.peers == expected:
                continue
            seen = set(view.peers)
            joined = self._changed.get(machine.index, 0.0)
            # A peer that joined after a death may have learned of the dead peer from one that did not know of the death.
            # It has to detect the death by itself.
            new = now <= joined + self._round + self._settle
            unknown = {peer for peer, at in fallen.items() if new and at < joined}
            ghosts, unseen = seen - there - skewed - coming - unknown, there - seen - skewed - out
            if ghosts or unseen:
                self._on_violation(
                    "roster", machine.index, f"{len(unseen)} peers are missing, {len(ghosts)} are ghosts"
                )

    def _lockstep(self, running: list[Machine], frontier: int, now: float) -> None:
        for machine in running:
            process = machine.process
            if process is None or now <= self._last(machine) + self._settle / 4:
                continue
            at = process.peer.replica.round
            if frontier - max(at, self._start) > self._rounds:
                self._on_violation("lockstep", machine.index, f"in round {at} when others are in round {frontier}")

    def _one_lineage(self, running: list[Machine], now: float) -> None:
        settled = [machine for machine in running if now > self._last(machine) + self._settle / 4]
        found: dict[int, set[str]] = {}
        for machine in settled:
            if machine.process is not None:
                peer = machine.process.peer
                for number, one, _ in peer.replica.each(peer.layout):
                    found.setdefault(number, set()).add(one.lineage.hex())
        for names in found.values():
            if len(names) > 1:
                listed = ", ".join(one[:8] for one in sorted(names))
                self._on_violation("lineage", -1, f"{len(names)} lineages: {listed}")

    def _standstill(self, running: list[Machine], still: float, now: float) -> None:
        before, self._since = self._since, {}
        for machine in running:
            process = machine.process
            if process is None or machine.frozen:
                continue
            round = process.peer.replica.round
            old = before.get(machine.index)
            since = old[2] if old is not None and old[:2] == (process, round) else now
            # While a fault affects a peer, its wait for a quorum may begin again: the link to a stopped voter is up, a full
            # disk prevents a lineage, and voters that return say only later that they have lost their votes.
            since = max(since, self._last(machine))
            if now > since + still:
                self._on_violation("standstill", machine.index, f"in round {round} for {now - since:.0f} s")
                since = now
            self._since[machine.index] = (process, round, since)

    def _limits(self, machine: Machine, process: Process) -> None:
        session = process.peer.session
        sizes = [*session.sizes().items(), *session.presence.send_queue.sizes().items()]
        sizes.append(("news", (session.roster.queued, MAX_QUEUE)))
        if process.transport is not None:
            control, bulk = process.transport.peaks
            sizes += [("pipe", (control, CONTROL_WINDOW)), ("pipe", (bulk, self._window))]
        for name, (size, limit) in sizes:
            if size > limit:
                self._on_violation("limits", machine.index, f"{name}: {size} of {limit}")


def _skewed(machine: Machine) -> bool:
    """Return True if the machine's wall clock is so wrong that other peers do not accept its records."""
    return abs(machine.clocks.jump) > SKEW
