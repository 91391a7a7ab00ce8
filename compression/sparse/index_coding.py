"""Bit streams of a section: indices as Rice-coded gaps or in 12 bits each, and packed codes.

Streams are least significant bit first and padded with zero bits to a whole byte. Threads may share the work of an
encoder; their number does not change the bytes. Rice's code: Golomb, IEEE Trans. IT 12 (1966); Rice and Plaunt, IEEE
Trans. Commun. 19 (1971).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.parameter_chunks import Section
from thinwire.compression.kernels import bitstream as streamkernels
from thinwire.compression.kernels.threads import Team
from thinwire.compression.sparse.header import FIRST, FIXED_WIDTH, LAST
from thinwire.compression.sparse.select import ENTRIES, MANY

Bytes = NDArray[np.uint8]
Shorts = NDArray[np.uint16]

_FAULTS = {
    streamkernels.OUTSIDE: "an index is outside of its chunk",
    streamkernels.NOT_BEST: "another Rice parameter is better",
    streamkernels.NOT_ASCENDING: "its indices do not ascend",
}


def length(entries: int, width: int) -> int:
    """Return the size in bytes of entries of `width` bits each."""
    return (entries * width + 7) // 8


def gaps(section: Section, indices: Shorts, k: int, team: Team) -> Shorts:
    """Return the gaps: index − previous index in its chunk − 1, where the first of a chunk follows −1."""
    out = np.empty_like(indices)
    geometry = section.geometry(k)
    cuts = team.ranges(section.count, max(1, MANY * section.count // indices.size))
    team.each(streamkernels.gaps, [(indices, geometry, a, b, out) for a, b in cuts])
    return out


def parameter(gaps: Shorts, team: Team) -> tuple[int, int]:
    """Return the Rice parameter with the fewest bits (the smallest of several) and the unary bits."""
    sums = np.sum(_quotients(gaps, team.ranges(gaps.size, MANY), team), axis=0)
    bits = sums + gaps.size * np.arange(FIRST, LAST + 1)
    best = int(np.argmin(bits))
    return FIRST + best, int(sums[best]) + gaps.size


def write_rice(gaps: Shorts, rice: int, unary_bits: int, unary: Bytes, low: Bytes, team: Team) -> None:
    """Fill both streams, which have exactly the right lengths."""
    cuts = team.ranges(gaps.size, ENTRIES, 8)
    # A range starts after the codes of those before it.
    before = cuts[:-1]
    sums = [int(s[rice - FIRST]) + b - a for s, (a, b) in zip(_quotients(gaps, before, team), before, strict=True)]
    starts = [sum(sums[:i]) for i in range(len(cuts))]
    unary[:] = 0xFF

    def write(first: int, last: int, start: int) -> int:
        streamkernels.pack(gaps[first:last], rice, low[_bytes(first, last, rice)])
        return int(streamkernels.write_unary(gaps[first:last], rice, start, unary))

    heads = team.each(write, [(*cut, start) for cut, start in zip(cuts, starts, strict=True)])
    # Neither range writes the byte where the two meet.
    for start, head in zip(starts, heads, strict=True):
        unary[start >> 3] &= head
    if unary_bits % 8:
        unary[-1] &= (1 << unary_bits % 8) - 1


def write_fixed(indices: Shorts, low: Bytes, team: Team) -> None:
    """Fill the stream of 12-bit indices."""
    cuts = team.ranges(indices.size, ENTRIES, 8)
    team.each(streamkernels.pack, [(indices[a:b], FIXED_WIDTH, low[_bytes(a, b, FIXED_WIDTH)]) for a, b in cuts])


def write_codes(codes: Bytes, width: int, out: Bytes, team: Team) -> None:
    """Fill the stream of codes."""
    cuts = team.ranges(codes.size, MANY, 8)
    team.each(streamkernels.pack_codes, [(codes[a:b], width, out[_bytes(a, b, width)]) for a, b in cuts])


def check(section: Section, streams: tuple[Bytes, Bytes, Bytes], bits: tuple[int, int, int], entries: int) -> None:
    """Check that streams of the given lengths in bits (unary, low, codes) can hold `entries` entries.

    The indices are not read. The streams must end in zeros, and a non-empty unary stream must have a zero for each
    entry. Raises CodecError.
    """
    for stream, used in zip(streams, bits, strict=True):
        if used % 8 and stream[-1] >> used % 8:
            raise CodecError(f"{section.name}: a stream does not end in zeros")
    if bits[0] and not streamkernels.check_unary(streams[0], bits[0], entries):
        raise CodecError(f"{section.name}: its indices are not {entries}")


def read_rice(section: Section, unary: Bytes, low: Bytes, rice: int, k: int) -> Shorts:
    """Read indices from streams that passed `check`.

    Raises CodecError unless they are exactly as an encoder writes them.
    """
    indices = np.empty(section.kept(k), np.uint16)
    _raise(section, streamkernels.read_rice(unary, low, rice, section.geometry(k), indices))
    return indices


def read_fixed(section: Section, low: Bytes, k: int) -> Shorts:
    """Read indices from a stream that passed `check`.

    Raises CodecError unless they ascend within their chunks.
    """
    indices = np.empty(section.kept(k), np.uint16)
    _raise(section, streamkernels.read_fixed(low, section.geometry(k), indices))
    return indices


def read_codes(stream: Bytes, width: int, entries: int) -> Bytes:
    """Read codes from a stream of the right length."""
    codes = np.empty(entries, np.uint8)
    streamkernels.unpack_codes(stream, width, codes)
    return codes


def _bytes(first: int, last: int, width: int) -> slice:
    """Return the byte range of entries [first, last) of a stream; first is a multiple of 8."""
    return slice(first * width // 8, length(last, width))


def _quotients(gaps: Shorts, cuts: list[tuple[int, int]], team: Team) -> list[NDArray[np.int64]]:
    sums = [np.empty(LAST - FIRST + 1, np.int64) for _ in cuts]
    team.each(streamkernels.quotients, [(gaps[a:b], out) for (a, b), out in zip(cuts, sums, strict=True)])
    return sums


def _raise(section: Section, fault: int) -> None:
    if fault != streamkernels.OK:
        raise CodecError(f"{section.name}: {_FAULTS[fault]}")
