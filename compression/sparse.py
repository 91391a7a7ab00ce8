"""Sparse pseudo-gradients: the k largest values of every chunk, their magnitudes as one of two levels, their indices as
Rice-coded gaps. SparseLoCo, arXiv 2508.15706; Rice's code: Golomb, IEEE IT 1966, and Rice & Plaunt 1971.

Payload, little-endian, bit streams least significant bit first, for each section of the layout (chunks.py) in order:

    mode u8 (0 fixed12 | 1 rice | 2 dense fp16 | 3 empty), rice parameter b u8, lo f16, hi f16, unary_bits u32,
    unary stream (rice: gap >> b ones and a zero, each), low-bits stream (rice: the b low bits of each gap; fixed: each index
    in 12 bits), value stream (codes of 1 or 2 bits; dense: fp16 of all elements in row-major order)

Every stream ends in zero bits to a whole byte. A field that a mode does not use is zero. `dense` stands exactly for the
sections all of whose elements are kept, `empty` exactly for those whose values would all decode to zero.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from thinwire.compression import sparsereference as reference
from thinwire.compression.chunks import Chunks, Section
from thinwire.compression.codec import Buffer, CodecError, Floats

HEADER = struct.Struct("<BBHHI")
FIXED, RICE, DENSE, EMPTY = range(4)
LEVELS = {"2bit": 2, "1bit": 1}
"""Bits of a value's code, which is also the number of its levels of magnitude."""
INDICES = {"rice": RICE, "fixed": FIXED}
CAP = 65504.0
"""The largest level a payload can say: the largest finite fp16."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What is sent of one section. Rice, fixed: `indices` (local, ascending in each chunk) and `codes`, one entry each;
    dense: `halves`, the bits of fp16; empty: nothing. lo, hi: the levels, exact fp16 values.
    """

    mode: int
    rice: int
    lo: float
    hi: float
    unary_bits: int
    indices: NDArray[np.uint16]
    codes: NDArray[np.uint8]
    halves: NDArray[np.uint16]


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """What one payload says: a part for each section of the layout. All that is decided by the data is decided here."""

    codec: Sparse
    chunks: Chunks
    parts: tuple[Part, ...]

    def scatter(self, out: Floats, scale: float = 1.0, threads: int = 1) -> None:
        """out += scale·v̂ on the entries that are there, in float32. out: the model's flat vector."""
        self.chunks.check(out)
        for section, part in zip(self.chunks.sections, self.parts, strict=True):
            if part.mode == EMPTY:
                continue
            elements = section.gather(out)
            if part.mode == DENSE:
                result = elements + np.float32(scale) * self.values(part)
            else:
                result = reference.scatter(section, part.indices, self.values(part), self.codec.k, elements, scale)
            np.copyto(elements, result)
            section.put(elements, out)

    def values(self, part: Part) -> Floats:
        """v̂ of each entry: what every receiver rebuilds."""
        if part.mode == DENSE:
            return part.halves.view(np.float16).astype(np.float32)
        return self.codec.levels(part.lo, part.hi)[part.codes]


