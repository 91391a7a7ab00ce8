"""Deterministic rounding: the seed of a stochastic codec is a hash of the values themselves."""

from __future__ import annotations

import blake3
import numpy as np
from numpy.typing import NDArray
from thinwire.compression import device
from thinwire.compression.core.codec import Codec
from torch import Tensor


def encode(codec: Codec, x: device.Vector, out: NDArray[np.uint8]) -> None:
    """Encode x, an array or a tensor on a device, with a hash of x as the seed.

    So a peer that repeats a round or takes over a chunk writes the same bytes, while different values are rounded
    differently, on different peers or in different rounds. Raises the errors of `codec.encode`.
    """
    seed = 0
    if codec.stochastic:
        values = x.cpu().numpy() if isinstance(x, Tensor) else x
        seed = int.from_bytes(blake3.blake3(values.view(np.uint8).data).digest(8), "little")
    device.encode(codec, x, out, seed)
