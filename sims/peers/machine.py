"""Machine of one simulated peer: clocks, disk, network address, and the processes that run on it.

A process is a real Peer with a real PeerLifecycle. A kill cuts it off from the network and the disk at once, and then
cancels its tasks: whatever they do at their end has no effect.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from thinwire.collectives.outcome import Outcome
from thinwire.collectives.transport.interface import Admit, Transport
from thinwire.node.membership import join
from thinwire.node.membership.join import DuplicateKey
from thinwire.node.peer.lifecycle import PeerLifecycle
from thinwire.node.peer.peer import Peer
from thinwire.node.peer.reporter import Reporter
from thinwire.node.pipeline.groups.learner_factory import next_of
from thinwire.node.runtime.directories import RunDirectory
from thinwire.node.runtime.environment import Environment
from thinwire.node.state.checkpoint_store import LATEST
from thinwire.node.training.learner import Learner
from thinwire.sims.engine.disk import SimDisk
from thinwire.sims.engine.mounted_disk import MountedDisk
from thinwire.sims.engine.virtual_loop import HOST, SimLoop
from thinwire.sims.network.link import Gateway
from thinwire.sims.network.network import EPOCH, SimNet
from thinwire.sims.network.translator import Translator
from thinwire.sims.network.transport import SimTransport
from thinwire.sims.peers.learners import StubLearner, TorchLearner
from thinwire.sims.peers.pipeline_learners import StagedLearner, seated
from thinwire.sims.scenario.scenario import PeerSpec
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite
from thinwire.swarm.identity.stage_claim import Seat
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.parser import SignedManifest
from thinwire.swarm.membership.presets import Preset

RESTART_SECONDS = 5.0
"""Seconds after which a process that gave up (it found no swarm) is started again, as by a supervisor."""

HOME = Path("/", "home")

SEARCH_SECONDS = 20.0
"""Seconds for which a peer with a checkpoint searches for the swarm: runs are shorter than real ones."""

SimLearner = StubLearner | TorchLearner | StagedLearner
"""Learner of a simulated peer."""


class MachineClocks:
    """Clocks of one machine, in seconds: `now` drifts, `wall` drifts and is off by `jump`."""

    def __init__(self, loop: SimLoop) -> None:
        self.jump = 0.0
        self._loop, self._rate, self._base, self._since = loop, 1.0, 0.0, 0.0

    def now(self) -> float:
        return self._base + (self._loop.now - self._since) * self._rate

    def wall(self) -> float:
        return EPOCH + self.now() + self.jump

    def drift(self, fraction: float) -> None:
        """Run fast by a fraction from now on (slow if negative)."""
        self._base, self._since = self.now(), self._loop.now
        self._rate = 1.0 + fraction


class MachineHost(Protocol):
    """Parts of the world that a machine uses."""

    loop: SimLoop
    net: SimNet
    seed: int
    run_id: bytes
    signed: SignedManifest
    preset: Preset
    gateways: Mapping[str, Gateway]
    translators: Mapping[str, Translator]

    def contacts(self, me: int) -> Invite:
        """Return an invite to the run that names some present peers."""
        ...

    @property
    def machines(self) -> Sequence[Machine]: ...

    @property
    def folder(self) -> Path: ...

    def learner(self, machine: Machine, manifest: Manifest) -> SimLearner: ...

    def stage(self, machine: Machine, manifest: Manifest, vocab: int, seat: Seat) -> SimLearner: ...

    def wait_for(self, machine: Machine) -> int: ...

    def event(self, machine: Machine, kind: str, fields: Mapping[str, Any]) -> None: ...

    def committed(self, machine: Machine, outcome: Outcome) -> None: ...

    def booted(self, machine: Machine) -> None: ...

    def ended(self, machine: Machine, reason: str, failure: BaseException | None) -> None: ...


class Machine:
    """Machine of one peer. `process`: the running one; `up`: there is one; `starts` counts processes."""

    def __init__(self, world: MachineHost, spec: PeerSpec, identity: Identity) -> None:
        self.world, self.spec, self.index, self.identity = world, spec, spec.index, identity
        self.address = f"10.{spec.index >> 16}.{spec.index >> 8 & 255}.{spec.index & 255}:7000"
        own = Translator(spec.nat) if spec.nat != "none" else None
        self.translator = world.translators.get(spec.site, own)
        self.clocks = MachineClocks(world.loop)
        self.disk = SimDisk(random.Random(f"{world.seed}/disk/{spec.index}"))
        self.process: Process | None = None
        self.starts = 0
        self.seat: Seat | None = None
        """Seat of the next process, if the peer moves to another stage."""
        self.lie = spec.liar
        self.frozen = self.gone = False

    @property
    def up(self) -> bool:
        return self.process is not None

    @property
    def saved(self) -> bool:
        """True if there is a checkpoint on its disk."""
        return LATEST in self.disk.names(RunDirectory(HOME).checkpoints)

    @property
    def holds(self) -> bool:
        """True if a process runs and has a state, in memory or in a checkpoint.

        A checkpoint that it cannot read does not count if a fault may have damaged the disk.
        """
        process, faulty = self.process, self.disk.lied or self.disk.rotted
        return process is not None and (process.entered or (self.saved and not (faulty and process.unreadable)))

    def boot(self) -> None:
        """Start a process, unless one runs or the peer has left for good."""
        if self.process is None and not self.gone:
            self.starts += 1
            self.process = Process(self)
            self.world.booted(self)
            self.process.start()

    def kill(self, reason: str = "killed", *, crash: bool = True) -> None:
        """End the process at once, and with `crash` the machine, too."""
        process, self.process = self.process, None
        if process is None:
            return
        self.thaw()
        process.cut_off()
        if crash:
            self.disk.crash()
        self.world.ended(self, reason, None)

    def lose_disk(self) -> None:
        """Replace the disk by an empty one; the key is not on it."""
        self.disk = SimDisk(random.Random(f"{self.world.seed}/disk/{self.index}/{self.starts}"))

    def leave(self) -> None:
        """Ask the process to leave gracefully, and start no further one."""
        self.gone = True
        if self.process is not None and self.process.lifecycle is not None:
            self.process.lifecycle.stop()

    def freeze(self) -> None:
        """Stop the process like SIGSTOP."""
        if self.process is not None and not self.frozen:
            self.frozen = True
            self.world.loop.freeze(self.index)
            if self.process.transport is not None:
                self.process.transport.awake.clear()

    def thaw(self) -> None:
        if self.frozen:
            self.frozen = False
            self.world.loop.thaw(self.index)
            if self.process is not None and self.process.transport is not None:
                self.process.transport.awake.set()


class Process:
    """One process of a simulated peer; a restart of its machine creates the next one."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.number = machine, machine.starts
        self.alive = True
        self.lifecycle: PeerLifecycle | None = None
        self.entered = False
        """True if it has a state."""
        self.transport: SimTransport | None = None
        self.learner: SimLearner | None = None
        self.task: asyncio.Task[None] | None = None
        self.others: list[asyncio.Task[None]] = []
        """Task beside the lifecycle: the messages of a liar."""
        self.invite: Invite | None = None
        self.peer: Peer
        self._disk = MountedDisk(machine.disk)

    @property
    def ready(self) -> bool:
        """True if the peer is a member with a state and rounds."""
        return self.lifecycle is not None and self.peer.ready

    @property
    def unreadable(self) -> bool:
        """True if it has found that it can read none of the checkpoints on its disk."""
        return self.lifecycle is not None and bool(self.peer.checkpointer.unreadable)

    def start(self) -> None:
        context = contextvars.copy_context()
        context.run(HOST.set, self.machine.index)
        self.task = self.machine.world.loop.create_task(self._run(), context=context)

    def cut_off(self) -> None:
        """Cut the process off from network and disk, and end it."""
        self.alive = self._disk.mounted = False
        if self.transport is not None:
            self.transport.vanish()
        for task in (self.task, *self.others):
            if task is not None:
                task.cancel()

    async def _run(self) -> None:
        machine, world = self.machine, self.machine.world
        try:
            await self._run_peer()
        except HintedError as error:
            if self.alive:
                restarts = not isinstance(error, DuplicateKey)
                self._end(f"{type(error).__name__}: {error}", error)
                if restarts:
                    world.net.at(world.loop.time() + RESTART_SECONDS, machine.boot)
        except Exception as error:  # The world records every error.
            if self.alive:
                self._end("crashed", error)
        else:
            self._end("left", None)
            if machine.seat is not None:
                machine.boot()

    def _end(self, reason: str, failure: BaseException | None) -> None:
        self.alive, self.machine.process = False, None
        if self.transport is not None and self.transport.alive:
            self.transport.vanish()
        self.machine.world.ended(self.machine, reason, failure)

    async def _run_peer(self) -> None:
        machine, world = self.machine, self.machine.world
        rng = random.Random(f"{world.seed}/{machine.index}/{self.number}")
        environment = Environment(
            now=machine.clocks.now, wall=machine.clocks.wall, rng=rng, disk=self._disk, write=self._work
        )
        report = _Report(self, self._event, wall=machine.clocks.wall, name=machine.spec.name)
        directory = RunDirectory(HOME)
        self.peer = Peer(
            machine.identity, world.run_id, environment, directory, world.preset, report.emit, machine.spec.site
        )
        self.lifecycle = PeerLifecycle(
            self.peer,
            report,
            begin=self._begin,
            learn=self._learn,
            work=self._work,
            wait_for=world.wait_for(machine),
            moves=self._moves,
        )
        await self.lifecycle.run()

    def _moves(self, learner: Learner) -> bool:
        self.machine.seat = next_of(learner.inner) if isinstance(learner, StagedLearner) else None
        return self.machine.seat is not None

    def _event(self, kind: str, fields: Mapping[str, object]) -> None:
        self.entered |= kind == "ready"
        if self.alive:
            self.machine.world.event(self.machine, kind, fields)

    async def _begin(self, peer: Peer) -> bool:
        world = self.machine.world
        if not self.machine.index:
            return await peer.found(world.signed, self._open)
        self.invite = world.contacts(self.machine.index)
        search = SEARCH_SECONDS if self.machine.saved else join.SEARCH_SECONDS
        return await peer.arrive(self.invite, self._open, search)

    async def _open(self, admit: Admit) -> Transport:
        machine, spec = self.machine, self.machine.spec
        if not self.alive:  # Killed before its first step: the tasks that it has begun are cancelled only later.
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        transport = machine.world.net.transport(machine.identity, machine.world.run_id, admit, machine.address)
        transport.uplink.rate, transport.downlink.rate = spec.up, spec.down
        transport.loss, transport.jitter = spec.loss, spec.jitter
        transport.gateway = machine.world.gateways.get(spec.site)
        transport.translator = machine.translator
        transport.wall = lambda: int(machine.clocks.wall())
        self.transport = transport
        return transport

    async def _learn(self, manifest: Manifest) -> Learner:
        world, spec = self.machine.world, self.machine.spec
        new_seat, self.machine.seat = self.machine.seat, None
        origin = world.machines[spec.origin].identity.peer_id
        chosen, vocab = await seated(self.peer, manifest, spec, origin, world.folder, new_seat)
        if chosen is None:
            self.peer.hold(spec.held)
            self.learner = world.learner(self.machine, manifest)
        else:
            self.learner = world.stage(self.machine, manifest, vocab, chosen)
        return self.learner

    async def _work(self, function: Callable[[], Any]) -> Any:
        """Run a function: computing takes no virtual time, but disk operations do."""
        disk = self.machine.disk
        disk.spent = 0.0
        result = function()
        if disk.spent:
            await asyncio.sleep(disk.spent)
        return result


class _Report(Reporter):
    """Reporter that passes each outcome to the world."""

    def __init__(self, process: Process, write: Callable[[str, Mapping[str, object]], None], **rest: Any) -> None:
        super().__init__(write, **rest)
        self._of = process

    def emit(self, kind: str, fields: Mapping[str, object]) -> None:
        self._write(kind, fields)  # No lines for people: they are not read here.

    def round(
        self, peer: Peer, outcome: Outcome, *, loss: float | None, seconds: float, steps: int, weight: int
    ) -> None:
        super().round(peer, outcome, loss=loss, seconds=seconds, steps=steps, weight=weight)
        if self._of.alive:
            self._of.machine.world.committed(self._of.machine, outcome)
