"""Learners in virtual time: a stub model for large swarms, and real torch on tiny models.

Inner steps take a given time and compute at its end, so that interrupted steps are not made.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from thinwire.compression.core.types import Floats
from thinwire.compression.device import HOST
from thinwire.node.state.data_ledger import DataLease
from thinwire.node.state.layout import Layout, Piece
from thinwire.node.state.snapshot import PrivateState
from thinwire.node.training.learner import Learner, StepReport, WorkShare
from thinwire.node.training.local_learner import Computing, LocalLearner, build_learner
from thinwire.sims.engine.virtual_loop import current
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import PeerId

RATE = 0.05
"""Fraction of the way to its optimum that a stub model moves in one inner step."""

SPREAD = 0.2
"""Distance of one peer's optimum from the common one, per parameter; first parameters are 1 away."""


class Stopwatch:
    """Lets virtual time pass for inner steps."""

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self._passed = 0.0
        self._running: Callable[[], float] | None = None

    @property
    def busy(self) -> float:
        """Seconds in which steps were made, up to now."""
        return self._passed + (self._running() if self._running is not None else 0.0)

    async def steps(self, n: int, stop: asyncio.Event) -> int:
        """Wait for the time of `n` steps, or until `stop` is set; return the number of complete steps."""
        loop = asyncio.get_running_loop()
        began, whole = loop.time(), n * self.step_seconds
        if stop.is_set():
            return 0
        self._running = lambda: min(loop.time() - began, whole)
        try:
            async with asyncio.timeout(whole):
                await stop.wait()
            return min(n, int((loop.time() - began) / self.step_seconds + 1e-9))
        except TimeoutError:
            return n
        finally:
            self._passed += self._running()
            self._running = None


@cache
def _stub_layout(parameters: int) -> Layout:
    digest = blake3(f"stub {parameters}".encode()).digest()
    return Layout((Piece("stub", (parameters,), "float32", 0, parameters),), parameters, digest)


@lru_cache(maxsize=16)
def _noise(seed: int | tuple[int, ...], size: int) -> Floats:
    """Return the distance of an optimum from the common one.

    All peers that score one contribution draw the same distance.
    """
    drawn: Floats = SPREAD * np.random.default_rng(seed).standard_normal(size, np.float32)
    drawn.flags.writeable = False
    return drawn


class LearnerProbe:
    """Data of a learner that invariants need.

    - `firsts`: first parameter of each part that contributions are about.
    - `reading`: the last of `firsts` that was read.
    - `on_encode`: called whenever parameters are read for a contribution, with all parameters, which it may not store, and
      with the tokens of the steps that may have gone into the contribution: those since its part was last set or, with
      `overlaps`, those since its part was read for the contribution before.
    - `draws`: samples of the steps since all parameters were set, if known.
    """

    def __init__(self) -> None:
        self.firsts: tuple[int, ...] = (0,)
        self.reading = 0
        self.overlaps = False
        self.on_encode: Callable[[Floats, int], None] = lambda theta, trained: None
        self.draws: list[tuple[int, int, int]] | None = None
        self._tokens = 0
        self._since: dict[int, int] = {}
        self._read_at: dict[int, int] = {}
        self._before: dict[int, int] = {}

    def _reading(self, start: int, theta: Callable[[], Floats]) -> None:
        if start in self.firsts:
            self.reading = start
            self.on_encode(theta(), self._tokens - self._since.get(start, 0))
            self._read_at[start] = self._tokens

    def _written(self, start: int, size: int) -> None:
        for first in self.firsts:
            if start <= first < start + size:
                read = self._read_at.pop(first, self._tokens)
                self._before[first] = self._since.get(first, 0)
                self._since[first] = read if self.overlaps else self._tokens

    def uncommitted(self) -> None:
        """Note that the last contribution went into no round: with `overlaps` the next one contains it."""
        if self.overlaps:
            self._since |= self._before


