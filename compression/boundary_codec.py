"""Codec for the boundary between pipeline stages: activations forward, their gradients backward.

Names are those of compression/registry.py: "fp32", "bf16", "rows(bits=8)", "tah", "subspace(k=64)" and any other codec
of dense vectors or of rows. Gradients use the same codec, except with "tah" and 4-bit rows, whose gradients are sent as
8-bit rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from thinwire.compression import registry
from thinwire.compression.activations import subspace
from thinwire.compression.activations.codecs import Rows, Tah
from thinwire.compression.activations.subspace import Subspace
from thinwire.compression.core.types import Buffer
from torch import Tensor


class Boundary:
    """Codec `spec` for rows of `width` elements.

    Only "subspace" uses the vocabulary size and the run's seed. Raises ValueError (SpecError) for a name that is not a
    codec for activations.
    """

    def __init__(self, spec: str, width: int, vocabulary: int, seed: int) -> None:
        forward: Any = registry.parse(spec)
        if not (isinstance(forward, (Rows, Tah, Subspace)) or registry.kind_of(spec) == "dense"):
            raise registry.SpecError(f"codec {spec!r} is not for activations")
        if getattr(forward, "stochastic", False):
            raise registry.SpecError(f"codec {spec!r} leaves something to chance; a retried micro-batch would differ")
        self.spec: str = forward.spec
        self.width, self.vocabulary = width, vocabulary
        self._forward = forward
        self._backward: Any = Rows(8) if isinstance(forward, (Tah, Rows)) else forward
        self._u = self._table = torch.empty(0)
        if isinstance(forward, Subspace):
            self._u = torch.from_numpy(subspace.basis(width, forward.k, seed))
            self._table = torch.from_numpy(subspace.table(vocabulary, width, seed))

    def freeze(self, rows: Tensor) -> None:
        """Replace the frozen embedding rows [vocab, width] of a model that is confined to a subspace."""
        self._table = rows

    @property
    def confined(self) -> int:
        """Dimension k of the subspace that models must be confined to (see subspace_model.py), or 0."""
        return self._forward.k if isinstance(self._forward, Subspace) else 0

    def nbytes(self, batch: int, length: int, *, backward: bool) -> int:
        """Return the exact size in bytes of a payload for `batch` sequences of `length` tokens."""
        rows, codec = batch * length, self._backward if backward else self._forward
        if isinstance(codec, Subspace):
            return codec.nbytes(rows, 0 if backward else self.vocabulary)
        if isinstance(codec, (Rows, Tah)):
            return codec.nbytes(rows, self.width)
        return int(codec.nbytes(rows * self.width))

    def warm_up(self) -> None:
        """Compile the kernels in advance, so that the first micro-batch does not wait for it."""
        x, tokens = torch.zeros(1, 1, self.width), torch.zeros(1, 1, dtype=torch.long)
        for backward in (False, True):
            self.unpack(self.pack(x, None if backward else tokens, backward=backward), 1, 1, backward=backward)

    def pack(self, x: Tensor, tokens: Tensor | None = None, *, backward: bool) -> bytes:
        """Encode x [B, T, width], on any device.

        A confined model needs `tokens` [B, T] in the forward direction.

        Raises CodecError if a value is not finite.
        """
        codec, rows = self._backward if backward else self._forward, x.detach().float().cpu().reshape(-1, self.width)
        if isinstance(codec, Subspace):
            if backward:
                return codec.encode(_array(subspace.compress(rows, None, self._u)))
            assert tokens is not None
            ids = tokens.reshape(-1).cpu()
            return codec.encode(
                _array(subspace.compress(rows, self._table[ids], self._u)), ids.numpy(), self.vocabulary
            )
        array = _array(rows)
        out = np.empty(self.nbytes(x.shape[0], x.shape[1], backward=backward), np.uint8)
        if isinstance(codec, (Rows, Tah)):
            codec.encode(array, out)
        else:
            codec.encode(array.reshape(-1), out)
            codec.check(out.data, array.size)  # fp32 accepts any value
        return out.tobytes()

    def unpack(self, payload: Buffer, batch: int, length: int, *, backward: bool) -> tuple[Tensor, Tensor | None]:
        """Decode x [B, T, width] as float32, and the tokens [B, T] if the payload has them.

        Raises CodecError for an invalid payload.
        """
        codec, rows = self._backward if backward else self._forward, batch * length
        if isinstance(codec, Subspace):
            h, ids = codec.decode(payload, rows, 0 if backward else self.vocabulary)
            tokens = None if ids is None else torch.from_numpy(ids)
            x = subspace.restore(torch.from_numpy(h), None if tokens is None else self._table[tokens], self._u)
            return x.view(batch, length, self.width), None if tokens is None else tokens.view(batch, length)
        out = np.empty((rows, self.width), np.float32)
        codec.decode(payload, out if isinstance(codec, (Rows, Tah)) else out.reshape(-1))
        return torch.from_numpy(out).view(batch, length, self.width), None


def _array(x: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return x.contiguous().numpy()
