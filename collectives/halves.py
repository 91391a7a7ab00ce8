"""What one side of a pair sends: one vector when it is enough, else two, each with a codec of its own.

A pair needs of each side the pseudo-gradient Δ = θ − φ and the slow weights φ (NoLoCo, arXiv 2506.10911). With γ = β the step
is a function of θ alone, so exact codecs send θ. A codec that loses something is for Δ, which gets error feedback; φ then
travels at 8 bits, both sides using the decoded values, so that what one is drawn by the other is drawn back by. φ is known
when a round begins and travels while both train; Δ follows. A payload is the chunks of Δ, then those of φ, on one grid.
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compression import registry
from thinwire.compression.codec import Codec

SLOW = "int8(block=256)"
"""Codec of the slow weights, unless that of the pseudo-gradient is exact."""


@dataclass(frozen=True, slots=True)
class Halves:
    """`fast`: codec of Δ; or of θ, when `slow`, that of φ, is None."""

    fast: Codec
    slow: Codec | None

    @property
    def spec(self) -> str:
        """Names both codecs."""
        return self.fast.spec if self.slow is None else f"{self.fast.spec}+{self.slow.spec}"

    @property
    def exact(self) -> bool:
        """Whether nothing is lost on the way, so that nothing has to be fed back."""
        return self.fast.plain

    def nbytes(self, n: int) -> int:
        """Exact size in bytes of n elements of both."""
        return self.fast.nbytes(n) + (self.slow.nbytes(n) if self.slow is not None else 0)


def halves(spec: str, *, lr: float, gamma: float) -> Halves:
    """For the codec, β and γ of a manifest."""
    fast = registry.dense(spec)
    if not fast.plain:
        return Halves(fast, registry.dense(SLOW))
    return Halves(fast, None if gamma == lr else fast)
