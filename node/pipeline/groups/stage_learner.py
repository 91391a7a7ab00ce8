"""Common base of the learners of origins and hosts: a stage's parameters and its inner optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress

from thinwire.compression.boundary_codec import Boundary
from thinwire.compression.core.types import Floats
from thinwire.compression.device import HOST
from thinwire.node.pipeline.model.held_stage import HeldStage
from thinwire.node.pipeline.model.stage_optimizer import StageOptimizer
from thinwire.node.state.layout import Layout
from thinwire.node.state.snapshot import PrivateState
from thinwire.node.training.inner_optimizer import load_optimizer, optimizer_arrays
from thinwire.swarm.messages.registry import PeerId


class StageLearner(ABC):
    """Learner of one stage. `source`: origin of the stage's outer state, if all its holders were lost."""

    device = HOST

    def __init__(self, holding: HeldStage) -> None:
        self.held, self.source = (holding.stage,), ""
        self._holding = holding

    @property
    @abstractmethod
    def update(self) -> StageOptimizer:
        """Inner optimizer of the stage."""

    @property
    def boundary(self) -> Boundary:
        """Codec of the activations that enter and leave the stage."""
        return self._holding.boundary

    @property
    def layout(self) -> Layout:
        return self._holding.layout

    def parameters(self) -> Floats:
        return self._holding.parameters()

    def read(self, start: int, stop: int, out: Floats) -> None:
        self._holding.read(start, stop, out)

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        self._holding.write(theta, start, keep)

    def score(self, base: Floats, step: Floats, peer: PeerId, round: int, salt: bytes) -> tuple[float, float]:
        """Raise NotImplementedError: runs with stages have no newcomers on trial.

        swarm/manifest/validation.py refuses such runs.
        """
        raise NotImplementedError("a stage alone has no loss")

    def private(self) -> PrivateState:
        """Return the state of this peer alone, for a checkpoint."""
        tensors = optimizer_arrays(self._holding.section.module, self.update.optimizer)
        return PrivateState(tensors, {"stage": self._holding.stage})

    def restore(self, private: PrivateState) -> bool:
        """Restore the state of a checkpoint; return True if it fits."""
        if private.values.get("stage") != self._holding.stage:
            return False
        with suppress(ValueError):
            load_optimizer(self._holding.section.module, self.update.optimizer, private.tensors)
            return True
        return False
