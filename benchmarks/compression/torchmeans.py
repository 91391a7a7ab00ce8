"""Decoding and averaging of payloads in torch, bit-equal to the CPU kernels.

The product does both on the host, which has the outer parameters; benchmarks measure what a device could gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.parameter_chunks import Chunks, Section
from thinwire.compression.core.types import Denominator
from thinwire.compression.dense.blockint import Integers
from thinwire.compression.dense.torch_backend import floats_of, rows_of
from thinwire.compression.kernels.common import BAD_CODE, BAD_SCALE, OK
from thinwire.compression.kernels.packing import LANES, WIDTHS, group_bytes
from thinwire.compression.kernels.payload_arrays import refuse
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.header import DENSE, EMPTY
from thinwire.compression.sparse.topk import Part, Selected
from thinwire.compression.sparse.torch_backend import gather
from torch import Tensor


def dense_decode(codec: Integers, payload: Tensor, n: int) -> Tensor:
    """Return the n values of a uint8 payload as float32 on the same device.

    Raises CodecError if the payload is not a valid encoding, ValueError for another dtype or shape.
    """
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise ValueError(f"decode takes flat uint8, not {payload.dtype} of {payload.dim()} dimensions")
    if payload.numel() != codec.nbytes(n):
        raise CodecError(f"payload of {payload.numel()} bytes, expected {codec.nbytes(n)}", "length")
    blocks = -(-n // codec.block)
    halves = payload[: (4 if codec.asymmetric else 2) * blocks].clone().view(torch.int16).to(torch.int32) & 0xFFFF
    scales, offsets = halves[:blocks], halves[blocks:]
    bad_scale = (scales >= 0x7C00).any()
    if codec.asymmetric:
        bad_scale = bad_scale | ((offsets & 0x7FFF) >= 0x7C00).any() | (offsets == 0x8000).any()
    out = torch.empty(n, dtype=torch.float32, device=payload.device)
    bad_code, at, first = torch.zeros_like(bad_scale), 2 * halves.numel(), 0
    for rows, start in rows_of(out, codec.block):
        size = group_bytes(rows.shape[1], codec.bits)
        packed = payload[at : at + rows.shape[0] * size].view(rows.shape[0], size)
        codes = unpack(packed, codec.bits, not codec.asymmetric)
        which = slice(first, first + rows.shape[0])
        bad_code = bad_code | codes[:, rows.shape[1] :].any() | (codes.ne(0).any(dim=1) & (scales[which] == 0)).any()
        codes = codes[:, : rows.shape[1]]
        values = codes.to(torch.float32) * floats_of(scales[which]).unsqueeze(1)
        if codec.asymmetric:
            values = values + floats_of(offsets[which]).unsqueeze(1)
        else:
            bad_code = bad_code | (codes == -(1 << (codec.bits - 1))).any()
        out[start : start + values.numel()] = values.reshape(-1)
        at, first = at + packed.numel(), first + rows.shape[0]
    wrong = torch.where(bad_scale, BAD_SCALE, torch.where(bad_code, BAD_CODE, OK))
    refuse(int(wrong))
    return out


def dense_mean(codec: Integers, payloads: Sequence[Tensor], weights: Sequence[float], n: int) -> Tensor:
    """Return the weighted mean of payloads, Σ (w / Σ w)·x, as float32; bit-equal to `Integers.mean`.

    The sum is in float64, in the given order. Raises the errors of `decode`, and ValueError unless there is one finite,
    non-negative weight per payload and they are not all zero.
    """
    total = math.fsum(weights)
    if len(weights) != len(payloads) or not 0 < total < math.inf or min(weights) < 0:
        raise ValueError(f"{len(payloads)} payloads need as many weights, finite, none negative, not all zero")
    device = payloads[0].device
    sums = torch.zeros(n, dtype=torch.float64, device=device)
    for payload, weight in zip(payloads, weights, strict=True):
        sums = sums + dense_decode(codec, payload, n).to(torch.float64) * (weight / total)
    return sums.to(torch.float32)


def unpack(packed: Tensor, bits: int, signed: bool) -> Tensor:
    """Unpack rows of bytes into rows of codes (int32), including the padding at the end."""
    planes = packed.to(torch.int32).view(packed.shape[0], WIDTHS[bits], -1)
    words = planes[:, 0].clone()
    for k in range(1, WIDTHS[bits]):
        words |= planes[:, k] << 8 * k
    codes = torch.cat([words >> bits * lane & (1 << bits) - 1 for lane in range(LANES[bits])], dim=1)
    return codes - (codes >> bits - 1 << bits) if signed else codes


def sparse_scatter(selected: Selected, out: Tensor, scale: float = 1.0) -> None:
    """Add scale·v̂ to out in float32, on its device, like `selected.scatter`."""
    for section, part in zip(selected.chunks.sections, selected.parts, strict=True):
        if part.mode != EMPTY:
            elements = gather(section, out)
            elements[_where(selected, section, part, out.device)] += _values(selected, part, out.device) * scale
            _put(section, elements, out)


def sparse_mean(
    selected: Sequence[Selected],
    weights: Sequence[float],
    chunks: Chunks,
    device: torch.device | str,
    denominator: Denominator = "bounded_contributor_mean",
    clip: bool = True,
) -> Tensor:
    """Return the result of `sparsemean.mean`, computed on a device. Raises the same errors."""
    total = sparsemean.checked(selected, weights, chunks, denominator)
    out = torch.zeros(chunks.total, dtype=torch.float32, device=device)
    for i, section in enumerate(chunks.sections):
        sums = torch.zeros(section.size, dtype=torch.float64, device=device)
        counts = torch.zeros_like(sums)
        given = sparsemean.sent(selected, i, weights, clip)
        for one, part, weight, share in given:
            where = _where(one, section, part, out.device)
            sums[where] += _values(one, part, out.device).to(torch.float64) * share
            counts[where] += weight
        least = total if denominator == "mean" else 0.0
        if denominator == "bounded_contributor_mean" and given:
            parts = [part for _, part, _, _ in given]
            peers = sum(weight > 0 for weight in weights)
            least = total * sparsemean.usual_share(section, selected[0].codec.k, parts, peers)
        below = counts.where(counts > 0, 1.0).clamp(min=least)
        _put(section, (sums / below).to(torch.float32), out)
    return out


def _where(selected: Selected, section: Section, part: Part, device: torch.device) -> Tensor | slice:
    """Return the positions of the entries among the section's elements."""
    if part.mode == DENSE:
        return slice(None)
    keep = torch.from_numpy(section.keep(selected.codec.k)).to(device)
    chunk = torch.repeat_interleave(torch.arange(section.count, device=device), keep)
    at = torch.from_numpy(part.indices.astype(np.int32)).to(device).to(torch.int64)
    side, across = section.side, section.across
    row = torch.div(chunk, across, rounding_mode="floor") * side + torch.div(at, side, rounding_mode="floor")
    return row * section.cols + chunk % across * side + at % side


def _values(selected: Selected, part: Part, device: torch.device) -> Tensor:
    """Return v̂ of each entry."""
    if part.mode == DENSE:
        return torch.from_numpy(selected.values(part)).to(device)
    levels = torch.from_numpy(selected.codec.levels(part.lo, part.hi)).to(device)
    return levels[torch.from_numpy(part.codes).to(device).to(torch.int64)]


def _put(section: Section, elements: Tensor, flat: Tensor) -> None:
    """Write all elements back, unless they are a view of the flat vector."""
    position = 0
    for start, stop in section.spans:
        source = elements[position : position + stop - start]
        if source.data_ptr() != flat[start:stop].data_ptr():
            flat[start:stop] = source
        position += stop - start
