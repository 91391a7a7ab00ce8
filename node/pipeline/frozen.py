"""The frozen part of a confined embedding: what every stage of a group adds to what comes to it, token by token.

It is what of the embedding lies outside of the subspace, so it changes with every outer step of the embedding, and the origin
hands it to its hosts before the next inner step: 8 bits a value, a scale for every 256. All compute with the decoded values, so
all add the same; what the rounding takes away is lost to the group only.
"""

from __future__ import annotations

from dataclasses import dataclass

import blake3
import numpy as np
import torch
from thinwire.compression.quantize import Integers
from torch import Tensor

CODEC = Integers(8, 256)

TAG_BYTES = 6


@dataclass(frozen=True, slots=True)
class Frozen:
    """Encoded rows. `tag` names them; 0: there are none."""

    payload: bytes = b""
    tag: int = 0

    @classmethod
    def encode(cls, rows: Tensor) -> Frozen:
        """Of rows [vocab, width] in float32. Raises CodecError when a value is not finite."""
        flat = rows.contiguous().numpy().reshape(-1)
        out = np.empty(CODEC.nbytes(flat.size), np.uint8)
        CODEC.encode(flat, out)
        return cls.of(out.tobytes())

    @classmethod
    def of(cls, payload: bytes) -> Frozen:
        """With the tag of what came."""
        return cls(payload, int.from_bytes(blake3.blake3(payload).digest()[:TAG_BYTES], "big"))

    def rows(self, vocab: int, width: int) -> Tensor:
        """[vocab, width] in float32. Raises CodecError when the payload is no encoding of that shape."""
        out = np.empty(vocab * width, np.float32)
        CODEC.decode(self.payload, out)
        return torch.from_numpy(out).view(vocab, width)


def nbytes(vocab: int, width: int) -> int:
    """Exact size of a payload."""
    return CODEC.nbytes(vocab * width)
