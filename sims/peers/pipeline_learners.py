"""Learners of pipeline peers in virtual time: the product's own; computation takes a given time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.node.peer.peer import Peer
from thinwire.node.pipeline.groups.host_learner import HostLearner
from thinwire.node.pipeline.groups.learner_factory import learner
from thinwire.node.pipeline.groups.origin_learner import OriginLearner
from thinwire.node.pipeline.groups.stage_assignment import share
from thinwire.node.pipeline.groups.stage_join import seat
from thinwire.node.pipeline.model.staged_model import StagedModel
from thinwire.node.training.batches import Batches
from thinwire.node.training.learner import StepReport
from thinwire.node.training.local_learner import batches_of
from thinwire.node.training.models.tokenizer import load_tokenizer
from thinwire.sims.peers.learners import ObservedLearner
from thinwire.sims.scenario.scenario import PeerSpec
from thinwire.swarm.identity.stage_claim import Seat
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.messages.registry import PeerId

PASSES = 2
"""Passes of each micro-batch through a stage: forward and backward."""


class WeakComputer:
    """Computer of a weak peer: one task at a time, each takes `seconds`. `busy`: total seconds of tasks."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._lock, self._passed = seconds, asyncio.Lock(), 0.0
        self._since: float | None = None

    @property
    def busy(self) -> float:
        now = asyncio.get_running_loop().time()
        return self._passed + (now - self._since if self._since is not None else 0.0)

    async def work(self, function: Callable[[], Any]) -> Any:
        """Run a function for the time of one task; implements Work."""
        async with self._lock:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            try:
                await asyncio.sleep(self._seconds)
            finally:
                self._passed, self._since = self._passed + loop.time() - self._since, None
            return function()


class StagedLearner(ObservedLearner):
    """Learner of one stage that invariants can observe. `step_seconds`: its part of an inner step."""

    def __init__(self, inner: OriginLearner | HostLearner, watch: WeakComputer) -> None:
        super().__init__(inner)
        self.watch = watch

    async def steps(self, n: int, stop: asyncio.Event) -> StepReport:
        done = await self.inner.steps(n, stop)
        self._tokens += done.tokens
        return done


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
    """Return the learner of a simulated peer with a seat. `text`: file to train on.

    `cache`: directory for its tokens; `memory`: bytes for training, 0: it never moves.
    """
    computer = WeakComputer(step_seconds / (PASSES * manifest.microbatches))

    def batches() -> Batches:
        return batches_of(manifest, load_tokenizer(manifest.data.tokenizer, cache), text, cache)

    model = StagedModel(manifest, vocab)
    fits = share(model, memory)[1] if memory else ()
    return StagedLearner(learner(peer, model, seat, batches=batches, work=computer.work, fits=fits), computer)


async def seated(
    peer: Peer, manifest: Manifest, spec: PeerSpec, origin: PeerId, cache: Path, new_seat: Seat | None
) -> tuple[Seat | None, int]:
    """Return the seat of a simulated peer (None: the whole model) and the token ids of its tokenizer.

    `new_seat`: the seat that it moves to from another one.
    """
    if not manifest.pipeline.stages:
        return None, 0
    vocab = load_tokenizer(manifest.data.tokenizer, cache, manifest.data.tokenizer_hash).vocab
    if new_seat is not None or spec.stage is not None:
        given = new_seat or Seat(spec.stage or 0, origin)
        peer.announce(given.code())
        return given, vocab
    return await seat(peer, StagedModel(manifest, vocab), limit=spec.memory or math.inf), vocab
