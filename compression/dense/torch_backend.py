"""Block quantizers in torch, for tensors on any device.

Bytes and values equal those of the CPU kernels. On an accelerator, only the flag for "all values are finite" is copied to the
host. Every operation is one that IEEE 754 rounds exactly, and operations are issued one at a time, so that no compiler fuses
them. Divisors are tensors, because CUDA multiplies by the reciprocal of a Python number.
"""

from __future__ import annotations

import torch
from thinwire.compression.dense.blockint import Integers
from thinwire.compression.kernels.common import NOT_FINITE
from thinwire.compression.kernels.packing import LANES, WIDTHS
from thinwire.compression.kernels.payload_arrays import refuse
from torch import Tensor


def encode(codec: Integers, x: Tensor, seed: int = 0) -> Tensor:
    """Return the payload of x as a uint8 tensor of codec.nbytes(n) bytes on the same device.

    x: flat float32, n elements. Raises CodecError if a value is not finite, ValueError for another dtype or shape.
    """
    if x.dtype != torch.float32 or x.dim() != 1:
        raise ValueError(f"encode takes flat float32, not {x.dtype} of {x.dim()} dimensions")
    if not bool(torch.isfinite(x).all()):
        refuse(NOT_FINITE)
    heads: list[list[Tensor]] = [[], []]
    packed: list[Tensor] = []
    for rows, start in rows_of(x.contiguous(), codec.block):
        scale, offset, codes = _quantize(codec, rows, start, seed)
        heads[0].append(scale)
        if codec.asymmetric:
            heads[1].append(offset)
        packed.append(pack(codes, codec.bits).reshape(-1))
    parts = [half.to(torch.int16).view(torch.uint8).reshape(-1) for head in heads for half in head] + packed
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=x.device)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack rows of codes into rows of bytes, in the order of `packing`."""
    if bits == 8:
        return codes.to(torch.uint8)
    lanes = LANES[bits]
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % lanes)) & ((1 << bits) - 1)
    parts = codes.view(codes.shape[0], lanes, -1)
    words = parts[:, 0].clone()
    for lane in range(1, lanes):
        words |= parts[:, lane] << bits * lane
    return torch.cat([(words >> 8 * k & 0xFF).to(torch.uint8) for k in range(WIDTHS[bits])], dim=1)


def uniform(index: Tensor, seed: int) -> Tensor:
    """Return the numbers in [0, 1) that `block_encode.uniform` gives, for int64 positions."""
    h = index ^ (seed & 0xFFFFFFFF)
    for high in (seed >> 32, 0):
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            h = ((h ^ (h >> shift)) * factor) & 0xFFFFFFFF
        h = h ^ high
    return (h >> 8).to(torch.float32) * 2.0**-24


def rows_of(x: Tensor, block: int) -> list[tuple[Tensor, int]]:
    """Return views of x as rows of one block each, with the position where each view starts.

    The first view holds all whole blocks; the second, if there is one, is the partial last block.
    """
    whole = x.numel() // block * block
    parts = [(x[:whole].view(-1, block), 0)] if whole else []
    return parts + ([(x[whole:].view(1, -1), whole)] if x.numel() > whole else [])


def _quantize(codec: Integers, rows: Tensor, start: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bits of scales and of offsets (int32), and the codes (int32, one row per block)."""
    low, high = -(2 ** (codec.bits - 1)) + 1, 2 ** (codec.bits - 1) - 1
    if codec.asymmetric:
        low, high = 0, 2**codec.bits - 1
        offset = _half_below(rows.amin(dim=1))
        rows = rows - floats_of(offset).unsqueeze(1)
        peak = rows.amax(dim=1).clamp(min=0.0)
    else:
        peak, offset = rows.abs().amax(dim=1), torch.empty(0)
    scale = _half_above(peak, high)
    divisor = floats_of(scale)
    inverse = torch.where(scale > 0, torch.ones_like(divisor) / divisor, torch.zeros_like(divisor))
    scaled = rows * inverse.unsqueeze(1)
    if codec.stochastic:
        index = torch.arange(start, start + rows.numel(), device=rows.device).view_as(rows)
        scaled = (scaled + uniform(index, seed)).clamp(low, high).floor()
    else:
        scaled = scaled.clamp(low, high).round()
    return scale, offset, scaled.to(torch.int32)


def floats_of(halves: Tensor) -> Tensor:
    """Convert fp16 values, given by their bits in int32, to float32."""
    return halves.to(torch.int16).view(torch.float16).to(torch.float32)


def _half_above(peak: Tensor, top: int) -> Tensor:
    """Return the bits of the smallest fp16 s with top·s ≥ peak, at most 65504 (see `half_above`)."""
    most = torch.full_like(peak, float(top))
    guess = (peak / most).clamp(max=65504.0)
    normal = (guess.view(torch.int32) - 0x38000000) >> 13
    half = torch.where(guess < 2.0**-14, (guess * 2.0**24).to(torch.int32), normal)
    return half + ((floats_of(half) * most < peak) & (half < 0x7BFF)).to(torch.int32)


def _half_below(value: Tensor) -> Tensor:
    """Return the bits of the largest fp16 not above a value, at least −65504; never −0."""
    negative = _half_above((-value).clamp(min=0.0), 1) | 0x8000
    capped = value.clamp(0.0, 65504.0)
    positive = torch.where(
        capped < 2.0**-14, (capped * 2.0**24).to(torch.int32), (capped.view(torch.int32) - 0x38000000) >> 13
    )
    return torch.where(value < 0, negative, positive)
