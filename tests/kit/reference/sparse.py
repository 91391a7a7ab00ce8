"""Reference implementation of the sparse codec in plain numpy: slow, readable, bit-exact.

A test compares the kernels with it bit for bit. Where the two disagree, this file is right. All bit streams are least
significant bit first.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.parameter_chunks import Section
from thinwire.compression.core.types import Floats

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Shorts = NDArray[np.uint16]

ROUNDS = 6
FIRST, LAST = 3, 8


def select(section: Section, values: Floats, k: int) -> Shorts:
    """Return the ascending local indices of the largest magnitudes of each chunk, chunk after chunk.

    Of equal magnitudes the lower index is selected; padding never is. values: the section's flat elements.
    """
    # The bits of a magnitude have its order. Padding is below every real element, even below zeros.
    keys = np.where(mask(section), (section.cut(values).view(np.uint32) & 0x7FFFFFFF).astype(np.int64) + 1, 0)
    order = np.argsort(-keys, axis=1, kind="stable")
    keep = section.keep(k)
    return np.concatenate([np.sort(order[i, :n]) for i, n in enumerate(keep)]).astype(np.uint16)


def mask(section: Section) -> NDArray[np.bool_]:
    """Return True for each entry that is not padding; shape (count, side²)."""
    return section.cut(np.ones(section.size, np.float32)) > 0


def pick(section: Section, values: Floats, indices: Shorts, k: int) -> Floats:
    """Return the elements at local indices."""
    keep = section.keep(k)
    return section.cut(values)[np.repeat(np.arange(keep.size), keep), indices]


def half(x: np.float64) -> np.float16:
    """Return the nearest fp16, rounded via float32, at most the largest finite one. x ≥ 0."""
    return np.float16(min(np.float32(x), np.float32(65504)))


def codebook(values: Floats, levels: int) -> tuple[np.float16, np.float16]:
    """Return two levels (lo, hi) for the magnitudes, from six rounds of Lloyd's algorithm.

    For levels = 1, return their mean twice. All sums are sums of integers, namely the magnitudes in units of 2**-30 of
    the power of two above the largest one, so that neither the order of summation nor the number of threads nor the
    device can change them.
    """
    magnitudes = np.abs(values).astype(np.float64)
    exponent = int(np.frexp(magnitudes.max())[1])
    units = np.ldexp(magnitudes, 30 - exponent).astype(np.int64)
    total, count = int(units.sum()), units.size
    mean = total / count
    lo, hi = (mean, mean) if levels == 1 else (0.8 * mean, 1.5 * mean)
    for _ in range(ROUNDS if levels == 2 else 0):
        above = units > np.floor((lo + hi) / 2)
        upper, n = int(units[above].sum()), int(above.sum())
        # Python rounds a quotient of integers once, whatever their size.
        if n:
            hi = upper / n
        if count - n:
            lo = (total - upper) / (count - n)
    return half(np.ldexp(lo, exponent - 30)), half(np.ldexp(hi, exponent - 30))


def codes(values: Floats, lo: np.float16, hi: np.float16, levels: int) -> Bytes:
    """Return the codes. Two levels: 2·(v > 0) + (|v| > (lo + hi)/2). One level: v > 0. All in float32."""
    positive = (values > 0).astype(np.uint8)
    if levels == 1:
        return positive
    middle = (np.float32(lo) + np.float32(hi)) * np.float32(0.5)
    return 2 * positive + (np.abs(values) > middle).astype(np.uint8)


def gaps(section: Section, indices: Shorts, k: int) -> Ints:
    """Return the gaps: index − previous index − 1, where the first of a chunk follows −1."""
    before: Ints = np.concatenate([[-1], indices[:-1].astype(np.int64)])
    before[np.cumsum(section.keep(k))[:-1]] = -1
    result: Ints = indices.astype(np.int64) - before - 1
    return result


def parameter(gaps: Ints) -> int:
    """Return the Rice parameter with the fewest bits, or the smallest of several."""
    bits = [b * gaps.size + int((gaps >> b).sum()) for b in range(FIRST, LAST + 1)]
    return FIRST + int(np.argmin(bits))


def pack(values: NDArray[np.unsignedinteger] | Ints, width: int) -> bytes:
    """Pack values of `width` bits each, with zero bits up to the end of the last byte."""
    bits = (values.astype(np.int64)[:, None] >> np.arange(width)) & 1
    return np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


def unpack(stream: bytes, width: int, count: int) -> Ints:
    """Inverse of `pack`."""
    bits = np.unpackbits(np.frombuffer(stream, np.uint8), count=width * count, bitorder="little")
    values: Ints = bits.reshape(count, width).astype(np.int64) @ (1 << np.arange(width, dtype=np.int64))
    return values


def unary(values: Ints) -> bytes:
    """Encode each value as that many ones and a zero, with zero bits up to the end of the last byte."""
    bits = np.ones(values.size + int(values.sum()), np.uint8)
    bits[np.cumsum(values + 1) - 1] = 0
    return np.packbits(bits, bitorder="little").tobytes()


def from_unary(stream: bytes, bits: int) -> Ints:
    """Inverse of `unary`. Ones at the end that no zero terminates are ignored."""
    zeros = np.flatnonzero(np.unpackbits(np.frombuffer(stream, np.uint8), count=bits, bitorder="little") == 0)
    return np.diff(zeros, prepend=-1) - 1


def from_gaps(section: Section, gaps: Ints, k: int) -> Ints:
    """Inverse of `gaps`. For untrusted gaps, an index may lie outside of its chunk."""
    keep = section.keep(k)
    sums = np.cumsum(gaps + 1)
    before = np.concatenate([[0], sums[np.cumsum(keep)[:-1] - 1]])
    indices: Ints = sums - np.repeat(before, keep) - 1
    return indices


def positions(section: Section, indices: Shorts, k: int) -> Ints:
    """Return the positions of local indices among the section's elements."""
    keep = section.keep(k)
    chunk = np.repeat(np.arange(keep.size), keep)
    row = chunk // section.across * section.side + indices // section.side
    column = chunk % section.across * section.side + indices % section.side
    where: Ints = row * section.cols + column
    return where


