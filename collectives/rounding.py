"""Chance without a generator: what a stochastic codec leaves to it is decided by a hash of the values themselves."""

from __future__ import annotations

import blake3
import numpy as np
from numpy.typing import NDArray
from thinwire.compression.codec import Codec, Floats


def encode(codec: Codec, x: Floats, out: NDArray[np.uint8]) -> None:
    """`codec.encode` with a seed that is a hash of x.

    So whoever repeats a round or takes over a chunk writes the same bytes, and peers with different values, or one peer in
    different rounds, do not round alike. Raises what `codec.encode` raises.
    """
    seed = int.from_bytes(blake3.blake3(x.view(np.uint8).data).digest(8), "little") if codec.stochastic else 0
    codec.encode(x, out, seed)
