"""What a pipeline of weak peers would make of its links: stages hold a part of the model each, activations cross between them.

A step of S peers that hold the model together has S times the tokens of one peer's step, in micro-batches. A stage is busy with
`step` seconds of it; beside that its uplink carries activations to the next stage and gradients to the one before.
"""

from __future__ import annotations

import msgspec
from thinwire.sims.question import Question

MICRO = 4
"""Micro-batches per stage: enough that filling and draining costs a fifth."""


class Boundary(msgspec.Struct, frozen=True):
    """One way to cross from stage to stage: bytes per token forward and backward together, the Mbit/s that each way would need
    to be no bottleneck, the fraction of the time that peers would compute on the slowest link, and a remark.
    """

    name: str
    per_token: float
    mbits: float
    utilisation: float
    remark: str


class Pipeline(msgspec.Struct, frozen=True):
    """`stages` peers hold one model; `memory`: bytes that each needs for its part; `bubble`: what filling and draining take."""

    stages: int
    memory: float
    bubble: float
    boundaries: tuple[Boundary, ...]

    @property
    def best(self) -> Boundary:
        """The first that computes nearly as much as any; lossless ones come first."""
        most = max(boundary.utilisation for boundary in self.boundaries)
        return next(boundary for boundary in self.boundaries if boundary.utilisation >= 0.95 * most)


def pipeline(question: Question, held: float) -> Pipeline | None:
    """The pipeline that fits the peers' memory, else one of two stages; `held`: bytes that the whole model takes on a peer.

    None when the tokens of a step are not known, or there are not layers and peers enough.
    """
    stages = max(2, int(-(-held // question.memory))) if question.memory else 2
    if not question.tokens or stages > min(question.layers, question.peers):
        return None
    step = max(machine.step for machine in question.machines)
    rate = min(min(machine.up, machine.down) for machine in question.machines)
    micro = MICRO * stages
    boundaries = []
    for name, per_token, remark in _ways(question.width):
        crossing = per_token * question.tokens * stages
        slot = max(step / micro, crossing / micro / rate)
        filled = step / micro + crossing / micro / rate + 2 * question.latency
        boundaries.append(
            Boundary(name, per_token, crossing / step * 8 / 1e6, step / (micro * slot + (stages - 1) * filled), remark)
        )
    return Pipeline(stages, held / stages, (stages - 1) / (micro + stages - 1), tuple(boundaries))


def _ways(width: int) -> list[tuple[str, float, str]]:
    """Name, bytes per token forward plus backward, remark; figures of TAH-Quant and of subspace networks, as published."""
    rank = max(8, width // 100)
    return [
        ("bf16", 4.0 * width, "exact"),
        ("int8 rows", 2 * (width + 2.0), "8 bits and a scale per row"),
        ("4-bit tiles", width * (4.35 + 8.0) / 8, "4.35 bits forward, 8 backward"),
        (f"subspace, k = {rank}", 4.0 * rank + 4, "exact for a model built for it, but more steps to the same loss"),
    ]