def scatter(section: Section, indices: Shorts, values: Floats, k: int, elements: Floats, scale: float) -> Floats:
    """Return elements + scale·values at the indices; each operation rounds to float32.

    elements: the section's flat elements.
    """
    result = elements.copy()
    result[positions(section, indices, k)] += np.float32(scale) * values
    return result


def payload(section: Section, values: Floats, k: int, levels: int, rice: bool) -> bytes:
    """Return one section of a payload, in the format of `topk.py`.

    values: the section's elements, flat and finite.
    """
    empty = struct.pack("<BBHHI", 3, 0, 0, 0, 0)
    if section.keep(k).sum() == section.size:
        halves = np.clip(values, -65504, 65504).astype("<f2")
        return struct.pack("<BBHHI", 2, 0, 0, 0, 0) + halves.tobytes() if halves.any() else empty
    indices = select(section, values, k)
    kept = pick(section, values, indices, k)
    lo, hi = codebook(kept, levels)
    if hi == 0:
        return empty
    book = (int(lo.view(np.uint16)), int(hi.view(np.uint16)))
    code_stream = pack(codes(kept, lo, hi, levels), levels)
    if not rice:
        return struct.pack("<BBHHI", 0, 0, *book, 0) + pack(indices, 12) + code_stream
    spaces = gaps(section, indices, k)
    b = parameter(spaces)
    ones = int((spaces >> b).sum())
    head = struct.pack("<BBHHI", 1, b, *book, spaces.size + ones)
    return head + unary(spaces >> b) + pack(spaces, b) + code_stream


def read(section: Section, streams: bytes, b: int, unary_bits: int, k: int) -> Ints:
    """Return the indices from a section's unary and low-bits streams."""
    lower = (unary_bits + 7) // 8
    quotients = from_unary(streams[:lower], unary_bits)
    return from_gaps(section, quotients << b | unpack(streams[lower:], b, quotients.size), k)


def mean(
    section: Section, parts: Sequence[tuple[Shorts, Floats]], shares: Sequence[float], weights: Sequence[float], k: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return Σ share·v̂ and Σ weight of the senders for each of the section's elements.

    Both are in float64, summed in the given order.
    """
    sums, counts = np.zeros(section.size), np.zeros(section.size)
    for (indices, values), share, weight in zip(parts, shares, weights, strict=True):
        where = positions(section, indices, k)
        sums[where] += np.float64(share) * values.astype(np.float64)
        counts[where] += np.float64(weight)
    return sums, counts
