"""Peers that hold a model together, in virtual time: the product's own learners, whose computing takes time as told."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.compression.codec import Floats
from thinwire.node.data import Batches
from thinwire.node.fragments import Layout
from thinwire.node.learner import Share, StepReport
from thinwire.node.peer import Peer
from thinwire.node.pipeline.arrival import seat
from thinwire.node.pipeline.group import learner
from thinwire.node.pipeline.hostlearner import HostLearner
from thinwire.node.pipeline.originlearner import OriginLearner
from thinwire.node.pipeline.place import share
from thinwire.node.presence import Handler
from thinwire.node.snapshot import PrivateState
from thinwire.node.tokenizer import load_tokenizer
from thinwire.node.training import batches_of
from thinwire.sims.compute import Observed
from thinwire.sims.scenario import PeerSpec
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import PeerId
from thinwire.swarm.seat import Seat

PASSES = 2
"""Of each micro-batch a stage makes: forward, and backward."""


class Bench:
    """Where a weak peer computes: one thing after the other, each taking `seconds`. `busy`: seconds that it did, up to now."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._lock, self._passed = seconds, asyncio.Lock(), 0.0
        self._since: float | None = None

    @property
    def busy(self) -> float:
        now = asyncio.get_running_loop().time()
        return self._passed + (now - self._since if self._since is not None else 0.0)

    async def work(self, function: Callable[[], Any]) -> Any:
        """See Work."""
        async with self._lock:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            try:
                await asyncio.sleep(self._seconds)
            finally:
                self._passed, self._since = self._passed + loop.time() - self._since, None
            return function()


class StagedLearner(Observed):
    """A learner of one stage that oracles can watch. `step_seconds`: what the stage computes of one inner step."""

    def __init__(self, inner: OriginLearner | HostLearner, watch: Bench) -> None:
        super().__init__()
        self.inner, self.watch = inner, watch
        self.held = inner.held
        self.handler: Handler = inner.muster if isinstance(inner, OriginLearner) else inner

    @property
    def layout(self) -> Layout:
        return self.inner.layout

    def parameters(self) -> Floats:
        return self.inner.parameters()

    def read(self, start: int, stop: int, out: Floats) -> None:
        self._reading(start, self.parameters)
        self.inner.read(start, stop, out)

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        self.inner.write(theta, start, keep)
        self._written(start, theta.size)

    def assign(self, share: Share) -> None:
        self.inner.assign(share)

    async def steps(self, n: int, stop: asyncio.Event) -> StepReport:
        done = await self.inner.steps(n, stop)
        self._tokens += done.tokens
        return done

    def private(self) -> PrivateState | None:
        return self.inner.private()

    def restore(self, private: PrivateState) -> bool:
        return self.inner.restore(private)

    def skip_to(self, round: int, peers: int) -> None:
        self.inner.skip_to(round, peers)


def staged(
    peer: Peer,
    manifest: Manifest,
    vocab: int,
    seat: Seat,
    *,
    step_seconds: float,
    text: Path,
    cache: Path,
    memory: float,
) -> StagedLearner:
    """What a simulated peer trains that has a seat. `text`: file to train on; `cache`: directory for its tokens; `memory`:
    bytes that it has, 0: it stays where it is.
    """
    bench = Bench(step_seconds / (PASSES * manifest.micro))

    def batches() -> Batches:
        return batches_of(manifest, load_tokenizer(manifest.data.tokenizer, cache), text, cache)

    fits = share(manifest, vocab, memory)[1] if memory else ()
    return StagedLearner(learner(peer, manifest, vocab, seat, batches=batches, work=bench.work, fits=fits), bench)


async def seated(
    peer: Peer, manifest: Manifest, spec: PeerSpec, origin: PeerId, cache: Path, moved: Seat | None
) -> tuple[Seat | None, int]:
    """The seat of a simulated peer, None where it holds the whole model, and the token ids of the model's tokenizer. `moved`:
    where it goes from another one.
    """
    if not manifest.pipeline.stages:
        return None, 0
    vocab = load_tokenizer(manifest.data.tokenizer, cache, manifest.data.tokenizer_hash).vocab
    if moved is not None or spec.stage is not None:
        told = moved or Seat(spec.stage or 0, origin)
        peer.announce(told.code())
        return told, vocab
    return await seat(peer, manifest, vocab, limit=spec.memory or math.inf), vocab
