"""Whole swarm in virtual time: full peers, simulated network and disks, faults, invariants, journal."""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.transport.circuits.limits import CircuitLimits
from thinwire.sims.engine import virtual_loop
from thinwire.sims.invariants.always import LOOK_SECONDS
from thinwire.sims.invariants.oracles import Violation
from thinwire.sims.invariants.swarm import SwarmInvariants
from thinwire.sims.network.circuits import LIMITS
from thinwire.sims.network.link import Gateway
from thinwire.sims.network.network import SimNet
from thinwire.sims.network.translator import Translator
from thinwire.sims.peers import lies
from thinwire.sims.peers.learner_factory import LearnerFactory
from thinwire.sims.peers.machine import Machine, SimLearner
from thinwire.sims.results.journal import WORLD, Journal, PeerSample, Watch, fault_fields
from thinwire.sims.scenario.faults import LIES, Fault, draw
from thinwire.sims.scenario.scenario import Scenario
from thinwire.sims.simulation.fault_injector import PRIVATE, FaultInjector
from thinwire.swarm.identity.admission_token import Inviter
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite, Seed
from thinwire.swarm.identity.stage_claim import Seat
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.parser import sign
from thinwire.swarm.membership.presets import WAN, Preset
from thinwire.swarm.messages.registry import PeerId

ENCODED = 16
"""Largest swarm whose frames travel as signed bytes; in larger ones they are passed by reference."""

WINDOW = 8
"""Bulk frames in transit in one direction of a link."""

SEEDS = 4
"""Number of peers named in an invite."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Result of a simulation. `trace`: hash of everything that happened; `ended`: virtual seconds."""

    scenario: Scenario
    faults: tuple[Fault, ...]
    journal: Journal
    trace: str
    violations: tuple[Violation, ...]
    ended: float


@cache
def _identity(index: int) -> Identity:
    return Identity.generate(index.to_bytes(32, "big"))


def simulate(
    scenario: Scenario,
    *,
    seed: int | None = None,
    faults: tuple[Fault, ...] | None = None,
    watch: Watch | None = None,
    preset: Preset = WAN,
    stall: float | None = None,
    still: bool = False,
    first: bool = False,
) -> SimulatedRun:
    """Play a scenario. `seed` and `faults` (all of them, including drawn ones) replace the scenario's own.

    watch: called after each sample. preset: timing of the membership. stall: longest time in seconds without a round
    while no fault is active. still: check that no peer stands still, even during faults. first: stop at the first
    violation. An error in the swarm is a Violation, not an exception.
    """
    scenario = scenario.with_(seed=seed, faults=faults)
    if scenario.mix:
        kinds = tuple(sorted(LIES))
        drawn = draw(scenario.seed, scenario.mix, len(scenario.peers), scenario.duration, liars=kinds)
        every = tuple(sorted((*scenario.faults, *drawn), key=lambda fault: (fault.at, fault.kind, fault.peers)))
        scenario = scenario.with_(faults=every)
    journal = Journal(tuple(peer.name for peer in scenario.peers))
    holder: list[SimWorld] = []
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        async def main() -> None:
            holder.append(SimWorld(scenario, journal, watch, preset, stall, still, first, folder))
            await holder[0].play()

        violations: list[Violation] = []
        try:
            virtual_loop.run(main(), seed=scenario.seed, limit=scenario.duration + 600.0)
        except virtual_loop.SimFailure as error:
            cause = f" ({error.__cause__!r})" if error.__cause__ is not None else ""
            violations = [Violation(holder[0].loop.time(), "crash", WORLD, f"{type(error).__name__}: {error}{cause}")]
    world = holder[0]
    violations = [*world.violations, *violations]
    return SimulatedRun(scenario, scenario.faults, journal, world.trace, tuple(violations), world.loop.time())


def _circuit_limits(preset: Preset) -> CircuitLimits:
    """Return the limits of circuits for a timing of the membership.

    A direct dial is given up before a peer is called dead, as on the internet.
    """
    return replace(LIMITS, direct=LIMITS.direct * min(1.0, preset.probe_period / WAN.probe_period))


