"""Frozen part of a subspace embedding: rows that every stage of a group adds to its input.

The rows belong to the tokens, and are the part of the embedding outside of the subspace, so they change with every
outer step. The origin sends them to its hosts before the next inner step, with 8 bits a value and one scale for every
256 values. All stages compute with the decoded values and therefore add the same; the rounding error affects the group
only.
"""

from __future__ import annotations

from dataclasses import dataclass

import blake3
import numpy as np
import torch
from thinwire.compression.dense.blockint import Integers
from torch import Tensor

CODEC = Integers(8, 256)

TAG_BYTES = 6


@dataclass(frozen=True, slots=True)
class FrozenEmbedding:
    """Encoded rows. `tag` identifies them; 0 means none."""

    payload: bytes = b""
    tag: int = 0

    @classmethod
    def encode(cls, rows: Tensor) -> FrozenEmbedding:
        """Encode rows [vocab, width] of float32. Raises CodecError if a value is not finite."""
        flat = rows.contiguous().numpy().reshape(-1)
        out = np.empty(CODEC.nbytes(flat.size), np.uint8)
        CODEC.encode(flat, out)
        return cls.of(out.tobytes())

    @classmethod
    def of(cls, payload: bytes) -> FrozenEmbedding:
        """Wrap a received payload, with its tag."""
        return cls(payload, int.from_bytes(blake3.blake3(payload).digest()[:TAG_BYTES], "big"))

    def rows(self, vocab: int, width: int) -> Tensor:
        """Decode to float32 [vocab, width]. Raises CodecError if the payload is not an encoding of that shape."""
        out = np.empty(vocab * width, np.float32)
        CODEC.decode(self.payload, out)
        return torch.from_numpy(out).view(vocab, width)


def nbytes(vocab: int, width: int) -> int:
    """Return the exact size of a payload in bytes."""
    return CODEC.nbytes(vocab * width)
