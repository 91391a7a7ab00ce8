"""FedBuff (arXiv:2106.06639): a round has the contributors that are ready after a short wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from thinwire.swarm.choices import Balancing
from thinwire.swarm.method_specs.base import (
    DEFAULT_RATIO,
    BufferSize,
    Defaults,
    LearningRate,
    MethodSpec,
    Momentum,
    OuterSgd,
    Staleness,
    StalenessExponent,
    StepRatio,
    Steps,
    balanced,
    unused_ratio,
)


class AsynchronousSpec(MethodSpec, frozen=True):
    """Keys of [outer] of asynchronous methods.

    lr, momentum: of the outer step.
    staleness: largest age of a contribution, in whole outer steps since its inner steps began; `buffer_size` contributions are
        one whole step. Older work is dropped, and its peer restarts from the common state.
    staleness_exponent: a in the weight 1 / (1 + s)^a of a contribution that is s steps old.
    buffer_size: contributions of one whole outer step (K of the paper); 0 = the number of peers.
    step_balancing, max_step_ratio: see DiLoCo.
    """

    defaults: ClassVar[Defaults] = {"exchange": {"straggler_timeout": 2.0}}
    asynchronous: ClassVar[bool] = True
    fixed_timeout: ClassVar[str] = "a round has the contributors that are ready"

    sync_every: Steps = 30
    lr: LearningRate = 1.0
    momentum: Momentum = 0.0
    staleness: Staleness = 16
    staleness_exponent: StalenessExponent = 0.5
    buffer_size: BufferSize = 0
    step_balancing: Balancing = "equal"
    max_step_ratio: StepRatio = DEFAULT_RATIO

    @property
    def sgd(self) -> OuterSgd:
        """Hyper-parameters of the outer SGD."""
        return OuterSgd(self.lr, self.momentum, False)

    @property
    def step_ratio(self) -> float:
        """Largest ratio of a peer's inner steps to `sync_every`."""
        return balanced(self.step_balancing, self.max_step_ratio)

    def contradictions(self, sparse: bool) -> Iterator[tuple[str, str]]:
        """Yield contradictions of the method's own keys."""
        yield from unused_ratio(self.step_balancing, self.max_step_ratio)


class BufferedAsync(AsynchronousSpec, frozen=True, tag="buffered-async"):
    """[outer] of the method "buffered-async".

    lr, momentum, nesterov: of the outer SGD. The defaults are the plain average: momentum on every arrival adds up.
    """

    nesterov: bool = False

    @property
    def sgd(self) -> OuterSgd:
        """Hyper-parameters of the outer SGD."""
        return OuterSgd(self.lr, self.momentum, self.nesterov)
