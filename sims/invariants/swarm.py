"""All invariants of one simulated swarm, and the events of its machines that they observe."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.collectives.outcome import Outcome
from thinwire.compression.core.types import Floats
from thinwire.node.methods.noloco.replica import GossipReplica
from thinwire.node.methods.noloco.session import GossipSession
from thinwire.node.methods.registry import METHODS
from thinwire.node.outer.round_session import RoundSession
from thinwire.node.peer.peer import Peer
from thinwire.node.state.replica import Replica
from thinwire.sims.invariants.always import ORPHAN, ROUNDS, SPARE, AlwaysInvariants
from thinwire.sims.invariants.fragments import FragmentInvariants
from thinwire.sims.invariants.on_commit import NONE, CommitInvariants
from thinwire.sims.invariants.oracles import OnViolation
from thinwire.sims.invariants.recomputed_rounds import ReplayInvariant, can_replay
from thinwire.sims.peers.machine import Machine, SimLearner
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.messages.registry import PeerId


class SwarmInvariants:
    """Checker of all invariants.

    `machines` by index; those in `honest` are checked. `on_violation` receives violations. `slowest`: most seconds of an inner
    step. `stall`: longest time in seconds without a round while no fault is active; None: derived from the time of a
    round. `still`: check that no peer stands still, even during faults. `window`: bulk frames in transit in one direction
    of a link.
    """

    def __init__(
        self,
        manifest: Manifest,
        machines: Sequence[Machine],
        honest: Collection[int],
        on_violation: OnViolation,
        *,
        preset: Preset,
        slowest: float,
        stall: float | None,
        still: bool,
        window: int,
    ) -> None:
        self._on_violation, self._honest = on_violation, set(honest)
        ids = {machines[index].identity.peer_id: index for index in honest}
        disks = {peer: machines[index].disk for peer, index in ids.items()}

        def forgetful(peer: PeerId) -> bool:
            return peer in disks and disks[peer].forgot

        self.commits = CommitInvariants(manifest, ids, on_violation, forgetful)
        partial = METHODS[manifest.outer.method].partial
        self._fragments = FragmentInvariants(manifest, ids, on_violation, forgetful) if partial else None
        self.replays: Mapping[int, ReplayInvariant] = {
            number: ReplayInvariant(manifest, ids, on_violation)
            for number in range(manifest.outer.fragment_count if partial else 1)
            if can_replay(manifest)
        }
        """Replays of committed rounds, by fragment."""
        between = slowest * manifest.outer.sync_every + manifest.exchange.timeout_seconds
        self._always = AlwaysInvariants(
            machines,
            honest,
            self._fragments or self.commits,
            on_violation,
            preset=preset,
            # A peer that missed the gossip learns the news at its next exchange of whole tables.
            settle=max(24 * preset.probe_period, preset.push_pull(len(machines))),
            pause=stall or 30.0 + 3 * between,
            window=window,
            still=ROUNDS * between + ORPHAN + SPARE if still else None,
            # With several rounds per step peers report steps.
            orphan=manifest.exchange.orphan if manifest.outer.rounds_per_step == 1 else 0.0,
        )
        self._gave_up: set[int] = set()
        self._read: dict[int, tuple[Floats, int]] = {}
        """Parameters and tokens that gossip peers have read for a contribution, by index."""

    def look(self, now: float) -> None:
        """Check what holds at all times, see `AlwaysInvariants`."""
        self._always.look(now)

    def fault(self, touched: Iterable[int], until: float, *, private: bool) -> None:
        """Note a fault of the `touched` peers that lasts until `until`. `private`: no other peer notices it."""
        self._always.touch(touched, until)
        if not private:
            self._always.disturb(until)

    def changed(self, machine: Machine, now: float) -> None:
        """Note that a process starts, is ready or ends.

        A process that gives up again and again does not excuse the others.
        """
        self._always.change([machine.index], now)
        if machine.index not in self._gave_up:
            self._always.disturb(now)

    def encoded(self, machine: Machine, learner: SimLearner, theta: Any, trained: int) -> None:
        """Note that a peer is about to announce the swarm's state minus `theta`, trained on these tokens."""
        process = machine.process
        if process is not None and process.ready and process.learner is learner:
            session, commits = process.peer.session, self.commits
            if self._fragments is not None:
                fragments = process.peer.fragments
                number = learner.firsts.index(learner.reading)
                session, commits = fragments.sessions[number], self._fragments.each[number]
                theta = fragments.replica.fragments[number].part.take(theta)
            if isinstance(session, GossipSession):
                self._read[machine.index] = theta.copy(), trained
            elif isinstance(session, RoundSession):
                round, attempt = session.replica.round + 1, session.current.attempt + 1
                commits.encoded(machine.identity.peer_id, round, attempt, theta, trained, learner.draws)

    def event(self, machine: Machine, kind: str, fields: Mapping[str, Any], now: float) -> None:
        """Note a peer's own event."""
        if kind == "dead":
            self._always.declared_dead(machine, bytes.fromhex(str(fields["peer"])), now)
        if machine.process is None:
            return
        peer = machine.process.peer
        if kind == "phase" and fields["phase"] == "announce":
            self._announced(machine.index, peer, int(fields.get("fragment", 0)))
        elif kind == "phase" and fields["phase"] == "commit":  # The step of an overlapped method follows later.
            self._always.committed(machine, (int(fields.get("fragment", 0)), int(fields["round"])), now)
        elif kind in ("ready", "synced", "lineage"):
            self._installed(machine, peer, fields.get("fragment"), kind)
            if kind == "ready":
                self._gave_up.discard(machine.index)
                self.changed(machine, now)
            if kind == "lineage":
                place = int(fields.get("fragment", 0)), int(fields["round"])
                self._always.founded(machine, str(fields["lineage"]), now, place)

    def _announced(self, index: int, peer: Peer, fragment: int) -> None:
        """Record what a peer announces.

        A gossip group may have been drawn again since the contribution was encoded, with another attempt. Other contributions
        are recorded for the replay of the round.
        """
        session = peer.session if self._fragments is None else peer.fragments.sessions[fragment]
        if isinstance(session, GossipSession) and index in self._read:
            group, (theta, trained) = session.current, self._read.pop(index)
            self.commits.encoded(peer.identity.peer_id, group.round, group.attempt + 1, theta, trained)
        if self.replays and isinstance(session, RoundSession):
            current = session.current
            me, source = peer.identity.peer_id, current.data_plane.source
            self.replays[fragment].announced(me, current.round, current.attempt, source)

    def _installed(self, machine: Machine, peer: Peer, number: int | None, kind: str) -> None:
        """Record a state that a peer did not compute, or continues in another lineage.

        `kind`: the event that reports it, "ready", "synced" or "lineage". It is the state of one fragment, or of all that the
        peer holds.
        """
        index, replica, disk = machine.index, peer.replica, machine.disk
        for one, held, _ in replica.each(peer.layout):
            if self.replays and number in (None, one):
                self.replays[one].installed(index, held)
        if self._fragments is not None:
            record = self._fragments.founded if kind == "lineage" else self._fragments.installed
            record(index, peer.fragments.replica, number)
        else:
            state = index, replica.round, replica.digest, _trained(replica), replica.lineage.hex()
            if kind == "lineage":
                self.commits.founded(*state)
            else:
                lost = kind == "synced" or disk.lied or disk.rotted
                self.commits.installed(*state, residual=_residual(replica), lost=lost)

    def committed(self, index: int, peer: Peer, outcome: Outcome) -> None:
        """Check a round that a peer has applied."""
        if index not in self._honest:
            return
        replica = peer.replica
        fragment = outcome.commit.proposal.fragment if outcome.commit is not None and self._fragments is not None else 0
        for number, one, layout in replica.each(peer.layout):
            if number == fragment and self.replays:
                self.replays[number].committed(index, one, layout, outcome)
        if self._fragments is not None:
            self._fragments.committed(index, peer.fragments.replica, outcome)
        else:
            name = replica.lineage.hex()
            state = _trained(replica)
            residual = _residual(replica)
            self.commits.committed(index, replica.round, replica.digest, state, outcome, name, residual=residual)

    def ended(self, machine: Machine, failure: BaseException | None, now: float) -> None:
        """Check that a process may end; `failure`: the error of a process that gave up or crashed."""
        index = machine.index
        (self._fragments or self.commits).ended(index)
        self._read.pop(index, None)
        for replay in self.replays.values():
            replay.ended(index)
        if failure is not None:
            self._gave_up.add(index)
        self.changed(machine, now)
        if failure is not None and index in self._honest and not self._always.excuses(machine, failure, now):
            self._on_violation("crash", index, _described(failure))


def _trained(replica: Replica) -> Floats:
    """Return a replica's state without the data ledger."""
    return replica.state if replica.ledger is None else replica.state[: replica.vectors * replica.size]


def _residual(replica: Replica) -> Floats:
    """Return the residual of a gossip replica; empty for others."""
    return replica.residual if isinstance(replica, GossipReplica) else NONE


def _described(failure: BaseException) -> str:
    """Describe an error, the first of a group, with the line it comes from."""
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    frames = traceback.extract_tb(failure.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(failure).__name__}: {failure}{place}"
