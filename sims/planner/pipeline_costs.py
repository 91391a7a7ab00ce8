"""Pipelines of weak peers: each stage holds a part of the model, and activations cross between stages.

A step of S peers that hold the model together has S times the tokens of one peer's step, in micro-batches. A stage
computes for `step` seconds of it; at the same time its uplink carries activations to the next stage and gradients to
the previous one.
"""

from __future__ import annotations

import msgspec
from thinwire.collectives.costs.cost_question import Question

MICRO = 4
"""Micro-batches per stage: enough to limit the cost of filling and draining to a fifth."""


class BoundaryCosts(msgspec.Struct, frozen=True):
    """One codec of a stage boundary.

    per_token: bytes per token, forward and backward together. mbits: Mbit/s in each direction at which the link is no
    bottleneck. utilisation: fraction of the time that peers compute on the slowest link.
    """

    name: str
    per_token: float
    mbits: float
    utilisation: float
    remark: str


class PipelineCosts(msgspec.Struct, frozen=True):
    """Pipeline of `stages` peers that hold one model.

    memory: bytes that each needs for its part. bubble: share of the time for filling and draining.
    """

    stages: int
    memory: float
    bubble: float
    boundaries: tuple[BoundaryCosts, ...]

    @property
    def best(self) -> BoundaryCosts:
        """First boundary with nearly the best utilisation; lossless ones come first."""
        most = max(boundary.utilisation for boundary in self.boundaries)
        return next(boundary for boundary in self.boundaries if boundary.utilisation >= 0.95 * most)


def pipeline(question: Question, held: float) -> PipelineCosts | None:
    """Return the manifest's pipeline, else one that fits into the peers' memory, else two stages.

    held: bytes of the whole model on one peer. Returns None if the tokens of a step are unknown, or there are not
    enough layers or peers.
    """
    stages = question.stages or (max(2, int(-(-held // question.memory))) if question.memory else 2)
    if not question.tokens or stages > min(question.layers, question.peers):
        return None
    step = max(machine.step for machine in question.machines)
    rate = min(min(machine.up, machine.down) for machine in question.machines)
    micro = MICRO * stages
    boundaries = []
    for name, per_token, remark in _boundaries(question.width):
        crossing = per_token * question.tokens * stages
        slot = max(step / micro, crossing / micro / rate)
        filled = step / micro + crossing / micro / rate + 2 * question.latency
        boundaries.append(
            BoundaryCosts(
                name, per_token, crossing / step * 8 / 1e6, step / (micro * slot + (stages - 1) * filled), remark
            )
        )
    return PipelineCosts(stages, held / stages, (stages - 1) / (micro + stages - 1), tuple(boundaries))


def _boundaries(width: int) -> list[tuple[str, float, str]]:
    """Return name, bytes per token (forward plus backward) and remark of each boundary.

    The figures of TAH-Quant and of subspace networks are the published ones.
    """
    rank = max(8, width // 100)
    return [
        ("bf16", 4.0 * width, "exact"),
        ("int8 rows", 2 * (width + 2.0), "8 bits and a scale per row"),
        ("4-bit tiles", width * (4.35 + 8.0) / 8, "4.35 bits forward, 8 backward"),
        (f"subspace, k = {rank}", 4.0 * rank + 4, "exact for a model built for it, but more steps to the same loss"),
    ]
