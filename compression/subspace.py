"""The boundary between pipeline stages when the residual stream stays in a fixed subspace. arXiv 2506.01260.

With weights reparametrised (`out = U·Z`), the stream is x = x0 + h·Uᵀ at every boundary, where x0 is a frozen table's row of
the token, which every stage can draw itself. So k numbers and the token say all of x, and k numbers all of its gradient:
nothing is lost but what bf16 rounds. `U` (d × k) has orthonormal columns, is fixed for the run and the same on all peers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from thinwire.compression import lowrankkernels
from thinwire.compression.codec import Buffer, CodecError, Floats
from thinwire.compression.noise import normal
from thinwire.compression.payloads import raw
from torch import Tensor

TABLE_SCALE = np.float32(0.02)
"""Standard deviation of the frozen table at the start."""
SHORT_VOCABULARY = 1 << 16
"""Vocabularies up to here send a token in 2 bytes, larger ones in 4."""


def basis(width: int, k: int, seed: int) -> Floats:
    """U (width × k), orthonormal columns, drawn from the run's seed: the same bits everywhere.

    Raises ValueError unless 1 ≤ k ≤ width.
    """
    if not 1 <= k <= width:
        raise ValueError(f"subspace: k must be 1…{width}, not {k}")
    rows = normal(seed, f"subspace {width} {k}", k * width).reshape(k, width)
    lowrankkernels.orthonormalise(rows)
    return np.ascontiguousarray(rows.T)


def table(vocabulary: int, width: int, seed: int) -> Floats:
    """T_fixed (vocabulary × width), normal with deviation 0.02, drawn from the run's seed: the same bits everywhere."""
    return (normal(seed, f"table {vocabulary} {width}", vocabulary * width) * TABLE_SCALE).reshape(vocabulary, width)


def digest(u: Floats) -> bytes:
    """32 bytes over a basis, for the manifest."""
    return hashlib.sha256(f"thinwire/subspace/1 {u.shape}\n".encode() + u.astype("<f4").tobytes()).digest()


def compress(x: Tensor, x0: Tensor | None, u: Tensor) -> Tensor:
    """h = (x − x0)·U, (..., width) to (..., k). For gradients x0 is None: the frozen table has none."""
    return (x if x0 is None else x - x0) @ u


def restore(h: Tensor, x0: Tensor | None, u: Tensor) -> Tensor:
    """x = x0 + h·Uᵀ, (..., k) to (..., width)."""
    x = h @ u.mT
    return x if x0 is None else x0 + x


class Crossing(torch.autograd.Function):
    """What a boundary does to x and to its gradient, in one process: for tests and for stages that share a machine."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, x: Tensor, x0: Tensor, u: Tensor) -> Tensor:
        context.save_for_backward(u)
        return restore(compress(x, x0, u), x0, u)

    @staticmethod
    def backward(context: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (u,) = context.saved_tensors  # type: ignore[attr-defined]
        return restore(compress(gradients[0], None, u), None, u), None, None


def settle(table_fixed: Tensor, table_moving: Tensor, u: Tensor) -> None:
    """After an outer step, in place: what the embedding drifted out of the subspace moves to the frozen table.

    T_S ← Π(T_S), T_fixed ← T_fixed + T_S − Π(T_S), with Π(T) = T·U·Uᵀ: their sum, the embedding, stays what it was.
    """
    inside = table_moving @ u @ u.mT
    table_fixed += table_moving - inside
    table_moving.copy_(inside)


@dataclass(frozen=True, slots=True)
class Subspace:
    """The wire format of a boundary: forward, token ids (u16 or u32 by the vocabulary) then h as bf16; backward, g as bf16.
    All little-endian, a row per token.

    Raises ValueError unless 1 ≤ k ≤ 65,536.
    """

    k: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 1 << 16:
            raise ValueError(f"subspace: k must be 1…65536, not {self.k}")

    @property
    def spec(self) -> str:
        return f"subspace(k={self.k})"

    def nbytes(self, tokens: int, vocabulary: int = 0) -> int:
        """Exact size of the payload: forward when a vocabulary is given, otherwise backward."""
        return tokens * (2 * self.k + (_width(vocabulary) if vocabulary else 0))

    def encode(self, h: NDArray[np.float32], tokens: NDArray[np.int64] | None = None, vocabulary: int = 0) -> bytes:
        """The payload of h (tokens, k), rounded to the nearest bf16, ties to even; with the token ids when it goes forward.

        Raises CodecError when a value is not finite or rounds to infinity, ValueError when something does not fit.
        """
        if h.dtype != np.float32 or h.ndim != 2 or h.shape[1] != self.k or not h.flags.c_contiguous:
            raise ValueError(f"{self.spec} of {h.dtype} {h.shape}")
        if (tokens is None) != (vocabulary == 0) or (tokens is not None and tokens.shape != h.shape[:1]):
            raise ValueError("token ids go forward, one a row, with their vocabulary")
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
        """h (tokens, k), and the token ids when it goes forward. Raises CodecError for a wrong length, a token outside of the
        vocabulary, or a value that is not finite.
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
