"""Codec for the boundary between pipeline stages: activations forward, their gradients backward.

Names are those of compression/registry.py: "fp32", "bf16", "rows(bits=8)", "tah", "subspace(k=64)" and any other codec
of dense vectors or of rows. Gradients use the same codec, except with "tah" and 4-bit rows, whose gradients are sent as
8-bit rows.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from thinwire.compression import registry
from thinwire.compression.activations import subspace
from thinwire.compression.activations.codecs import Rows, Tah
from thinwire.compression.activations.subspace import Subspace
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.types import Buffer, Floats
from torch import Tensor


class _Direction(Protocol):
    """Codec of one direction, for rows of float32 on the host: one row per token."""

    def nbytes(self, rows: int) -> int:
        """Return the exact size in bytes of a payload."""
        ...

    def encode(self, x: Floats, tokens: Tensor | None) -> bytes:
        """Return the payload of x [rows, width]; `tokens` [rows] are sent too if the codec needs them."""
        ...

    def decode(self, payload: Buffer, rows: int) -> tuple[Floats, Tensor | None]:
        """Return x [rows, width], and the tokens [rows] if the payload has them."""
        ...


class _Dense:
    """Rows as one flat vector of a dense codec."""

    def __init__(self, codec: Codec, width: int) -> None:
        self._codec, self._width = codec, width

    def nbytes(self, rows: int) -> int:
        return self._codec.nbytes(rows * self._width)

    def encode(self, x: Floats, tokens: Tensor | None) -> bytes:
        out = np.empty(self.nbytes(len(x)), np.uint8)
        self._codec.encode(x.reshape(-1), out)
        self._codec.check(out.data, x.size)  # fp32 accepts any value
        return out.tobytes()

    def decode(self, payload: Buffer, rows: int) -> tuple[Floats, Tensor | None]:
        out = np.empty((rows, self._width), np.float32)
        self._codec.decode(payload, out.reshape(-1))
        return out, None


class _RowByRow:
    """Codec that encodes each row separately."""

    def __init__(self, codec: Rows | Tah, width: int) -> None:
        self._codec, self._width = codec, width

    def nbytes(self, rows: int) -> int:
        return self._codec.nbytes(rows, self._width)

    def encode(self, x: Floats, tokens: Tensor | None) -> bytes:
        out = np.empty(self.nbytes(len(x)), np.uint8)
        self._codec.encode(x, out)
        return out.tobytes()

    def decode(self, payload: Buffer, rows: int) -> tuple[Floats, Tensor | None]:
        out = np.empty((rows, self._width), np.float32)
        self._codec.decode(payload, out)
        return out, None


class _ConfinedForward:
    """Activations in the subspace of `u` [width, k]; their tokens are sent, too.

    The rest of an activation is the frozen embedding row of its token. table: these rows, [vocabulary, width].
    """

    def __init__(self, codec: Subspace, u: Tensor, table: Tensor, vocabulary: int) -> None:
        self._codec, self._u, self.table, self._vocabulary = codec, u, table, vocabulary

    def nbytes(self, rows: int) -> int:
        return self._codec.nbytes(rows, self._vocabulary)

    def encode(self, x: Floats, tokens: Tensor | None) -> bytes:
        assert tokens is not None
        h = subspace.compress(torch.from_numpy(x), self.table[tokens], self._u)
        return self._codec.encode(_array(h), tokens.numpy(), self._vocabulary)

    def decode(self, payload: Buffer, rows: int) -> tuple[Floats, Tensor | None]:
        h, ids = self._codec.decode(payload, rows, self._vocabulary)
        assert ids is not None
        tokens = torch.from_numpy(ids)
        return _array(subspace.restore(torch.from_numpy(h), self.table[tokens], self._u)), tokens


class _ConfinedBackward:
    """Gradients in the subspace of `u` [width, k]."""

    def __init__(self, codec: Subspace, u: Tensor) -> None:
        self._codec, self._u = codec, u

    def nbytes(self, rows: int) -> int:
        return self._codec.nbytes(rows)

    def encode(self, x: Floats, tokens: Tensor | None) -> bytes:
        return self._codec.encode(_array(subspace.compress(torch.from_numpy(x), None, self._u)))

    def decode(self, payload: Buffer, rows: int) -> tuple[Floats, Tensor | None]:
        h, _ = self._codec.decode(payload, rows)
        return _array(subspace.restore(torch.from_numpy(h), None, self._u)), None


class Boundary:
    """Codec `spec` for rows of `width` elements.

    Only "subspace" uses the vocabulary size and the run's seed. Raises ValueError (SpecError) for a name that is not a
    codec for activations.
    """

    def __init__(self, spec: str, width: int, vocabulary: int, seed: int) -> None:
        codec: Any = registry.parse(spec)
        if getattr(codec, "stochastic", False):
            raise registry.SpecError(f"codec {spec!r} is stochastic: a micro-batch that is sent again would differ")
        self.spec: str = codec.spec
        self.width, self.vocabulary = width, vocabulary
        self.confined = 0
        """Dimension k of the subspace that models must be confined to (see subspace_model.py), or 0."""
        self._forward: _Direction
        self._backward: _Direction
        if isinstance(codec, Subspace):
            self.confined, u = codec.k, torch.from_numpy(subspace.basis(width, codec.k, seed))
            table = torch.from_numpy(subspace.table(vocabulary, width, seed))
            self._forward, self._backward = _ConfinedForward(codec, u, table, vocabulary), _ConfinedBackward(codec, u)
        elif isinstance(codec, Rows | Tah):
            self._forward, self._backward = _RowByRow(codec, width), _RowByRow(Rows(8), width)
        elif registry.kind_of(spec) == "dense":
            self._forward = self._backward = _Dense(codec, width)
        else:
            raise registry.SpecError(f"codec {spec!r} is not for activations")

    def freeze(self, rows: Tensor) -> None:
        """Replace the frozen embedding rows [vocab, width] of a model that is confined to a subspace."""
        if isinstance(self._forward, _ConfinedForward):
            self._forward.table = rows

    def _codec(self, backward: bool) -> _Direction:
        return self._backward if backward else self._forward

    def nbytes(self, batch: int, length: int, *, backward: bool) -> int:
        """Return the exact size in bytes of a payload for `batch` sequences of `length` tokens."""
        return self._codec(backward).nbytes(batch * length)

    def warm_up(self) -> None:
        """Compile the kernels in advance, so that the first micro-batch does not wait for it."""
        x, tokens = torch.zeros(1, 1, self.width), torch.zeros(1, 1, dtype=torch.long)
        for backward in (False, True):
            self.unpack(self.pack(x, None if backward else tokens, backward=backward), 1, 1, backward=backward)

    def pack(self, x: Tensor, tokens: Tensor | None = None, *, backward: bool) -> bytes:
        """Encode x [B, T, width], on any device.

        A confined model needs `tokens` [B, T] in the forward direction. Raises CodecError if a value is not finite.
        """
        rows = _array(x.detach().float().cpu().reshape(-1, self.width))
        return self._codec(backward).encode(rows, None if tokens is None else tokens.reshape(-1).cpu())

    def unpack(self, payload: Buffer, batch: int, length: int, *, backward: bool) -> tuple[Tensor, Tensor | None]:
        """Decode x [B, T, width] as float32, and the tokens [B, T] if the payload has them.

        Raises CodecError for an invalid payload.
        """
        x, tokens = self._codec(backward).decode(payload, batch * length)
        rows = torch.from_numpy(x).view(batch, length, self.width)
        return rows, None if tokens is None else tokens.view(batch, length)


def _array(x: Tensor) -> Floats:
    return x.contiguous().numpy()
