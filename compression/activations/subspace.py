"""Codec of a stage boundary when the residual stream stays in a fixed subspace. arXiv 2506.01260.

With reparametrised weights (`out = U·Z`), the stream is x = x0 + h·Uᵀ at every boundary, where x0 is the token's row in
a frozen table that every stage can generate itself. So k numbers and the token determine all of x, and k numbers
determine its gradient; the only loss is rounding to bf16. `U` (d × k) has orthonormal columns, is fixed for the run and
equal on all peers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.noise import normal
from thinwire.compression.core.types import Buffer, Floats
from thinwire.compression.kernels import thin_factors
from thinwire.compression.kernels.payload_arrays import raw
from torch import Tensor

TABLE_SCALE = np.float32(0.02)
"""Standard deviation of the initial frozen table."""

SHORT_VOCABULARY = 1 << 16
"""Largest vocabulary whose tokens are sent in 2 bytes each; tokens of larger ones take 4."""


def basis(width: int, k: int, seed: int) -> Floats:
    """Return U (width × k) with orthonormal columns, drawn from the run's seed, bit-equal on all peers.

    Raises ValueError unless 1 ≤ k ≤ width.
    """
    if not 1 <= k <= width:
        raise ValueError(f"subspace: k must be 1…{width}, not {k}")
    rows = normal(seed, f"subspace {width} {k}", k * width).reshape(k, width)
    thin_factors.orthonormalise(rows)
    return np.ascontiguousarray(rows.T)


def table(vocabulary: int, width: int, seed: int) -> Floats:
    """Return T_fixed (vocabulary × width), drawn from the run's seed, bit-equal on all peers.

    Its values are normal with deviation 0.02.
    """
    return (normal(seed, f"table {vocabulary} {width}", vocabulary * width) * TABLE_SCALE).reshape(vocabulary, width)


def compress(x: Tensor, x0: Tensor | None, u: Tensor) -> Tensor:
    """Return h = (x − x0)·U, from (..., width) to (..., k). x0 is None for gradients."""
    return (x if x0 is None else x - x0) @ u


def restore(h: Tensor, x0: Tensor | None, u: Tensor) -> Tensor:
    """Return x = x0 + h·Uᵀ, from (..., k) to (..., width)."""
    x = h @ u.mT
    return x if x0 is None else x0 + x


@dataclass(frozen=True, slots=True)
class Subspace:
    """Wire format of a boundary. Forward: token ids (u16 or u32 by the vocabulary), then h as bf16.

    Backward: g as bf16. All values are little-endian, with one row per token. Raises ValueError unless 1 ≤ k ≤ 65,536.
    """

    k: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 1 << 16:
            raise ValueError(f"subspace: k must be 1…65536, not {self.k}")

    @property
    def spec(self) -> str:
        return f"subspace(k={self.k})"

    def nbytes(self, tokens: int, vocabulary: int = 0) -> int:
        """Return the exact size of the payload in bytes: forward if a vocabulary is given, else backward."""
        return tokens * (2 * self.k + (_width(vocabulary) if vocabulary else 0))

    def encode(self, h: NDArray[np.float32], tokens: NDArray[np.int64] | None = None, vocabulary: int = 0) -> bytes:
        """Encode h (tokens, k), rounded to the nearest bf16, ties to even; forward also the token ids.

        Raises CodecError if a value is not finite or rounds to infinity, ValueError for arguments of other shapes or types.
        """
        if h.dtype != np.float32 or h.ndim != 2 or h.shape[1] != self.k or not h.flags.c_contiguous:
            raise ValueError(f"{self.spec} of {h.dtype} {h.shape}")
        if (tokens is None) != (vocabulary == 0) or (tokens is not None and tokens.shape != h.shape[:1]):
            raise ValueError("only the forward direction has token ids, one for each row, and a vocabulary")
        narrow = torch.from_numpy(h).to(torch.bfloat16)
        if not bool(torch.isfinite(narrow).all()):
            raise CodecError("a value is not finite", "not finite")
        head = b""
        if tokens is not None:
            if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
                raise ValueError(f"a token is outside of the vocabulary of {vocabulary}")
            head = tokens.astype(f"<u{_width(vocabulary)}").tobytes()
        return head + narrow.view(torch.int16).numpy().astype("<i2").tobytes()

    def decode(
        self, payload: Buffer, tokens: int, vocabulary: int = 0
    ) -> tuple[NDArray[np.float32], NDArray[np.int64] | None]:
        """Decode h (tokens, k), and the token ids in the forward direction.

        Raises CodecError for a wrong length, a token outside of the vocabulary, or a value that is not finite.
        """
        found = raw(payload, self.nbytes(tokens, vocabulary))
        ids = None
        if vocabulary:
            head = tokens * _width(vocabulary)
            ids, found = found[:head].view(f"<u{_width(vocabulary)}").astype(np.int64), found[head:]
            if ids.size and int(ids.max()) >= vocabulary:
                raise CodecError(f"a token is outside of the vocabulary of {vocabulary}")
        words = found.view("<u2").astype(np.uint32)
        if ((words & 0x7F80) == 0x7F80).any():
            raise CodecError("a value is not finite", "not finite")
        return (words << 16).view(np.float32).reshape(tokens, self.k), ids


def _width(vocabulary: int) -> int:
    return 2 if vocabulary <= SHORT_VOCABULARY else 4
