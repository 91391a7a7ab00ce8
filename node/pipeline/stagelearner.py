"""What the origin and the hosts of a group have in common, as Learners: a stage's parameters and its inner optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress

from thinwire.compression.codec import Floats

from ..fragments import Layout
from ..inner import load_optimizer, save_optimizer
from ..snapshot import PrivateState
from .holding import Holding
from .update import Update


class StageLearner(ABC):
    """See Learner. `source`: where the stage's outer state came from, if all its holders were lost."""

    def __init__(self, holding: Holding) -> None:
        self.held, self.source = (holding.stage,), ""
        self._holding = holding

    @property
    @abstractmethod
    def update(self) -> Update:
        """The stage's inner optimizer."""

    @property
    def layout(self) -> Layout:
        return self._holding.layout

    def parameters(self) -> Floats:
        return self._holding.parameters()

    def read(self, start: int, stop: int, out: Floats) -> None:
        self._holding.read(start, stop, out)

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        self._holding.write(theta, start, keep)

    def private(self) -> PrivateState:
        """See Learner."""
        tensors = save_optimizer(self._holding.section, self.update.optimizer, copy=False)
        return PrivateState(tensors, {"stage": self._holding.stage})

    def restore(self, private: PrivateState) -> bool:
        """See Learner."""
        if private.values.get("stage") != self._holding.stage:
            return False
        with suppress(ValueError):
            load_optimizer(self._holding.section, self.update.optimizer, private.tensors)
            return True
        return False
