"""The block quantizers in plain torch, as a reference for the figures of benchmarks/compression/codecspeed.py.

The arithmetic is the textbook's (scale rounded to the nearest, no strict format), so no strictness of the product slows it
down.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from thinwire.compression.dense.blockint import Integers
from torch import Tensor


def encode_integers(codec: Integers, x: Tensor) -> tuple[Tensor, ...]:
    """Scales (and offsets), and packed codes; x has a whole number of blocks."""
    bits, block = codec.bits, codec.block
    rows = x.view(-1, block)
    if codec.asymmetric:
        low, high = torch.aminmax(rows, dim=1, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).half()
        scaled = (rows - low) / scale.float().clamp_(min=1e-12)
        codes = _rounded(codec, scaled).clamp_(0, 2**bits - 1).to(torch.uint8)
        return scale, low.half(), pack(codes, bits)
    top = 2 ** (bits - 1) - 1
    scale = (rows.abs().amax(dim=1, keepdim=True) / top).half()
    codes = _rounded(codec, rows / scale.float().clamp_(min=1e-12)).clamp_(-top, top).to(torch.int8)
    return scale, pack(codes.view(torch.uint8), bits)


def _rounded(codec: Integers, scaled: Tensor) -> Tensor:
    return (scaled + torch.rand_like(scaled)).floor_() if codec.stochastic else scaled.round_()


def pack(codes: Tensor, bits: int) -> Tensor:
    """8 bits as they are, two of 4 in a byte, eight of 3 in three bytes."""
    if bits == 8:
        return codes
    if bits == 4:
        low, high = codes.chunk(2, dim=1)
        return (low & 15) | (high << 4)
    c = [part.to(torch.int32) & 7 for part in codes.chunk(8, dim=1)]
    word = sum(part << 3 * k for k, part in enumerate(c))
    assert isinstance(word, Tensor)
    return torch.cat([(word >> 8 * k & 255).to(torch.uint8) for k in range(3)], dim=1)


def average_integers(codec: Integers, payloads: Sequence[Tensor], n: int) -> Tensor:
    """Decode and add up with equal weights, in float32; n is a whole number of blocks."""
    bits, block = codec.bits, codec.block
    blocks, total = n // block, torch.zeros(n // block, block)
    for payload in payloads:
        scale = payload[: 2 * blocks].view(torch.float16).float().view(-1, 1)
        head = 2 * blocks
        if codec.asymmetric:
            offset, head = payload[head : 2 * head].view(torch.float16).float().view(-1, 1), 2 * head
        packed = payload[head:].view(blocks, -1)
        if bits == 8:
            codes = packed
        elif bits == 4:
            codes = torch.cat([packed & 15, packed >> 4], dim=1)
        else:
            word = sum(part.to(torch.int32) << 8 * k for k, part in enumerate(packed.chunk(3, dim=1)))
            assert isinstance(word, Tensor)
            codes = torch.cat([(word >> 3 * k & 7).to(torch.uint8) for k in range(8)], dim=1)
        if codec.asymmetric:
            total.add_(codes.float().mul_(scale).add_(offset), alpha=1 / len(payloads))
        else:
            sign = 1 << bits - 1
            signed = codes.view(torch.int8) if bits == 8 else ((codes ^ sign) - sign).view(torch.int8)
            total.add_(signed.float().mul_(scale), alpha=1 / len(payloads))
    return total
