"""Learners of the peers of a scenario."""

from __future__ import annotations

from pathlib import Path

from thinwire.node.peer.peer import Peer
from thinwire.node.state.fragments import fragments_of
from thinwire.sims.peers.learners import StubLearner, TorchLearner
from thinwire.sims.peers.machine import SimLearner
from thinwire.sims.peers.pipeline_learners import staged
from thinwire.sims.peers.training_text import training_text
from thinwire.sims.scenario.scenario import PeerSpec, Scenario
from thinwire.swarm.identity.stage_claim import Seat
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.method_specs.streaming import Streaming


class LearnerFactory:
    """Factory of learners. Those that really train share a text, and its tokens, in `folder`."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self._scenario, self._folder = scenario, folder

    def whole(self, spec: PeerSpec, manifest: Manifest) -> SimLearner:
        """Return a learner of the whole model."""
        if self._scenario.compute == "torch":
            return _fitted(manifest, TorchLearner(manifest, self._text(), self._folder, spec.step_seconds))
        return _fitted(manifest, StubLearner(manifest, self._scenario.parameters, spec.index, spec.step_seconds))

    def stage(self, peer: Peer, spec: PeerSpec, manifest: Manifest, vocab: int, seat: Seat) -> SimLearner:
        """Return the learner of a peer that holds a stage."""
        learner = staged(
            peer,
            manifest,
            vocab,
            seat,
            step_seconds=spec.step_seconds,
            text=self._text(),
            cache=self._folder,
            memory=spec.memory,
        )
        return _fitted(manifest, learner)

    def _text(self) -> Path:
        """Return a text to train on."""
        text = self._folder / "text.txt"
        if not text.exists():
            text.write_text(training_text())
        return text


def _fitted(manifest: Manifest, learner: SimLearner) -> SimLearner:
    """Return the learner, set to observe the contributions that the manifest's method makes."""
    learner.overlaps = manifest.overlap > 0
    if isinstance(manifest.outer, Streaming):
        learner.firsts = tuple(part.spans[0][0] for part in fragments_of(manifest, learner.layout))
    return learner
