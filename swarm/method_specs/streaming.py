"""Streaming DiLoCo (arXiv:2501.18512): fragments are exchanged while training continues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from thinwire.swarm.method_specs.base import (
    DENSE,
    CostRow,
    Defaults,
    LearningRate,
    MethodSpec,
    Momentum,
    OuterSgd,
    Steps,
)

MAX_SEPARATE = 64
"""Maximum number of fragments with separate rounds: a join is announced for each of them."""

AUTO_OVERLAP = 5
"""Most inner steps that overlap an exchange by default; 5 cost little (arXiv:2501.18512)."""


class Streaming(MethodSpec, frozen=True, tag="streaming"):
    """[outer] of the method "streaming".

    sync_every: H, inner steps between two exchanges of the same fragment, a multiple of `fragments`. There is a round after
        every H / fragments steps.
    lr, momentum, nesterov: of the outer SGD on the mean pseudo-gradient.
    fragments: parts of the model, by layers. More fragments lower the peak of the traffic.
    overlap: inner steps that a peer makes while the exchange of a fragment is in progress, at most H. With more than
        H / fragments steps several fragments are in progress. "auto": 5, which cost almost nothing, or H / fragments if that is
        less. Raise it until no peer waits.
    local_mix: part of the local parameters that remains when the result arrives (α of the paper). 0 suits an overlap of 0.
    """

    codecs: ClassVar[tuple[str, ...]] = (*DENSE, "topk")
    fragmented: ClassVar[bool] = True
    computable: ClassVar[bool] = True
    costs: ClassVar[CostRow] = "streaming"

    sync_every: Steps = 30
    lr: LearningRate = 0.4
    momentum: Momentum = 0.9
    nesterov: bool = True
    fragments: Annotated[int, Meta(ge=1, le=1024)] = 3
    overlap: Annotated[int, Meta(ge=0, le=2**20)] | Literal["auto"] = "auto"
    local_mix: Annotated[float, Meta(ge=0, lt=1)] = 0.5

    @property
    def sgd(self) -> OuterSgd:
        """Hyper-parameters of the outer SGD."""
        return OuterSgd(self.lr, self.momentum, self.nesterov)

    @property
    def round_steps(self) -> int:
        """Inner steps between two rounds, H / fragments."""
        return self.sync_every // self.fragments

    @property
    def tau(self) -> int:
        """Inner steps while the exchange of a fragment is in progress (τ of the paper)."""
        return min(AUTO_OVERLAP, self.round_steps) if self.overlap == "auto" else self.overlap

    @property
    def lag(self) -> int:
        """Turns of other fragments that pass before the result of a fragment is awaited."""
        return max(0, self.tau - 1) // self.round_steps

    @property
    def overlap_steps(self) -> int:
        """Inner steps of a turn, the last one with a lag, that a peer makes while the exchange is in progress."""
        return self.tau - self.lag * self.round_steps

    @property
    def fragment_count(self) -> int:
        """Fragments of the model."""
        return self.fragments

    def adjusted(self, sparse: bool, stages: int) -> Defaults:
        """Return defaults for sparse codecs, whose residual replaces momentum, and for pipeline stages."""
        outer: dict[str, object] = {}
        if sparse:
            outer |= {"lr": 1.0, "momentum": 0.0, "nesterov": False, "local_mix": 0.0}
        if stages:
            outer |= {"fragments": stages, "overlap": 0, "local_mix": 0.0}
        return {"outer": outer, "exchange": {"collective": "all-gather"} if sparse else {}}

    def contradictions(self, sparse: bool) -> Iterator[tuple[str, str]]:
        """Yield contradictions of the method's own keys."""
        if self.sync_every % self.fragments:
            yield (
                f"outer.sync_every = {self.sync_every} is not a multiple of outer.fragments = {self.fragments}",
                "fragments take turns after equal numbers of steps: change one of the two",
            )
        elif self.tau > self.sync_every:
            yield (
                f"outer.overlap = {self.overlap} is more than outer.sync_every = {self.sync_every}",
                "lower outer.overlap, or raise outer.sync_every",
            )
        elif self.fragments > MAX_SEPARATE:
            yield (
                f"outer.fragments = {self.fragments}, but at most {MAX_SEPARATE} fragments can have separate rounds",
                "lower outer.fragments",
            )
        if sparse and (self.local_mix or self.momentum or self.nesterov):
            yield (
                "with a sparse codec the residual takes the place of momentum and of the local parameters",
                "remove outer.local_mix, outer.momentum and outer.nesterov",
            )
