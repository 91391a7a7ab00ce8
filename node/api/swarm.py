"""A swarm in a user's own training loop: `join`, `Swarm.wrap`, and then the unchanged loop."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from thinwire.collectives.allreduce.signature import LONGEST_KEY
from thinwire.node.api.allreduce import Average, Pending, Some, prepare
from thinwire.node.api.arguments import samples, seconds, text
from thinwire.node.api.background_peer import BackgroundPeer
from thinwire.node.api.exchange import RoundReport
from thinwire.node.api.group_peer import GroupPeer
from thinwire.node.api.model_access import ModelAccess, checked
from thinwire.node.api.optimizer import SwarmOptimizer
from thinwire.node.api.ranks import check_alone
from thinwire.node.peer.peer import Peer
from thinwire.node.peer.status import PeerStatus, Status
from thinwire.node.runtime.console import LOGGER
from thinwire.node.state.snapshot import PrivateState
from thinwire.node.training.inner_optimizer import load_optimizer, optimizer_arrays
from thinwire.swarm.manifest.manifest import Manifest, ManifestMismatch
from torch import nn

if TYPE_CHECKING:
    from transformers import TrainerCallback


class Swarm:
    """One peer of a run, created by `join`.

    End it with its `with` block or with `leave`; Python calls `leave` at exit.
    """

    def __init__(self, background_peer: BackgroundPeer | GroupPeer, *, alone: bool = False) -> None:
        """Open the peer. `alone`: no group was given, so no other process may train with this one."""
        self._background_peer, self._alone = background_peer, alone
        self._optimizer: SwarmOptimizer | None = None
        self._left, self._process = False, os.getpid()
        try:
            background_peer.open()
        except BaseException:
            background_peer.close()
            raise
        atexit.register(self.leave)

    @property
    def _leader(self) -> BackgroundPeer:
        return self._background_peer.leader

    @property
    def _peer(self) -> Peer:
        return self._leader.peer

    # --- properties

    @property
    def invite(self) -> str:
        """Invite for `join`, with addresses of this peer and a few more. Empty if none can be dialled."""
        invite = self._leader.ask(self._peer.invite)
        return invite.code() if invite is not None else ""

    @property
    def manifest(self) -> Manifest:
        """Manifest of the run, on which all peers have agreed."""
        return self._background_peer.manifest

    @property
    def round(self) -> int:
        """The last committed round; 0 before the first."""
        return self._background_peer.round

    @property
    def step(self) -> int:
        """Inner steps since the run began, counted by its rounds, so that a joiner does not start at 0.

        Learning rate schedules should depend on it, see `SwarmLR`.
        """
        return self._background_peer.steps_before if self._optimizer is None else self._optimizer.swarm_step

    @property
    def digest(self) -> str:
        """Digest of the state after the last committed round, hexadecimal; empty before `wrap`.

        The state is parameters and outer momentum, so the digest is equal on all peers. It is computed while training
        continues; right after a step this property waits for it.
        """
        self._leader.settle()
        return self._peer.replica.digest.hex() if self._peer.ready else ""

    @property
    def done(self) -> bool:
        """True if the run has had all its rounds (`run.rounds`; 0 means endless).

        Raises as `check` does; with several ranks, the next step raises background failures, on all of them.
        """
        return self._background_peer.done

    @property
    def under_way(self) -> bool:
        """True while an exchange is in progress."""
        return self._background_peer.under_way

    @property
    def overtaken(self) -> bool:
        """True if the others have committed the round in progress without waiting for us."""
        return self._background_peer.overtaken

    @property
    def last(self) -> RoundReport | None:
        """Report of the last exchange; None before the first."""
        return self._background_peer.last

    @property
    def status(self) -> Status:
        """Status of this peer, as `thinwire status` shows it."""
        return self._leader.status()

    @property
    def peers(self) -> tuple[PeerStatus, ...]:
        """Status of the other peers, as this peer sees them."""
        return self.status.peers

    def check(self) -> None:
        """Raise a background failure, if any: SwarmError or another HintedError; SwarmError after `leave`.

        With several ranks, only the first one knows of failures here.
        """
        self._background_peer.check()

    # --- training

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        batch: int = 1,
        method: str | None = None,
        on_round: Callable[[RoundReport], None] | None = None,
        loss_of_step: Callable[[], float | torch.Tensor | None] = lambda: None,
    ) -> SwarmOptimizer:
        """Become a member with this model; train with the returned optimizer in place of yours.

        All trainable parameters of the model are averaged, a tied one once; frozen ones stay local. Persistent buffers (the
        statistics of BatchNorm) are part of the state, see `model.buffers` in the manifest; others stay local. The model of
        a joiner gets the swarm's parameters and buffers. A checkpoint under this home is resumed, with the state of the
        optimizer. Blocks until the swarm's state is here, and for the peers that `join` waits for.

        - `batch`: samples of one step (0 or more), the weight of this peer's work in the mean; see `SwarmOptimizer.step`.
        - `method`: the outer method that the loop is written for, if that matters; it must be the manifest's.
        - `on_round`: called with the report of every exchange, in the thread that steps, at the end of the step. `step`
          raises its exceptions, and the next step continues.
        - `loss_of_step`: returns the loss of a step, for display, if a library calls `step` without one; None: unknown.

        Raises

        - ManifestMismatch if the swarm trains another model or uses another method;
        - ManifestError if the run's method cannot share the model's buffers;
        - GroupError for models that differ on the ranks of `group`, and for FullyShardedDataParallel (use fully_shard);
        - TypeError for a model that is no nn.Module, and an optimizer that is none of torch's;
        - ValueError for a model that cannot be averaged or does not contain the optimizer's parameters, for a batch that is
          negative or no whole number, and in a second call;
        - and what `check` raises.
        """
        if self._optimizer is not None:
            raise ValueError("this swarm already has a model: one run trains one model")
        batch = samples("batch", batch)
        if method not in (None, self.manifest.outer.method):
            raise ManifestMismatch(
                f"this run's method is {self.manifest.outer.method!r}, not {method!r}",
                "the manifest decides: the founder of the run sets `method` under [outer]",
            )
        rule = self.manifest.model.buffers
        if isinstance(self._background_peer, GroupPeer):
            from thinwire.node.api.rank_parameters import GroupAccess

            ranks = self._background_peer.ranks
            self._background_peer.take_up(lambda: GroupAccess(*checked(model, optimizer, rule), ranks))
        else:
            if self._alone:
                check_alone()
            access = ModelAccess(*checked(model, optimizer, rule))
            self._module, self._inner = access.module, optimizer
            self._background_peer.take_up(
                access.layout,
                access.first(),
                read=access.read,
                write=access.write,
                synchronize=access.synchronize,
                private=self._private,
                devices=access.devices,
            )
            self._restore()
        self._optimizer = SwarmOptimizer(self._background_peer, optimizer, batch, on_round, loss_of_step)
        return self._optimizer

    def trainer_callback(self, on_round: Callable[[RoundReport], None] | None = None) -> TrainerCallback:
        """Return a callback for a Trainer of transformers: `Trainer(…, callbacks=[swarm.trainer_callback()])`.

        When training begins, the callback wraps the trainer's model and optimizer, see `wrap`, also for `on_round`; a step
        has as many samples as the trainer's arguments say. Training ends with the run, if not before. Then the peer leaves
        the swarm, so that no other waits for it, and the model has the parameters of the last round. The swarm shows the loss
        that the model returns.

        Raises ImportError without transformers and accelerate; `Trainer.train` raises what `wrap`, `check` and `leave` do.
        """
        try:
            from thinwire.node.api.trainer_callback import SwarmCallback
        except ImportError as error:
            raise ImportError(f"{error}; run: pip install 'thinwire[models]' accelerate") from error

        def wrap(
            model: nn.Module,
            optimizer: torch.optim.Optimizer,
            batch: int,
            loss_of_step: Callable[[], torch.Tensor | None],
        ) -> torch.optim.Optimizer:
            return self.wrap(model, optimizer, batch=batch, on_round=on_round, loss_of_step=loss_of_step)

        return SwarmCallback(wrap, lambda: self.done, self.leave)

    def outer(self) -> dict[str, torch.Tensor]:
        """Return a copy of the outer parameters and shared buffers by name, equal on all peers.

        Tensors on the CPU, in the shapes of the model: parameters as float32, buffers in their own types. Use them for
        evaluation if the model's parameters differ. Raises ValueError before `wrap`, and what `check` raises; GroupError on
        other ranks than the first.
        """
        if self._optimizer is None:
            raise ValueError("this swarm has no model yet: call wrap first")
        layout, values = self._peer.layout, self._leader.copy()
        split = layout.split(values[: layout.total])
        return {name: torch.from_numpy(each) for name, each in split.items()} | layout.buffers.split(
            values[layout.total :]
        )

    def rounds(self) -> Iterator[RoundReport]:
        """Yield reports of the exchanges since the last call, oldest first, without waiting.

        Only the last 1024 are stored.
        """
        while self._background_peer.reports:
            yield self._background_peer.reports.popleft()

    def _private(self) -> PrivateState | None:
        # Some optimizers also store numbers in their state: a partly restored one is worse than one that warms up
        # again.
        values = [value for state in self._inner.state.values() for value in state.values()]
        if not all(value is None or isinstance(value, torch.Tensor) for value in values):
            return None
        return PrivateState(optimizer_arrays(self._module, self._inner), {})

    def _restore(self) -> None:
        private = self._peer.private
        if private is not None:
            try:
                load_optimizer(self._module, self._inner, private.tensors)
            except ValueError as error:
                self._leader.emit("fresh", {"detail": f"the inner optimizer's state warms up again: {error}"})

    # --- all-reduce of the user's tensors

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
        """All-reduce the user's own tensors among all present peers that call this too.

        Works with or without a model. Blocks, also while the peers that it needs are busy with a round of training.

        - `tensors`: a tensor, a numpy array or a number, or a list or a dict of them, all of one element type, of any
          shape, including empty ones; at most 1 GiB. They are copied at once and never written to; the result has new ones.
        - `op`: "mean", "sum", "min" or "max"; see the table below.
        - `name`: peers meet by name, and the n-th call with one name meets the n-th call of the others. If counts have
          diverged after failures or a partition, waiting peers change to the median number. If peers may skip some calls,
          give each operation a separate name, such as f"eval {swarm.round}".
        - `codec`: None, exact; or one of a manifest's dense codecs, such as "int8(block=256)" with a quarter of the bytes,
          for float32, float16 and bfloat16.
        - `weight`: of this peer's tensors in a mean, a whole number up to 2^31, which the other peers trust.
        - `least`: with fewer contributors the operation fails. In a partition each side finishes separately: set `least` to
          prevent that.
        - `grace`: seconds (None: the manifest's exchange.straggler_timeout) that the operation waits for present peers that
          have not called. Then it leaves them out; later callers get the result without being in it. A peer that dies in the
          middle is left out, and the others finish.

        Supported element types:

            float64, float32, float16, bfloat16    all four; computed in float64, rounded once
            int64, int32, int16, int8, uint8       sum (exact; wraps at the type's limits as torch does), min, max
            bool                                   min (all), max (any)

        NaN and infinity are processed as in any arithmetic (a codec that cannot represent them raises).

        Raises AverageError if at least as many peers differ from this one in shapes, element type, op, codec or least as
        agree with it (with the difference), if peers are too few, or if too many are lost in the middle; ValueError and
        TypeError for unsupported tensors and wrong arguments; and what `check` raises.
        """
        pending = self.start_average(tensors, op=op, name=name, codec=codec, weight=weight, least=least, grace=grace)
        try:
            return pending.result()
        except BaseException:
            pending.cancel()  # an interrupted caller does not return for the result
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
        """Start `average` without waiting.

        The handle has `wait`, `done`, `result` and `cancel`, and can be awaited.

        Up to 64 at once, in the background of training; one more raises ValueError and does not count. Raises
        ValueError and TypeError for unsupported tensors and wrong arguments, and what `check` raises.
        """
        prepared = prepare(tensors, op=op, codec=codec, weight=weight, least=least)
        if len(text("name", name)) > LONGEST_KEY:
            raise ValueError(f"a name has at most {LONGEST_KEY} characters")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the name {name!r} cannot be encoded as UTF-8") from error
        return self._leader.average(prepared, name, None if grace is None else seconds("grace", grace))

    # --- leaving

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
            LOGGER.exception("leaving the swarm failed")  # the exception inside the block matters more

    def leave(self) -> None:
        """Save a checkpoint, serve other peers what they still need, announce the departure, and close.

        A second call does nothing, and neither does one in a forked child. Raises background failures, once everything is
        closed.
        """
        self._end(linger=True)

    def _end(self, *, linger: bool) -> None:
        # A forked child shares descriptors and locks with the peer, but has no thread.
        if os.getpid() != self._process:
            return
        atexit.unregister(self.leave)
        if self._left:
            return
        self._left = True
        try:
            if self.under_way and linger:
                self._background_peer.finish()
            if self._background_peer.leads:
                self._leader.abandon()
                if self._optimizer is not None:
                    self._leader.save()
                if linger:
                    self._leader.linger()
        finally:
            self._background_peer.close()