@dataclass(frozen=True, slots=True)
class Sparse:
    """Keep k of every `chunk` values, in chunks with padding k in proportion; see the module for the wire format.

    values: "2bit" (sign and one of two magnitudes) or "1bit" (sign and the mean magnitude), levels chosen per section.
    indices: "rice" (entropy-coded) or "fixed" (12 bits each). Raises ValueError for anything else.
    """

    k: int = 64
    chunk: int = 4096
    values: str = "2bit"
    indices: str = "rice"

    def __post_init__(self) -> None:
        if self.values not in LEVELS or self.indices not in INDICES:
            raise ValueError(f"topk: values are {' or '.join(LEVELS)}, indices {' or '.join(INDICES)}")
        if self.chunk not in (256, 1024, 4096):
            raise ValueError(f"topk: chunk must be 256, 1024 or 4096, not {self.chunk}")
        if not 1 <= self.k <= self.chunk:
            raise ValueError(f"topk: k must be 1…{self.chunk}, not {self.k}")

    @property
    def spec(self) -> str:
        return f"topk(k={self.k},chunk={self.chunk})|{self.values}|{self.indices}"

    @property
    def width(self) -> int:
        """Bits of a value's code."""
        return LEVELS[self.values]

    def levels(self, lo: float, hi: float) -> Floats:
        """v̂ by code."""
        return np.array([-lo, -hi, lo, hi] if self.width == 2 else [-hi, hi], np.float32)

    def dense(self, section: Section) -> bool:
        """Whether all elements of a section are kept."""
        return int(section.keep(self.k).sum()) == section.size

    def bound(self, chunks: Chunks) -> int:
        """Bytes of the largest payload of this layout."""
        self._fit(chunks)
        total = 0
        for section in chunks.sections:
            kept = int(section.keep(self.k).sum())
            total += HEADER.size
            if kept == section.size:
                total += 2 * kept
            else:
                # The parameter chosen costs no more than 8 does: 9 bits an entry and, of each chunk, (chunk − 1) >> 8 ones.
                bits = 9 * kept + section.count * ((self.chunk - 1) >> 8)
                total += (bits + 14) // 8 if self.indices == "rice" else (12 * kept + 7) // 8
                total += (self.width * kept + 7) // 8
        return total

    def select(self, a: Floats, chunks: Chunks, threads: int = 1) -> Selected:
        """Choose what to send of the accumulator a (the model's flat vector). Raises CodecError when a value is not finite."""
        self._fit(chunks)
        chunks.check(a)
        return Selected(self, chunks, tuple(self._part(section, section.gather(a)) for section in chunks.sections))

    def nbytes(self, selected: Selected) -> int:
        """Exact size of the payload."""
        return sum(HEADER.size + sum(self._lengths(part)) for part in selected.parts)

    def encode(self, selected: Selected, threads: int = 1) -> bytes:
        """The payload."""
        payload = b"".join(self._written(s, p) for s, p in zip(selected.chunks.sections, selected.parts, strict=True))
        assert len(payload) == self.nbytes(selected)
        return payload

    def decode(self, payload: Buffer, chunks: Chunks, cap: float = CAP, threads: int = 1) -> Selected:
        """What a payload says. Lengths and headers are all checked before anything is allocated, and what is allocated is a
        small multiple of the bytes present. Raises CodecError, naming the tensor, for anything that `encode` does not write
        for this layout, a level above `cap` included.
        """
        self._fit(chunks)
        view = memoryview(payload).cast("B")
        parts = [self._read(section, header, streams) for section, header, streams in self._opened(view, chunks, cap)]
        return Selected(self, chunks, tuple(parts))

    def _fit(self, chunks: Chunks) -> None:
        if chunks.chunk != self.chunk:
            raise ValueError(f"{self.spec} on chunks of {chunks.chunk}")

    def _part(self, section: Section, values: Floats) -> Part:
        if not np.isfinite(values).all():
            raise CodecError(f"{section.name}: a value is not finite", "not finite")
        none, nothing = np.zeros(0, np.uint16), np.zeros(0, np.uint8)
        empty = Part(EMPTY, 0, 0.0, 0.0, 0, none, nothing, none)
        if self.dense(section):
            halves = np.clip(values, -CAP, CAP).astype(np.float16)
            return Part(DENSE, 0, 0.0, 0.0, 0, none, nothing, halves.view(np.uint16)) if halves.any() else empty
        indices = reference.select(section, values, self.k)
        kept = reference.pick(section, values, indices, self.k)
        lo, hi = reference.codebook(kept, self.width)
        if hi == 0:
            return empty
        codes = reference.codes(kept, lo, hi, self.width)
        if self.indices == "fixed":
            return Part(FIXED, 0, float(lo), float(hi), 0, indices, codes, none)
        gaps = reference.gaps(section, indices, self.k)
        rice = reference.parameter(gaps)
        return Part(RICE, rice, float(lo), float(hi), gaps.size + int((gaps >> rice).sum()), indices, codes, none)

    def _lengths(self, part: Part) -> tuple[int, int, int]:
        """Bytes of the three streams."""
        low = 12 if part.mode == FIXED else part.rice
        count = part.indices.size
        return (part.unary_bits + 7) // 8, (low * count + 7) // 8, (self.width * count + 7) // 8 + 2 * part.halves.size

    def _written(self, section: Section, part: Part) -> bytes:
        lo, hi = (int(np.float16(x).view(np.uint16)) for x in (part.lo, part.hi))
        header = HEADER.pack(part.mode, part.rice, lo, hi, part.unary_bits)
        if part.mode == RICE:
            gaps = reference.gaps(section, part.indices, self.k)
            low = reference.unary(gaps >> part.rice) + reference.pack(gaps, part.rice)
        else:
            low = reference.pack(part.indices, 12)
        return header + low + reference.pack(part.codes, self.width) + part.halves.astype("<u2").tobytes()

    def _opened(
        self, payload: memoryview, chunks: Chunks, cap: float
    ) -> Iterator[tuple[Section, tuple[int, int, int, int, int], list[memoryview]]]:
        """For each section its header, checked, and its streams, of the right lengths; the payload ends with the last."""
        opened, at = [], 0
        for section in chunks.sections:
            if len(payload) - at < HEADER.size:
                raise CodecError(f"{section.name}: the payload ends before its header", "length")
            header = HEADER.unpack_from(payload, at)
            at += HEADER.size
            streams = []
            for length in self._expected(section, header, cap):
                if len(payload) - at < length:
                    raise CodecError(f"{section.name}: the payload ends within its streams", "length")
                streams.append(payload[at : at + length])
                at += length
            opened.append((section, header, streams))
        if at != len(payload):
            raise CodecError(f"payload of {len(payload)} bytes, expected {at}", "length")
        return iter(opened)

    def _expected(self, section: Section, header: tuple[int, ...], cap: float) -> tuple[int, int, int]:
        """Bytes of the streams that must follow a header. Raises CodecError for a header that no encoder writes."""
        mode, rice, lo, hi, unary_bits = header
        kept = int(section.keep(self.k).sum())
        if mode == EMPTY or (mode == DENSE and kept == section.size):
            if rice or lo or hi or unary_bits:
                raise CodecError(f"{section.name}: mode {mode} has no parameters")
            return 0, 0, 2 * section.size if mode == DENSE else 0
        if mode != INDICES[self.indices] or kept == section.size:
            raise CodecError(f"{section.name}: mode {mode} is not for it")
        if max(lo, hi) >= 0x7C00:
            raise CodecError(f"{section.name}: a level is negative or not finite", "not finite")
        # Halves that are finite and not negative order as their bits do.
        if lo > hi or hi == 0 or (self.width == 1 and lo != hi):
            raise CodecError(f"{section.name}: its levels make no codebook")
        if np.uint16(hi).view(np.float16) > cap:
            raise CodecError(f"{section.name}: a level above {cap:g}", "bound")
        values = (self.width * kept + 7) // 8
        if mode == FIXED:
            if rice or unary_bits:
                raise CodecError(f"{section.name}: fixed indices have no Rice parameter")
            return 0, (12 * kept + 7) // 8, values
        if not reference.FIRST <= rice <= reference.LAST:
            raise CodecError(f"{section.name}: no Rice parameter {rice}")
        return (unary_bits + 7) // 8, (rice * kept + 7) // 8, values

    def _read(self, section: Section, header: tuple[int, ...], streams: list[memoryview]) -> Part:
        mode, rice, low_level, high_level, unary_bits = header
        none, nothing = np.zeros(0, np.uint16), np.zeros(0, np.uint8)
        lo, hi = (float(np.uint16(x).view(np.float16)) for x in (low_level, high_level))
        if mode == EMPTY:
            return Part(EMPTY, 0, 0.0, 0.0, 0, none, nothing, none)
        if mode == DENSE:
            halves = np.frombuffer(streams[2], "<u2").astype(np.uint16)
            if ((halves & 0x7FFF) >= 0x7C00).any():
                raise CodecError(f"{section.name}: a value is not finite", "not finite")
            if not (halves & 0x7FFF).any():
                raise CodecError(f"{section.name}: nothing but zeros is sent as empty")
            return Part(DENSE, 0, 0.0, 0.0, 0, none, nothing, halves)
        count = int(section.keep(self.k).sum())
        width = 12 if mode == FIXED else rice
        for stream, bits in zip(streams, (unary_bits, width * count, self.width * count), strict=True):
            if bits % 8 and stream[-1] >> bits % 8:
                raise CodecError(f"{section.name}: a stream does not end in zeros")
        indices = reference.unpack(bytes(streams[1]), width, count)
        if mode == RICE:
            quotients = reference.from_unary(bytes(streams[0]), unary_bits)
            if quotients.size != count or int(quotients.sum()) + count != unary_bits:
                raise CodecError(f"{section.name}: its indices are not {count}")
            gaps = quotients << rice | indices
            if reference.parameter(gaps) != rice:
                raise CodecError(f"{section.name}: the Rice parameter is not the best")
            indices = reference.from_gaps(section, gaps, self.k)
        elif reference.gaps(section, indices.astype(np.uint16), self.k).min() < 0:
            raise CodecError(f"{section.name}: its indices do not ascend")
        if not reference.inside(section, indices, self.k):
            raise CodecError(f"{section.name}: an index is outside of its chunk")
        codes = reference.unpack(bytes(streams[2]), self.width, count).astype(np.uint8)
        return Part(mode, rice, lo, hi, unary_bits, indices.astype(np.uint16), codes, none)
