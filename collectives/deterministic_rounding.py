"""Deterministic rounding: the seed of a stochastic codec is a hash of the values themselves."""

from __future__ import annotations

import blake3
import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.types import Floats


def encode(codec: Codec, x: Floats, out: NDArray[np.uint8]) -> None:
    """Call `codec.encode` with a hash of x as the seed.

    So a peer that repeats a round or takes over a chunk writes the same bytes, while different values are rounded
    differently, on different peers or in different rounds. Raises the errors of `codec.encode`.
    """
    seed = int.from_bytes(blake3.blake3(x.view(np.uint8).data).digest(8), "little") if codec.stochastic else 0
    codec.encode(x, out, seed)