class StubLearner(LearnerProbe):
    """Quadratic model: each parameter is drawn to its optimum, which differs slightly between data shares.

    The loss is half the mean square of the distance to the common optimum, so it falls as the swarm makes progress.
    With `false_labels` the parameters are drawn to the opposite of the optimum.
    """

    device = HOST

    def __init__(self, manifest: Manifest, parameters: int, seed: int, step_seconds: float) -> None:
        super().__init__()
        self.layout = _stub_layout(parameters)
        self.watch = Stopwatch(step_seconds)
        self._manifest, self._seed = manifest, seed
        first = np.random.default_rng(manifest.run.seed)
        self._optimum = first.standard_normal(parameters, np.float32)
        self.theta: Floats = self._optimum + first.choice(np.array([-1, 1], np.float32), parameters)
        self._own, self._made = self._optimum, 0
        self.false_labels = False
        self._lease: DataLease | None = None
        self.draws = []

    def parameters(self) -> Floats:
        return self.theta.copy()

    def read(self, start: int, stop: int, out: Floats) -> None:
        self._reading(start, lambda: self.theta)
        out[:] = self.theta[start:stop]

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        part = self.theta[start : start + theta.size]
        part[:] = np.float32(keep) * part + np.float32(1 - keep) * theta if keep else theta
        self._written(start, theta.size)
        if theta.size == self.theta.size:
            self.draws = []

    def assign(self, share: WorkShare) -> None:
        self._lease = share.lease
        own = (self._seed, self._made)
        self._own = self._pull(share.me, share.round) if share.trial else self._optimum_of(own)

    def _optimum_of(self, data: int | tuple[int, ...]) -> Floats:
        return self._optimum + _noise(data, self.theta.size)

    def _pull(self, peer: PeerId, round: int) -> Floats:
        """Return the optimum of the data that is assigned to a peer on trial."""
        return self._optimum_of(int.from_bytes(peer[:8], "big") + round)

    def score(self, base: Floats, step: Floats, peer: PeerId, round: int, salt: bytes) -> tuple[float, float]:
        other = self._optimum_of(int.from_bytes(salt, "big"))
        found = []
        for optimum in (self._pull(peer, round), other):
            before, after = base - optimum, base - step - optimum
            found.append(0.5 * (float(np.dot(before, before)) - float(np.dot(after, after))) / base.size)
        return found[0], found[1]

    async def steps(self, n: int, stop: asyncio.Event) -> StepReport:
        made = await self.watch.steps(n, stop)
        if made:
            own = -self._own if self.false_labels else self._own
            self.theta += np.float32(1 - (1 - RATE) ** made) * (own - self.theta)
            self._made += made
        away = self.theta - self._optimum
        loss = 0.5 * float(np.dot(away, away)) / away.size if made else math.nan
        tokens = self._draw(made) * self._manifest.model.context
        self._tokens += tokens
        return StepReport(made, loss, loss, tokens, made * self.watch.step_seconds)

    def _draw(self, steps: int) -> int:
        """Draw the samples of these steps; return their number."""
        inner, lease = self._manifest.inner, self._lease
        if lease is None:
            return steps * inner.batch * inner.accumulate
        self._lease = lease.after(steps * lease.samples)
        for shard, first, end in zip(lease.shards, lease.used, self._lease.used, strict=True):
            if end > first and self.draws is not None:
                self.draws.append((int(shard), int(first), int(end)))
        return steps * lease.samples

    def private(self) -> PrivateState:
        return PrivateState({"made": np.array([self._made])}, {"made": self._made})

    def restore(self, private: PrivateState) -> bool:
        made = private.values.get("made")
        if not isinstance(made, int):
            return False
        self._made = made
        return True

    def skip_to(self, round: int, peers: int) -> None:
        self._made = self._manifest.steps_after(round)


class DelegatingLearner:
    """Learner that passes all calls on to another one. Subclasses define `steps`."""

    def __init__(self, inner: Learner) -> None:
        self.inner = inner

    @property
    def layout(self) -> Layout:
        return self.inner.layout

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def parameters(self) -> Floats:
        return self.inner.parameters()

    def read(self, start: int, stop: int, out: Any) -> None:
        self.inner.read(start, stop, out)

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        self.inner.write(theta, start, keep)

    def assign(self, share: WorkShare) -> None:
        self.inner.assign(share)

    def score(self, base: Floats, step: Floats, peer: PeerId, round: int, salt: bytes) -> tuple[float, float]:
        return self.inner.score(base, step, peer, round, salt)

    def private(self) -> PrivateState | None:
        return self.inner.private()

    def restore(self, private: PrivateState) -> bool:
        return self.inner.restore(private)

    def skip_to(self, round: int, peers: int) -> None:
        self.inner.skip_to(round, peers)


class ObservedLearner(DelegatingLearner, LearnerProbe):
    """Another learner that invariants can observe."""

    def __init__(self, inner: Learner) -> None:
        DelegatingLearner.__init__(self, inner)
        LearnerProbe.__init__(self)

    def read(self, start: int, stop: int, out: Any) -> None:
        self._reading(start, self.parameters)
        super().read(start, stop, out)

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        super().write(theta, start, keep)
        self._written(start, theta.size)


class TorchLearner(ObservedLearner):
    """The manifest's own model, trained one step after the other in virtual time.

    `text`: file or folder to train on; None: the text of the demo.
    """

    def __init__(self, manifest: Manifest, text: Path | None, cache: Path, step_seconds: float) -> None:
        self._training: LocalLearner = build_learner(
            manifest, Computing("cpu", 1), data=text, cache=cache, here=cache, clock=current().time
        )
        super().__init__(self._training)
        self.watch = Stopwatch(step_seconds)

    async def steps(self, n: int, stop: asyncio.Event) -> StepReport:
        made = await self.watch.steps(n, stop)
        done = self._training.trainer.run_steps(made)
        self._tokens += done.tokens
        return StepReport(done.steps, done.loss, done.last, done.tokens, made * self.watch.step_seconds)
