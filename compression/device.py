"""Encoding of contributions by CPU kernels or by torch, depending on the device of the parameters.

Both write the same bytes. The choice is therefore local: no manifest names it, and peers of one round may differ.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from thinwire.compression.core.parameter_chunks import Chunks, Gather, Section
from thinwire.compression.core.types import Floats
from thinwire.compression.dense import torch_backend as dense
from thinwire.compression.dense.blockint import Integers
from thinwire.compression.kernels.dct import forward_torch
from thinwire.compression.sparse import torch_backend as sparse
from thinwire.compression.sparse.demo import Coefficients, Demo, spectrum
from thinwire.compression.sparse.topk import Selected, Sparse
from torch import Tensor

Vector: TypeAlias = Floats | Tensor
"""Flat float32 on the host (an array), or on the device that encodes it (a tensor)."""

HOST = torch.device("cpu")

DEVICES = frozenset({"cuda"})
"""Types of devices on which torch encodes; parameters on others are copied to the host."""


def encoding_device(codec: object, device: torch.device) -> torch.device | None:
    """Return the device that encodes contributions of a model on `device`; None: the CPU kernels do.

    The codecs fp32, fp16, bf16 and e3m0 have no torch implementation; the factors of PowerSGD are computed on the host.
    """
    return device if device.type in DEVICES and isinstance(codec, Integers | Sparse | Demo) else None


def empty(n: int, device: torch.device | None) -> Vector:
    """Return a vector of n elements with arbitrary values."""
    return np.empty(n, np.float32) if device is None else torch.empty(n, dtype=torch.float32, device=device)


def placed(values: Floats, device: torch.device | None) -> Vector:
    """Return `values` on a device; None: the array itself."""
    return values if device is None else torch.from_numpy(values).to(device)


def subtract_from(values: Floats, x: Vector) -> None:
    """Compute x = values − x, in float32."""
    if isinstance(x, Tensor):
        torch.sub(torch.from_numpy(values).to(x.device), x, out=x)
    else:
        np.subtract(values, x, out=x)


def finite(x: Vector) -> bool:
    """Return True if the squared L2 norm of x is finite in float32."""
    return bool(torch.isfinite(torch.dot(x, x))) if isinstance(x, Tensor) else bool(np.isfinite(np.dot(x, x)))


def encode(codec: Any, x: Vector, out: NDArray[np.uint8], seed: int = 0) -> None:
    """Write the payload of x to `out`, like `codec.encode`. Raises the same errors.

    codec: a dense codec; for a tensor one that `encoding_device` has approved.
    """
    if isinstance(x, Tensor):
        torch.from_numpy(out).copy_(dense.encode(codec, x, seed))
    else:
        codec.encode(x, out, seed)


def select(codec: Sparse | Demo, gather: Gather, chunks: Chunks, device: torch.device) -> Selected | Coefficients:
    """Return `codec.select_from(gather, chunks)`, computed on a device. Raises the same errors."""
    values, side = (_section(one, gather, device) for one in chunks.sections), chunks.side
    if isinstance(codec, Sparse):
        parts = (sparse.part(codec, one, each) for one, each in zip(chunks.sections, values, strict=True))
        return Selected(codec, chunks, tuple(parts))
    blocks = (sparse.cut(one, each).view(-1, side, side) for one, each in zip(chunks.sections, values, strict=True))
    layout, own = spectrum(chunks), codec.sparse()
    coefficients = zip(layout.sections, map(forward_torch, blocks), strict=True)
    parts = (sparse.part(own, spectral, each.reshape(-1)) for spectral, each in coefficients)
    return Coefficients(codec, chunks, Selected(own, layout, tuple(parts)))


def _section(section: Section, gather: Gather, device: torch.device) -> Tensor:
    """Return the elements of a section on a device."""
    values, at = torch.empty(section.size, dtype=torch.float32, device=device), 0
    for strip in section.strips():
        values[at : at + strip.size] = torch.from_numpy(gather(strip))
        at += strip.size
    return values
