"""Kernels for the bit streams of sparse payloads, least significant bit first.

`kernels/topk.py` explains geometries. `tests/kit/reference/sparse.py` has the same arithmetic in numpy; tests check that
the two are equal bit for bit. Encoders trust their arguments. Decoders get streams of the right length and check
everything else.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.kernels.bitops import lowest, ones
from thinwire.compression.kernels.common import inline, kernel
from thinwire.compression.kernels.topk import ACROSS, COLS, DOWN, ROWS, SIDE, TAIL, Geometry, Int, entry, kept

OK, OUTSIDE, NOT_BEST, NOT_ASCENDING = range(4)


@kernel
def gaps(indices: NDArray[np.uint16], geometry: Geometry, first: int, last: int, out: NDArray[np.uint16]) -> None:
    """Write the gaps between the indices of chunks [first, last): index − previous index − 1.

    The previous index of the first entry of a chunk is −1.
    """
    start = entry(geometry, first)
    for b in range(first, last):
        stop = start + kept(geometry, b // geometry[ACROSS], b % geometry[ACROSS])
        out[start] = indices[start]
        source, before, target = indices[start + 1 : stop], indices[start : stop - 1], out[start + 1 : stop]
        for e in range(target.size):
            target[e] = source[e] - before[e] - 1
        start = stop


@kernel
def quotients(gaps: NDArray[np.uint16], sums: NDArray[np.int64]) -> None:
    """Compute sums[b − 3] = Σ gap >> b for b = 3…8."""
    for b in range(sums.size):
        shift, total = np.uint16(3 + b), np.int64(0)
        for e in range(gaps.size):
            total += np.int64(gaps[e] >> shift)
        sums[b] = total


@kernel
def write_unary(gaps: NDArray[np.uint16], rice: int, start: int, out: NDArray[np.uint8]) -> Int:
    """Clear the bit that terminates the unary code of each gap, in `out`, which is all ones.

    start: first bit of the first gap's code. The byte that holds bit `start` is not written but returned, because
    another call may write the rest of it.
    """
    shared, head, place = start >> 3, np.int64(0xFF), np.int64(start)
    for e in range(gaps.size):
        place += np.int64(gaps[e]) >> rice
        if place >> 3 == shared:
            head &= ~(np.int64(1) << (place & 7))
        else:
            out[place >> 3] &= np.uint8(~(1 << (place & 7)))
        place += 1
    return head


@kernel
def pack(values: NDArray[np.uint16], width: int, out: NDArray[np.uint8]) -> None:
    """Write the low `width` bits of each value, 12 or at most 8.

    Fills `out`; spare bits of the last byte are zero.
    """
    mask = np.uint64((1 << width) - 1)
    # This number of values fills whole bytes, at most one word.
    each = 8 if width <= 8 else 4
    size = each * width // 8
    whole = values.size // each
    for g in range(whole):
        group, held = values[each * g : each * g + each], np.uint64(0)
        for i in range(4):
            held |= (np.uint64(group[i]) & mask) << np.uint64(width * i)
        if each == 8:
            for i in range(4, 8):
                held |= (np.uint64(group[i]) & mask) << np.uint64(width * i)
        for i in range(size):
            out[size * g + i] = np.uint8(held >> np.uint64(8 * i) & np.uint64(0xFF))
    if size * whole < out.size:
        held = np.uint64(0)
        for i in range(values.size - each * whole):
            held |= (np.uint64(values[each * whole + i]) & mask) << np.uint64(width * i)
        for i in range(out.size - size * whole):
            out[size * whole + i] = np.uint8(held >> np.uint64(8 * i) & np.uint64(0xFF))


@kernel
def pack_codes(codes: NDArray[np.uint8], width: int, out: NDArray[np.uint8]) -> None:
    """Write codes of 1 or 2 bits. width divides 8, so no code crosses a byte boundary."""
    each = 8 // width
    whole = codes.size // each
    if width == 2:
        for i in range(whole):
            e = 4 * i
            out[i] = codes[e] | codes[e + 1] << 2 | codes[e + 2] << 4 | codes[e + 3] << 6
    else:
        for i in range(whole):
            byte = np.uint8(0)
            for e in range(8):
                byte |= np.uint8(codes[8 * i + e] << e)
            out[i] = byte
    if whole < out.size:
        byte = np.uint8(0)
        for e in range(codes.size - whole * each):
            byte |= np.uint8(codes[whole * each + e] << e * width)
        out[whole] = byte


@kernel
def unpack_codes(stream: NDArray[np.uint8], width: int, out: NDArray[np.uint8]) -> None:
    """Inverse of `pack_codes`."""
    if width == 2:
        for e in range(out.size):
            out[e] = stream[e >> 2] >> np.uint8(2 * (e & 3)) & np.uint8(3)
    else:
        for e in range(out.size):
            out[e] = stream[e >> 3] >> np.uint8(e & 7) & np.uint8(1)


@inline
def word(stream: NDArray[np.uint8], at: int) -> np.uint64:
    """Read eight bytes from `at` on; bytes beyond the end read as ones."""
    result = np.uint64(0)
    if at + 8 <= stream.size:
        for i in range(8):
            result |= np.uint64(stream[at + i]) << np.uint64(8 * i)
    else:
        for i in range(8):
            byte = np.uint64(stream[at + i]) if at + i < stream.size else np.uint64(0xFF)
            result |= byte << np.uint64(8 * i)
    return result


@kernel
def check_unary(stream: NDArray[np.uint8], bits: int, entries: int) -> bool:
    """Check that the first `bits` bits hold `entries` zeros and that the last of these bits is a zero.

    The bits after them must be zeros.
    """
    zeros = np.int64(0)
    for at in range(0, stream.size, 8):
        zeros += 64 - np.int64(ones(word(stream, at)))
    last = bits - 1
    if bits == 0 or stream[last >> 3] >> np.uint8(last & 7) & 1:
        return False
    return bool(zeros - (8 * stream.size - bits) == entries)


@inline
def inside(geometry: Geometry, i: Int, j: Int, index: Int) -> bool:
    """Return True if a local index (≥ 0) of block (i, j) is that of a real element."""
    side = geometry[SIDE]
    row, column = i * side + index // side, j * side + index % side
    wide = geometry[TAIL] if row == geometry[ROWS] - 1 else geometry[COLS]
    real: bool = index < side * side and row < geometry[ROWS] and column < wide
    return real


@kernel
def read_rice(
    unary: NDArray[np.uint8],
    low: NDArray[np.uint8],
    rice: int,
    geometry: Geometry,
    indices: NDArray[np.uint16],
) -> int:
    """Decode the indices of a section from streams that passed `check_unary`.

    Returns OK, OUTSIDE or NOT_BEST. NOT_BEST means that another Rice parameter gives fewer bits, or as many and is
    smaller. If another process changes the streams meanwhile, it still ends, and stays within the arrays.
    """
    down, across, side, cols = geometry[DOWN], geometry[ACROSS], geometry[SIDE], geometry[COLS]
    rows = geometry[ROWS] - int(geometry[TAIL] < cols)
    at, zeros, before = 0, ~word(unary, 0), np.int64(-1)
    place, held, bits = 0, np.uint64(0), 0
    mask = np.uint64((1 << rice) - 1)
    finer, coarser = np.int64(0), np.int64(0)
    e = 0
    for i in range(down):
        for j in range(across):
            keep = kept(geometry, i, j)
            whole = i * side + side <= rows and j * side + side <= cols
            index = np.int64(-1)
            for _ in range(keep):
                while zeros == 0:
                    at += 8
                    if at >= unary.size:  # the stream has changed since it was checked
                        return OUTSIDE
                    zeros = ~word(unary, at)
                end = 8 * at + np.int64(lowest(zeros))
                zeros &= zeros - np.uint64(1)
                quotient, before = end - before - 1, end
                while bits < rice:
                    held |= np.uint64(low[place]) << np.uint64(bits)
                    place += 1
                    bits += 8
                gap = quotient << rice | np.int64(held & mask)
                held >>= np.uint64(rice)
                bits -= rice
                finer += gap >> (rice - 1)
                coarser += gap >> (rice + 1)
                index += gap + 1
                if not whole and not inside(geometry, i, j, index):
                    return OUTSIDE
                indices[e] = np.uint16(index & 0xFFFF)
                e += 1
            if index >= side * side:
                return OUTSIDE
    # The number of bits is a convex function of the parameter, so checking its two neighbours is enough.
    here = before + 1 - e + rice * e
    if (rice > 3 and finer + (rice - 1) * e <= here) or (rice < 8 and coarser + (rice + 1) * e < here):
        return NOT_BEST
    return OK


@kernel
def read_fixed(stream: NDArray[np.uint8], geometry: Geometry, indices: NDArray[np.uint16]) -> int:
    """Decode indices of 12 bits each. Returns OK, OUTSIDE or NOT_ASCENDING."""
    down, across = geometry[DOWN], geometry[ACROSS]
    e = 0
    for i in range(down):
        for j in range(across):
            before = np.int64(-1)
            for _ in range(kept(geometry, i, j)):
                pair = np.int64(stream[3 * e // 2]) | np.int64(stream[3 * e // 2 + 1]) << 8
                index = (pair >> 4 if e & 1 else pair) & 0xFFF
                if index <= before:
                    return NOT_ASCENDING
                if not inside(geometry, i, j, index):
                    return OUTSIDE
                before = index
                indices[e] = np.uint16(index)
                e += 1
    return OK
