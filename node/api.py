"""A training loop of one's own in a swarm: `join`, `wrap`, and then the loop as it was.

The loop's thread trains. A background thread keeps the peer alive: it answers others, keeps time, and exchanges while the
loop waits in a step that ends a round.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from thinwire.compression.codec import Floats
from thinwire.compression.kernels import warm_up
from thinwire.swarm.manifest import Manifest, ManifestError
from thinwire.swarm.manifest import parse as parse_manifest
from torch import nn

from .background import Background, SwarmError
from .config import load
from .console import LOGGER
from .fragments import layout_of
from .inner import load_optimizer, save_optimizer
from .lock import hold
from .opening import Entry, arriving, duplicate_key, founding
from .optimizer import SwarmOptimizer
from .report import Reporter
from .snapshot import PrivateState
from .status import PeerStatus, Status
from .waiting import cancelled

SAVE_SECONDS = 120.0
"""Time between checkpoints; the last round is always saved."""

LINGER_SECONDS = 10.0
"""How long the others are given to fetch the last round from us before we leave."""

LEAVE_SECONDS = 10.0
"""How long saying goodbye may take."""

STATUS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RoundReport:
    """How the last exchange of this peer went.

    round: the last round committed here. committed: whether this exchange committed one. contributors: peers whose work is
    in it. missing: ids (hexadecimal) of peers that were left out, with reasons. seconds: how long the loop waited.
    """

    round: int
    committed: bool
    contributors: int
    seconds: float
    missing: Mapping[str, str] = field(default_factory=dict)


def join(
    invite_or_toml: str | os.PathLike[str],
    *,
    home: str | os.PathLike[str] | None = None,
    name: str | None = None,
    host: str | None = None,
    port: int | None = None,
    ports: str | None = None,
    advertise: str | None = None,
) -> Swarm:
    """Take part in a run: the one an invite names, or one's own by the path of its manifest (a name that ends in .toml).

    A manifest founds the run, or comes back to it; its [model] has kind = "custom". Returns once the run's manifest is
    known: with an invite, once a peer has let us in. The other arguments are settings as of node.toml, which go before
    those of the environment and the file; each peer of a machine needs a `home` of its own.

    Raises InviteError, ManifestError, ConfigError, InUseError (that home), PortTaken, NoSwarm, Refused and
    ManifestMismatch, all of them HintedError.
    """
    flags = dict(
        home=Path(home) if home is not None else None,
        name=name, host=host, port=port, ports=ports, advertise=advertise,
    )  # fmt: skip
    config = load(flags, os.environ)
    text = os.fspath(invite_or_toml)
    if isinstance(invite_or_toml, str) and not text.endswith(".toml"):
        return Swarm(arriving(text, config))
    return Swarm(founding(_read_custom(Path(text)), config))


def _read_custom(path: Path) -> bytes:
    try:
        toml = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror}", "name the run's TOML") from None
    if parse_manifest(toml, path.name).model.kind != "custom":
        raise ManifestError(
            f"{path.name}: model.kind is not custom",
            'write kind = "custom" under [model] to train a module of your own',
        )
    return toml


class Swarm:
    """One peer of a run, made by `join`. Leave it with its `with` block, or by `leave`."""

    def __init__(self, entry: Entry) -> None:
        config = entry.config
        self.last: RoundReport | None = None
        """How the last exchange went."""
        self._identity, self._run_id = entry.identity, entry.run_id
        self._optimizer: SwarmOptimizer | None = None
        self._watch: asyncio.Task[None] | None = None
        self._saved_at, self._saved_round = time.monotonic(), 0
        self._exchanged_at = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(hold(config.directories.lock))
            self._report = Reporter(
                config.directories.run(entry.run_id).events,
                config.directories.status,
                name=config.name,
                device="",
                now=time.monotonic,
                wall=time.time,
            )
            stack.callback(self._report.close)
            self._background = Background("thinwire")
            stack.callback(self._background.stop)
            self._peer = entry.peer(self._report.emit)
            stack.callback(self._goodbye)
            self._joins = self._background.call(self._open(entry))
            self._resources: ExitStack | None = stack.pop_all()
        atexit.register(self.leave)

    # --- what there is to know

    @property
    def invite(self) -> str:
        """What others pass to `join` (or to `thinwire join`); it names this peer and some more. Empty: none can be dialled."""
        invite = self._background.ask(self._peer.invite)
        return invite.code() if invite is not None else ""

    @property
    def manifest(self) -> Manifest:
        """What all peers of the run have agreed on."""
        return self._peer.manifest

    @property
    def steps(self) -> int:
        """H: inner steps of a round."""
        return self._peer.manifest.outer.steps

    @property
    def round(self) -> int:
        """The last committed round; 0 before the first."""
        return self._peer.replica.round if self._peer.ready else 0

    @property
    def digest(self) -> str:
        """Names the state after that round, parameters and outer momentum (hexadecimal): equal on all peers."""
        return self._peer.replica.digest.hex() if self._peer.ready else ""

    @property
    def done(self) -> bool:
        """Whether the run has had all its rounds (`run.rounds`; never, when that is 0). Raises SwarmError, as `check`."""
        self.check()
        last = self._peer.manifest.run.rounds
        return bool(last) and self.round >= last

    @property
    def status(self) -> Status:
        """Everything else: what `thinwire status` shows of this peer."""
        return self._background.ask(lambda: self._report.snapshot(self._peer, self._identity.peer_id, self._run_id))

    @property
    def peers(self) -> tuple[PeerStatus, ...]:
        """The others, as this peer sees them."""
        return self.status.peers

    def check(self) -> None:
        """Raises what has gone wrong in the background, SwarmError or another HintedError; also after `leave`."""
        self._background.check()

    # --- training

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, batch: int = 1) -> SwarmOptimizer:
        """Become a member with this model; train with the optimizer that this gives in place of yours.

        All trainable parameters of the model are averaged, each as one value however often it is tied; frozen ones and
        buffers (the statistics of BatchNorm) stay local. Whoever joins gets the swarm's parameters written into the model.
        An earlier life's checkpoint under this home is taken up, with the state of the optimizer. `batch`: samples of one
        step, the weight of this peer's work in the mean; see `SwarmOptimizer.step`.

        Blocks until the swarm's state is here. Raises ManifestMismatch when the swarm trains another model, ValueError for
        a model that cannot be averaged or does not hold the optimizer's parameters.
        """
        if self._optimizer is not None:
            raise ValueError("this swarm has a model already: one run trains one model")
        if batch < 0:
            raise ValueError(f"a batch of {batch}")
        module = getattr(model, "_orig_mod", model)  # what torch.compile wraps has the names
        layout = layout_of(module)
        if not layout.total:
            raise ValueError("the model has no trainable parameters: nothing to average")
        known = {id(parameter) for parameter in module.parameters()}
        if any(id(tensor) not in known for group in optimizer.param_groups for tensor in group["params"]):
            raise ValueError("the optimizer holds tensors that are not parameters of this model: they would stay local")
        self._module, self._inner = module, optimizer
        self._devices = {p.device for p in module.parameters() if p.device.type == "cuda"}

        def read(start: int, stop: int, out: Floats) -> None:
            layout.read(module, out, start)

        def write(theta: Floats) -> None:
            layout.write(module, theta)
            self._synchronize()

        theta = np.empty(layout.total, np.float32)
        layout.read(module, theta)
        take_up = self._peer.take_up(
            layout, theta, read=read, write=write, work=self._background.work, joins=self._joins
        )
        self._report.phase = "joining" if self._joins else "starting"
        self._background.call(take_up)
        self._restore()
        self._saved_round = self.round
        self._report.phase = "training"
        self._optimizer = SwarmOptimizer(self, optimizer, batch)
        return self._optimizer

    @property
    def overtaken(self) -> bool:
        """Whether the others have committed the round in progress without waiting for us."""
        return self._peer.session.overtaken

    def exchange(self, *, steps: int, weight: int, loss: float | None) -> bool:
        """The round after `steps` inner steps on `weight` samples: what `SwarmOptimizer.step` does by itself.

        True when the model now has the swarm's parameters; False when it kept its own because no round committed.
        """
        before, began = self._peer.replica.digest, time.monotonic()
        self._synchronize()
        weight = min(weight, self._peer.manifest.max_weight)
        self._report.speed = weight / max(1e-9, began - self._exchanged_at)
        self._background.call(self._sync(steps=steps, weight=weight, loss=loss, began=began))
        self._exchanged_at = time.monotonic()
        if self._exchanged_at > self._saved_at + SAVE_SECONDS:
            self._save()
        return self._peer.replica.digest != before

    async def _sync(self, *, steps: int, weight: int, loss: float | None, began: float) -> None:
        peer, report = self._peer, self._report
        report.phase = "exchanging"
        outcome = await peer.rounds.sync(weight=weight, loss=loss or 0.0, speed=report.speed)
        report.phase = "training"
        seconds, count = time.monotonic() - began, len(outcome.contributors)
        committed = outcome.commit is not None
        if committed:
            report.round(
                peer,
                loss=math.nan if loss is None else loss,
                contributors=count,
                missing=outcome.missing,
                seconds=seconds,
                steps=steps,
                tokens=weight,
            )
            peer.drop_anchor()
        else:
            report.uncommitted(peer)
        missing = {who.hex(): reason for who, reason in outcome.missing.items()}
        self.last = RoundReport(peer.replica.round, committed, count, seconds, missing)

    def _synchronize(self) -> None:
        """Two threads use the parameters, never at once; on a GPU that takes waiting for what is still queued there."""
        for device in self._devices:
            torch.cuda.synchronize(device)

    # --- keeping

    def _save(self) -> None:
        # Some optimizers keep numbers in their state too: one restored by halves is worse than one that warms up anew.
        values = (value for state in self._inner.state.values() for value in state.values())
        whole = all(value is None or isinstance(value, torch.Tensor) for value in values)
        private = PrivateState(save_optimizer(self._module, self._inner), {}) if whole else None
        self._report.checkpoint = self._peer.save(private) or self._report.checkpoint
        self._saved_at, self._saved_round = time.monotonic(), self.round

    def _restore(self) -> None:
        private = self._peer.private
        if private is not None:
            try:
                load_optimizer(self._module, self._inner, private.tensors)
            except ValueError as error:
                fields = {"detail": f"the inner optimizer's state warms up anew: {error}"}
                self._background.ask(lambda: self._report.emit("fresh", fields))

    # --- the background

    async def _open(self, entry: Entry) -> bool:
        await self._background.work(warm_up)
        joins = await entry.begin(self._peer)
        self._watch = asyncio.create_task(self._keep_watch())
        return joins

    async def _keep_watch(self) -> None:
        peer = self._peer
        while True:
            self._report.status(peer, self._identity.peer_id, self._run_id)
            if peer.running.done():
                error = None if peer.running.cancelled() else peer.running.exception()
                return self._background.fail(error or SwarmError("the swarm's session has ended"))
            if peer.ready and peer.presence.duplicate.is_set():
                return self._background.fail(duplicate_key(self._identity))
            await asyncio.sleep(STATUS_SECONDS)

    # --- the end

    def __enter__(self) -> Swarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.leave()
            return
        try:
            self._end(linger=False)
        except Exception:
            LOGGER.exception("leaving the swarm failed")

    def leave(self) -> None:
        """Save, let the others get what they need from us, say goodbye, close. A second call does nothing.

        Raises what has gone wrong in the background and has not been raised yet.
        """
        self._end(linger=True)

    def _end(self, *, linger: bool) -> None:
        atexit.unregister(self.leave)
        resources, self._resources = self._resources, None
        if resources is None:
            return
        with resources:
            if self._optimizer is not None and self.round != self._saved_round:
                self._save()
            if linger:
                self.check()
                if self._optimizer is not None:
                    self._background.call(self._peer.linger(LINGER_SECONDS))

    def _goodbye(self) -> None:
        self._background.last_call(self._say_goodbye())

    async def _say_goodbye(self) -> None:
        if self._watch is not None:
            await cancelled(self._watch)
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._peer.leave()
        if self._peer.ready:
            self._report.emit("left", {"round": self.round, "digest": self.digest})
        self._report.phase = "done"
        self._report.status(self._peer, self._identity.peer_id, self._run_id)
