"""Delayed Nesterov (arXiv:2401.09135): FedBuff with one momentum step per full buffer."""

from __future__ import annotations

from thinwire.swarm.method_specs.base import LearningRate, Momentum
from thinwire.swarm.method_specs.buffered_async import AsynchronousSpec


class DelayedNesterov(AsynchronousSpec, frozen=True, tag="delayed-nesterov"):
    """[outer] of the method "delayed-nesterov": the keys of "buffered-async" but `nesterov`.

    buffer_size: contributions between two steps of the momentum.
    """

    lr: LearningRate = 0.7
    momentum: Momentum = 0.9
