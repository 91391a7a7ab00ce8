"""Data that one side of a pair sends: one vector if that suffices, else two, each with its own codec.

A pair needs from each side Δ = θ − φ, the pseudo-gradient with the opposite sign, and the slow weights φ (NoLoCo, arXiv
2506.10911). With γ = β
the step is a function of θ alone, so exact codecs send θ. A lossy codec encodes Δ, with error feedback; φ then travels
at 8 bits, and both sides use the decoded values, so that their moves towards each other cancel. φ is known when a round
begins and travels while both train; Δ follows. A payload consists of the chunks of Δ, then those of φ, on one grid.
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compression import registry
from thinwire.compression.core.codec import Codec

SLOW = "int8(block=256)"
"""Codec of the slow weights, unless that of the pseudo-gradient is exact."""


@dataclass(frozen=True, slots=True)
class PairCodec:
    """Codecs of a pair. `fast`: codec of Δ, or of θ if `slow`, the codec of φ, is None."""

    fast: Codec
    slow: Codec | None

    @property
    def spec(self) -> str:
        """Names of both codecs."""
        return self.fast.spec if self.slow is None else f"{self.fast.spec}+{self.slow.spec}"

    @property
    def means(self) -> Codec:
        """Codec of the means that owners of chunks send.

        8 bits unless Δ is exact, because no error feedback corrects them.
        """
        return self.fast if self.slow is None or self.fast.plain else self.slow

    @property
    def exact(self) -> bool:
        """True if encoding loses nothing, so that no error feedback is needed."""
        return self.fast.plain

    def nbytes(self, n: int) -> int:
        """Return the exact bytes of n elements of both vectors."""
        return self.fast.nbytes(n) + (self.slow.nbytes(n) if self.slow is not None else 0)


def halves(spec: str, *, lr: float, gamma: float) -> PairCodec:
    """Return the codecs for the codec, β and γ of a manifest."""
    fast = registry.dense(spec)
    if not fast.plain:
        return PairCodec(fast, registry.dense(SLOW))
    return PairCodec(fast, None if gamma == lr else fast)
