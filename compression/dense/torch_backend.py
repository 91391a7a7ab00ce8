"""Block quantizers in torch, for tensors on any device.

Bytes and values equal those of the CPU kernels. On an accelerator, only the flag that tells whether all values are
valid is copied to the host. Every operation is one that IEEE 754 rounds exactly, and operations are issued one at a
time, so that no compiler fuses them. Divisors are tensors, because CUDA multiplies by the reciprocal of a Python
number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from thinwire.compression.core.codec import CodecError
from thinwire.compression.dense.blockint import Integers
from thinwire.compression.kernels.base import BAD_CODE, BAD_SCALE, NOT_FINITE, OK
from thinwire.compression.kernels.packing import group_bytes
from thinwire.compression.kernels.payload import refuse
from torch import Tensor

LANES = {8: 1, 4: 2, 3: 8}
WIDTH = {8: 1, 4: 1, 3: 3}


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
    for rows, start in _rows(x.contiguous(), codec.block):
        scale, offset, codes = _quantize(codec, rows, start, seed)
        heads[0].append(scale)
        if codec.asymmetric:
            heads[1].append(offset)
        packed.append(pack(codes, codec.bits).reshape(-1))
    parts = [half.to(torch.int16).view(torch.uint8).reshape(-1) for head in heads for half in head] + packed
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=x.device)


def decode(codec: Integers, payload: Tensor, n: int) -> Tensor:
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
    for rows, start in _rows(out, codec.block):
        size = group_bytes(rows.shape[1], codec.bits)
        packed = payload[at : at + rows.shape[0] * size].view(rows.shape[0], size)
        codes = unpack(packed, codec.bits, not codec.asymmetric)
        which = slice(first, first + rows.shape[0])
        bad_code = bad_code | codes[:, rows.shape[1] :].any() | (codes.ne(0).any(dim=1) & (scales[which] == 0)).any()
        codes = codes[:, : rows.shape[1]]
        values = codes.to(torch.float32) * _floats(scales[which]).unsqueeze(1)
        if codec.asymmetric:
            values = values + _floats(offsets[which]).unsqueeze(1)
        else:
            bad_code = bad_code | (codes == -(1 << (codec.bits - 1))).any()
        out[start : start + values.numel()] = values.reshape(-1)
        at, first = at + packed.numel(), first + rows.shape[0]
    wrong = torch.where(bad_scale, BAD_SCALE, torch.where(bad_code, BAD_CODE, OK))
    refuse(int(wrong))
    return out


def mean(codec: Integers, payloads: Sequence[Tensor], weights: Sequence[float], n: int) -> Tensor:
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
        sums = sums + decode(codec, payload, n).to(torch.float64) * (weight / total)
    return sums.to(torch.float32)


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
    return torch.cat([(words >> 8 * k & 0xFF).to(torch.uint8) for k in range(WIDTH[bits])], dim=1)


def unpack(packed: Tensor, bits: int, signed: bool) -> Tensor:
    """Unpack rows of bytes into rows of codes (int32), including the padding at the end."""
    planes = packed.to(torch.int32).view(packed.shape[0], WIDTH[bits], -1)
    words = planes[:, 0].clone()
    for k in range(1, WIDTH[bits]):
        words |= planes[:, k] << 8 * k
    codes = torch.cat([words >> bits * lane & (1 << bits) - 1 for lane in range(LANES[bits])], dim=1)
    return codes - (codes >> bits - 1 << bits) if signed else codes


def uniform(index: Tensor, seed: int) -> Tensor:
    """Return the numbers in [0, 1) that `block_encode.uniform` gives, for int64 positions."""
    h = index ^ (seed & 0xFFFFFFFF)
    for high in (seed >> 32, 0):
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            h = ((h ^ (h >> shift)) * factor) & 0xFFFFFFFF
        h = h ^ high
    return (h >> 8).to(torch.float32) * 2.0**-24


def _rows(x: Tensor, block: int) -> list[tuple[Tensor, int]]:
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
        rows = rows - _floats(offset).unsqueeze(1)
        peak = rows.amax(dim=1).clamp(min=0.0)
    else:
        peak, offset = rows.abs().amax(dim=1), torch.empty(0)
    scale = _half_above(peak, high)
    divisor = _floats(scale)
    inverse = torch.where(scale > 0, torch.ones_like(divisor) / divisor, torch.zeros_like(divisor))
    scaled = rows * inverse.unsqueeze(1)
    if codec.stochastic:
        index = torch.arange(start, start + rows.numel(), device=rows.device).view_as(rows)
        scaled = (scaled + uniform(index, seed)).clamp(low, high).floor()
    else:
        scaled = scaled.clamp(low, high).round()
    return scale, offset, scaled.to(torch.int32)


def _floats(halves: Tensor) -> Tensor:
    """Convert fp16 values, given by their bits in int32, to float32."""
    return halves.to(torch.int16).view(torch.float16).to(torch.float32)


def _half_above(peak: Tensor, top: int) -> Tensor:
    """Return the bits of the smallest fp16 s with top·s ≥ peak, at most 65504 (see `half_above`)."""
    most = torch.full_like(peak, float(top))
    guess = (peak / most).clamp(max=65504.0)
    normal = (guess.view(torch.int32) - 0x38000000) >> 13
    half = torch.where(guess < 2.0**-14, (guess * 2.0**24).to(torch.int32), normal)
    return half + ((_floats(half) * most < peak) & (half < 0x7BFF)).to(torch.int32)


def _half_below(value: Tensor) -> Tensor:
    """Return the bits of the largest fp16 not above a value, at least −65504; never −0."""
    negative = _half_above((-value).clamp(min=0.0), 1) | 0x8000
    capped = value.clamp(0.0, 65504.0)
    positive = torch.where(
        capped < 2.0**-14, (capped * 2.0**24).to(torch.int32), (capped.view(torch.int32) - 0x38000000) >> 13
    )
    return torch.where(value < 0, negative, positive)