class SimWorld:
    """World of one simulation; made inside `virtual_loop.run`."""

    def __init__(
        self,
        scenario: Scenario,
        journal: Journal,
        watch: Watch | None,
        preset: Preset,
        stall: float | None,
        still: bool,
        first: bool,
        folder: Path,
    ) -> None:
        self.scenario, self.journal, self.seed, self.preset = scenario, journal, scenario.seed, preset
        self.loop = virtual_loop.current()
        self.violations: list[Violation] = []
        self.trace = ""
        self._ended_processes = 0
        """Processes that have ended since the last look for reference cycles."""
        self._watch, self._first, self.folder = watch, first, folder
        self._learners = LearnerFactory(scenario, folder)
        regions: dict[PeerId, str] = {}
        latencies = {pair: path.rtt / 2 for pair, path in scenario.paths.items()}
        self.net = SimNet(
            scenario.seed,
            latency=lambda sender, receiver: latencies[regions[sender], regions[receiver]],
            stream=lambda sender, receiver: scenario.paths[regions[sender], regions[receiver]].stream,
            jitter=scenario.jitter,
            loss=scenario.loss,
            window=WINDOW,
            encode=len(scenario.peers) <= ENCODED,
            circuits=_circuit_limits(preset) if scenario.translated else None,
        )
        self.gateways: Mapping[str, Gateway] = {
            name: Gateway(self.net, up, down) for name, (down, up) in scenario.lines.items()
        }
        self.translators: Mapping[str, Translator] = {site: Translator(kind) for site, kind in scenario.nats.items()}
        self.signed = sign(scenario.manifest.encode(), _identity(0))
        self.manifest = self.signed.verify()
        self.run_id = self.manifest.run_id(_identity(0).public_key)
        self.machines = [Machine(self, spec, _identity(spec.index)) for spec in scenario.peers]
        regions |= {machine.identity.peer_id: machine.spec.region for machine in self.machines}
        lying = {fault.peers[0] for fault in scenario.faults if fault.kind == "liar"}
        honest = [m.index for m in self.machines if not m.spec.liar and m.index not in lying]
        self.invariants = SwarmInvariants(
            self.manifest,
            self.machines,
            honest,
            self.on_violation,
            preset=preset,
            slowest=max(spec.step_seconds for spec in scenario.peers),
            stall=stall,
            still=still,
            window=WINDOW,
        )
        self._faults = FaultInjector(self.net, self.machines)
        self._over = asyncio.Event()

    def on_violation(self, oracle: str, peer: int, detail: str) -> None:
        """Report a violation."""
        violation = Violation(self.loop.time(), oracle, peer, detail)
        self.violations.append(violation)
        self.journal.event(violation.at, peer, "violation", {"oracle": oracle, "detail": detail})
        if self._first:
            self._over.set()

    # Course of a simulation

    async def play(self) -> None:
        """Run from the first boot to the end."""
        for machine in self.machines:
            self.net.at(machine.spec.join, machine.boot)
            if machine.spec.leave is not None:
                self.net.at(machine.spec.leave, machine.leave)
        for fault in self.scenario.faults:
            self.net.at(fault.at, self._begin, fault)
        end = self.loop.time() + self.scenario.duration
        look, sample = LOOK_SECONDS, 0.0
        while self.loop.time() < end and not self._over.is_set():
            if self.loop.time() >= sample:
                self._sample()
                sample += self.scenario.interval
            if self.loop.time() >= look:
                self.invariants.look(self.loop.time())
                look += LOOK_SECONDS
            try:
                async with asyncio.timeout_at(min(look, sample, end)):
                    await self._over.wait()
            except TimeoutError:
                pass
        self._sample()
        self.trace = self.loop.trace
        for transport in self.net.peers.values():  # No peer is informed of the end of another.
            for link in transport.links.values():
                link.dissolve()
            transport.links.clear()
        for machine in self.machines:
            machine.kill("the end", crash=False)

    def _begin(self, fault: Fault) -> None:
        if not self._faults.begin(fault):
            return
        now = self.loop.time()
        self.loop.record(b"fault", repr(fault).encode())
        self.journal.event(now, WORLD, "fault", fault_fields(fault))
        touched = self._faults.touched(fault)
        self.invariants.fault(touched, now + fault.seconds, private=fault.kind in PRIVATE)
        if fault.seconds:
            self.net.at(now + fault.seconds, self._end, fault)

    def _end(self, fault: Fault) -> None:
        self._faults.end(fault)
        self.journal.event(self.loop.time(), WORLD, "fault", fault_fields(fault, over=True))

    def _sample(self) -> None:
        rows: list[PeerSample | None] = []
        for machine in self.machines:
            process = machine.process
            if process is None or process.transport is None or process.lifecycle is None:
                rows.append(None)
                continue
            up, down = process.transport.totals()
            learner, loss = process.learner, process.lifecycle.report.loss
            busy = learner.watch.busy if learner is not None else 0.0
            number = process.peer.replica.round if process.ready else 0
            rows.append(PeerSample(up, down, number, loss, process.lifecycle.report.phase, busy))
        self.journal.sample(self.loop.time(), tuple(rows))
        if self._watch is not None:
            self._watch(self.journal)

    # Interface of machines

    def contacts(self, me: int) -> Invite:
        """Return an invite that names running peers; first those that can be dialled."""
        up = [m for m in self.machines if m.index != me and m.process is not None and m.process.ready]
        up.sort(key=lambda m: m.translator is not None)
        named = up[:SEEDS] or [m for m in self.machines if m.index != me][:1]
        invite = Invite(self.run_id, tuple(Seed(m.address, m.identity.transport_public) for m in named))
        author = self.machines[0].identity
        policy = self.manifest.admission.policy(self.run_id, author.public_key)
        return Inviter(author, b"", policy).invite(invite)

    def learner(self, machine: Machine, manifest: Manifest) -> SimLearner:
        """Return the learner of a peer's process."""
        return self._observed(machine, self._learners.whole(machine.spec, manifest))

    def stage(self, machine: Machine, manifest: Manifest, vocab: int, seat: Seat) -> SimLearner:
        """Return the learner of a peer that holds a stage."""
        assert machine.process is not None
        return self._observed(machine, self._learners.stage(machine.process.peer, machine.spec, manifest, vocab, seat))

    def _observed(self, machine: Machine, learner: SimLearner) -> SimLearner:
        learner.on_encode = lambda theta, trained: self.invariants.encoded(machine, learner, theta, trained)
        return learner

    def wait_for(self, machine: Machine) -> int:
        """Return the number of peers for which a peer waits before it trains.

        The founder waits at its first start for all peers that arrive with it.
        """
        first = machine.index == 0 and machine.starts == 1
        return sum(m.spec.join <= machine.spec.join for m in self.machines) if first else 1

    def event(self, machine: Machine, kind: str, fields: Mapping[str, Any]) -> None:
        """Record a peer's own event."""
        now, process = self.loop.time(), machine.process
        self.invariants.event(machine, kind, fields, now)
        if process is not None and kind == "ready" and machine.lie:
            lies.make_liar(process, machine.lie)
        if process is not None and kind == "uncommitted" and process.learner is not None:
            process.learner.uncommitted()
        if kind != "phase":
            self.journal.event(now, machine.index, kind, fields)

    def committed(self, machine: Machine, outcome: Outcome) -> None:
        """Record that a peer has applied a round."""
        if machine.process is not None:
            peer = machine.process.peer
            self.loop.record(b"round", machine.identity.peer_id, peer.replica.digest)
            self.invariants.committed(machine.index, peer, outcome)

    def booted(self, machine: Machine) -> None:
        """Record that a process runs.

        Ended processes are in reference cycles. They are freed when there are as many as peers: then they never take more
        memory than those that run, and a look at all objects is rare.
        """
        if self._ended_processes >= len(self.machines):
            gc.collect()
            self._ended_processes = 0
        now = self.loop.time()
        self.journal.event(now, machine.index, "up")
        self.invariants.changed(machine, now)

    def ended(self, machine: Machine, reason: str, failure: BaseException | None) -> None:
        """Record that a process ended."""
        self._ended_processes += 1
        now = self.loop.time()
        self.journal.event(now, machine.index, "down", {"reason": reason})
        self.invariants.ended(machine, failure, now)
