"""A training loop of one's own in a swarm: `join`, `wrap`, and then the loop as it was."""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from thinwire.collectives.planned import LONGEST_KEY
from thinwire.compression.codec import Floats
from thinwire.swarm.manifest import Manifest, ManifestError, ManifestMismatch
from thinwire.swarm.manifest import parse as parse_manifest
from torch import nn

from .averages import Average, Pending, Some, prepare
from .companion import Companion, RoundReport
from .config import load
from .console import LOGGER
from .fragments import layout_of
from .inner import load_optimizer, save_optimizer
from .opening import arriving, founding
from .optimizer import SwarmOptimizer
from .snapshot import PrivateState
from .status import PeerStatus, Status


def join(
    invite_or_toml: str | os.PathLike[str],
    *,
    home: str | os.PathLike[str] | None = None,
    name: str | None = None,
    host: str | None = None,
    port: int | None = None,
    ports: str | None = None,
    advertise: str | None = None,
    site: str | None = None,
) -> Swarm:
    """Take part in a run: the one an invite names, or one's own by the path of its manifest (a name that ends in .toml).

    A manifest founds the run, or comes back to it; its [model] has kind = "custom". Returns once the run's manifest is
    known: with an invite, once a peer has let us in. The other arguments are settings as of node.toml, which go before
    those of the environment and the file; each peer of a machine needs a `home` of its own.

    Raises InviteError, ManifestError, ConfigError, InUseError (that home), PortTaken, NoSwarm, Refused and
    ManifestMismatch, all of them HintedError.
    """
    place = Path(home) if home is not None else None
    flags = dict(home=place, name=name, host=host, port=port, ports=ports, advertise=advertise, site=site)
    config = load(flags, os.environ)
    text = os.fspath(invite_or_toml)
    if isinstance(invite_or_toml, str) and not text.endswith(".toml"):
        return Swarm(Companion(arriving(text, config)))
    return Swarm(Companion(founding(_read_custom(Path(text)), config, Path(text).name)))


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
    """One peer of a run, made by `join`. Leave it with its `with` block, or by `leave`; at the latest Python's end does."""

    def __init__(self, companion: Companion) -> None:
        self.last: RoundReport | None = None
        """How the last exchange went."""
        self.under_way = False
        """Whether an exchange has begun that has to be finished."""
        self._companion, self._peer = companion, companion.peer
        self._optimizer: SwarmOptimizer | None = None
        self._on_round: Callable[[RoundReport], None] | None = None
        self._reports: deque[RoundReport] = deque(maxlen=1024)
        self._left = False
        try:
            companion.open()
        except BaseException:
            companion.close()
            raise
        atexit.register(self.leave)

    # --- what there is to know

    @property
    def invite(self) -> str:
        """What others pass to `join`; it names this peer and a few more. Empty when none can be dialled."""
        invite = self._companion.ask(self._peer.invite)
        return invite.code() if invite is not None else ""

    @property
    def manifest(self) -> Manifest:
        """What all peers of the run have agreed on."""
        return self._peer.manifest

    @property
    def steps(self) -> int:
        """Inner steps of the next round: H, or by this machine's power where the manifest says so."""
        steps = self._companion.steps
        return self._peer.manifest.pace if steps is None else steps

    @property
    def overlap(self) -> int:
        """Of these, how many are made while an exchange is under way."""
        return self._peer.overlap

    @property
    def round(self) -> int:
        """The last committed round; 0 before the first."""
        return self._peer.replica.round if self._peer.ready else 0

    @property
    def digest(self) -> str:
        """Names the state after that round, parameters and outer momentum (hexadecimal): equal on all peers.

        It is made while training goes on; who asks right after a step waits for it.
        """
        self._companion.settle()
        return self._peer.replica.digest.hex() if self._peer.ready else ""

    @property
    def done(self) -> bool:
        """Whether the run has had all its rounds (`run.rounds`; never, when that is 0). Raises as `check` does."""
        self.check()
        last = self._peer.manifest.run.rounds
        return bool(last) and self.round >= last and not self.under_way

    @property
    def status(self) -> Status:
        """What `thinwire status` shows of this peer."""
        return self._companion.status()

    @property
    def peers(self) -> tuple[PeerStatus, ...]:
        """The others, as this peer sees them."""
        return self.status.peers

    def check(self) -> None:
        """Raises what has gone wrong in the background: SwarmError or another HintedError; SwarmError after `leave`."""
        self._companion.check()

    # --- training

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        batch: int = 1,
        method: str | None = None,
        on_round: Callable[[RoundReport], None] | None = None,
    ) -> SwarmOptimizer:
        """Become a member with this model; train with the optimizer that this gives in place of yours.

        All trainable parameters of the model are averaged, a tied one once; frozen ones and buffers (the statistics of
        BatchNorm) stay local. Whoever joins gets the swarm's parameters written into the model. An earlier life's
        checkpoint under this home is taken up, with the state of the optimizer. `batch`: samples of one step, the weight
        of this peer's work in the mean; see `SwarmOptimizer.step`. `method`: the outer method that the loop is written for,
        where that matters; it is the manifest's, so another one is an error. `on_round`: called with the report of every
        exchange, in the thread that steps, once all is done; what it raises comes out of `step`, and the next step goes on.

        Blocks until the swarm's state is here. Raises ManifestMismatch when the swarm trains another model, or by another
        method; ValueError for
        a model that cannot be averaged or does not hold the optimizer's parameters.
        """
        if self._optimizer is not None:
            raise ValueError("this swarm has a model already: one run trains one model")
        if batch < 0:
            raise ValueError(f"a batch of {batch}: it counts samples")
        if method not in (None, self.manifest.outer.method):
            raise ManifestMismatch(
                f"this run's method is {self.manifest.outer.method!r}, not {method!r}",
                "the manifest decides: whoever founds the run writes `method` under [outer]",
            )
        self._on_round = on_round
        module: nn.Module = getattr(model, "_orig_mod", model)  # torch.compile wraps what has the names
        layout = layout_of(module)
        if not layout.total:
            raise ValueError("the model has no trainable parameters: there is nothing to average")
        known = {id(parameter) for parameter in module.parameters()}
        if any(id(tensor) not in known for group in optimizer.param_groups for tensor in group["params"]):
            raise ValueError("the optimizer holds tensors that are not parameters of this model: they would stay local")
        devices = sorted({str(parameter.device) for parameter in module.parameters()})
        self._gpus = [device for device in devices if device.startswith("cuda")]

        def read(start: int, stop: int, out: Floats) -> None:
            layout.read(module, out, start)

        def write(theta: Floats, start: int = 0, keep: float = 0.0) -> None:
            layout.write(module, theta, start, keep)
            self._synchronize()

        theta = np.empty(layout.total, np.float32)
        layout.read(module, theta)
        self._module, self._inner = module, optimizer
        self._companion.take_up(layout, theta, read=read, write=write, device=", ".join(devices))
        self._restore()
        self._optimizer = SwarmOptimizer(self, optimizer, batch)
        return self._optimizer

    @property
    def gathers(self) -> bool:
        """Whether the next round only makes those who are here members: the first one of the method "merge"."""
        return self._peer.ready and self._peer.gathers

    def gather(self) -> RoundReport:
        """That round: everybody contributes what it starts from. What `SwarmOptimizer.step` begins with."""
        return self.exchange(steps=0, weight=self._peer.idle_weight)

    @property
    def overtaken(self) -> bool:
        """Whether the others have committed the round in progress without waiting for us."""
        return self._peer.ready and self._peer.session.overtaken

    def exchange(self, *, steps: int, weight: int, loss: float | None = None) -> RoundReport:
        """The round after `steps` inner steps on `weight` samples: what `SwarmOptimizer.step` does by itself."""
        self._synchronize()
        return self._over(self._companion.exchange(steps=steps, weight=weight, loss=loss))

    def begin(self, *, steps: int, weight: int, loss: float | None = None) -> RoundReport | None:
        """The first part of `exchange`, after which training goes on; `finish` is due `overlap` inner steps later, but not when
        there is a report already.
        """
        self._synchronize()
        report = self._companion.begin(steps=steps, weight=weight, loss=loss)
        self.under_way = report is None
        return None if report is None else self._over(report)

    def finish(self) -> RoundReport:
        """What is left of an exchange that has begun."""
        self._synchronize()
        self.under_way = False
        return self._over(self._companion.finish())

    def _over(self, report: RoundReport) -> RoundReport:
        self.last = report
        self._reports.append(report)
        if self._companion.save_due():
            self._companion.save(self._private)
        return report

    def outer(self) -> dict[str, torch.Tensor]:
        """A copy of the outer parameters by name, what all peers agree on: to be evaluated, where those of the model differ."""
        split = self._peer.layout.split(self._companion.copy())
        return {name: torch.from_numpy(values) for name, values in split.items()}

    def tell(self, report: RoundReport) -> None:
        """Call `on_round` of `wrap`, if there is one: what `SwarmOptimizer.step` does at the end of an exchange."""
        if self._on_round is not None:
            self._on_round(report)

    def rounds(self) -> Iterator[RoundReport]:
        """Reports of the exchanges since the last time, the oldest first; at most the last 1024. Does not wait."""
        while self._reports:
            yield self._reports.popleft()

    def _synchronize(self) -> None:
        """Two threads use the parameters, never at once; on a GPU that takes waiting for what is still queued there."""
        for device in self._gpus:
            torch.cuda.synchronize(device)

    def _private(self) -> PrivateState | None:
        # Some optimizers keep numbers in their state too: one restored by halves is worse than one that warms up anew.
        values = [value for state in self._inner.state.values() for value in state.values()]
        if not all(value is None or isinstance(value, torch.Tensor) for value in values):
            return None
        return PrivateState(save_optimizer(self._module, self._inner, copy=False), {})

    def _restore(self) -> None:
        private = self._peer.private
        if private is not None:
            try:
                load_optimizer(self._module, self._inner, private.tensors)
            except ValueError as error:
                self._companion.emit("fresh", {"detail": f"the inner optimizer's state warms up anew: {error}"})

    # --- averages of one's own

    def average(
        self,
        tensors: Some,
        *,
        op: str = "mean",
        name: str = "",
        codec: str | None = None,
        weight: int = 1,
        least: int = 1,
        grace: float | None = None,
    ) -> Average[Some]:
        """An all-reduce of tensors of one's own among all peers that are here and call it too; with or without a model.

        `tensors`: a tensor, a numpy array or a number, or a list or a dict of them, all of one element type, of any shape,
        empty ones too; at most 1 GiB. They are copied at once and never written to; the result has new ones.
        `op`: "mean" (weighted by the whole number `weight`, which is believed of everybody, up to 2^31), "sum", "min" or "max".
        What there is:

            float64, float32, float16, bfloat16    all four; computed in float64, rounded once
            int64, int32, int16, int8, uint8       sum (exact; wraps at the type's limits as torch does), min, max
            bool                                   min (all), max (any)

        `codec`: None, exact; or one of a manifest's dense codecs, such as "int8(block=256)" with a quarter of the bytes, for
        float32, float16 and bfloat16. NaN and infinity go through as in any arithmetic (a codec that cannot say them raises).

        Peers meet by `name`, and of one name the n-th call meets the n-th call of the others. Where failures or a partition
        have let the counts come apart, those who wait go to the number in the middle; but where peers may skip some, give each
        average a name of its own, such as f"eval {swarm.round}". Who is here and has not called is waited for `grace`
        seconds (None: the manifest's exchange.grace), then left out; who calls later gets the result without being in it. Who
        dies in the middle is left out, the others finish. Fewer than `least` contributors are no average. In a
        partition each side finishes by itself: `least` says what is too few.

        Blocks, also while the peers that it needs are busy with a round of training. Raises AverageError when those that
        differ from this peer in shapes, element type, op, codec or least are not fewer than those that agree with it (it says
        in what), when peers are too few, or when too many are lost in the middle; ValueError and TypeError for what cannot be
        averaged; and what `check` raises.
        """
        pending = self.start_average(tensors, op=op, name=name, codec=codec, weight=weight, least=least, grace=grace)
        try:
            return pending.result()
        except BaseException:
            pending.cancel()  # whoever was interrupted does not come back for it
            raise

    def start_average(
        self,
        tensors: Some,
        *,
        op: str = "mean",
        name: str = "",
        codec: str | None = None,
        weight: int = 1,
        least: int = 1,
        grace: float | None = None,
    ) -> Pending[Some]:
        """As `average`, without waiting: the handle has `wait`, `done`, `result` and `cancel`, and can be awaited.

        Up to 64 at once, in the background of training; one more raises ValueError, and does not count. Raises ValueError and
        TypeError for what cannot be averaged, and what `check` raises.
        """
        prepared = prepare(tensors, op=op, codec=codec, weight=weight, least=least)
        if len(name) > LONGEST_KEY:
            raise ValueError(f"a name has at most {LONGEST_KEY} characters")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the name {name!r} is no text that can be sent") from error
        return self._companion.average(prepared, name, grace)

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
            LOGGER.exception("leaving the swarm failed")  # what happened inside matters more

    def leave(self) -> None:
        """Save, let the others get what they need from us, say goodbye, close. A second call does nothing.

        Raises what has gone wrong in the background, once everything is closed.
        """
        self._end(linger=True)

    def _end(self, *, linger: bool) -> None:
        atexit.unregister(self.leave)
        if self._left:
            return
        self._left = True
        try:
            if self.under_way and linger:
                self.finish()
            self._companion.abandon()
            if self._optimizer is not None:
                self._companion.save(self._private)
            if linger:
                self._companion.linger()
        finally:
            self._companion.close()
