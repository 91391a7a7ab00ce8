"""Sparse pseudo-gradients: the k largest values of every chunk. SparseLoCo, arXiv 2508.15706.

Magnitudes are sent as one of two levels, indices as Rice-coded gaps (Golomb, IEEE IT 1966; Rice & Plaunt 1971).
Payload, little-endian, bit streams least significant bit first, for each section of the layout (parameter_chunks.py) in order:

    mode u8 (0 fixed12 | 1 rice | 2 dense fp16 | 3 empty), rice parameter b u8, lo f16, hi f16, unary_bits u32,
    unary stream (rice: gap >> b ones and a zero, each), low-bits stream (rice: the b low bits of each gap; fixed: each index
    in 12 bits), value stream (codes of 1 or 2 bits; dense: fp16 of all elements in row-major order)

Every stream is padded with zero bits to a whole byte. A field that a mode does not use is zero. `dense` is used exactly
for the sections whose elements are all selected, `empty` exactly for those whose values would all decode to zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.parameter_chunks import Chunks, Gather, Section
from thinwire.compression.core.types import Buffer, Floats, Indices, Levels
from thinwire.compression.kernels import scatter as scatterkernels
from thinwire.compression.kernels.threads import Team
from thinwire.compression.sparse import index_coding
from thinwire.compression.sparse import select as selection
from thinwire.compression.sparse.header import DENSE, EMPTY, FIXED, FIXED_WIDTH, HEADER, RICE, Header, half

LEVELS: Mapping[Levels, int] = {"2bit": 2, "1bit": 1}
"""Bits of a value's code, which is also the number of levels of its magnitude."""

INDICES: Mapping[Indices, int] = {"rice": RICE, "fixed": FIXED}
"""Mode of a section by the code of its indices."""

CAP = 65504.0
"""Largest level that a payload can represent: the largest finite fp16."""

BIG = 1 << 22
"""Minimum size of a section, in elements, that several threads share; a smaller one has one thread."""

Streams: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]
"""Unary, low-bits and value streams."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Content of a payload for one section.

    Modes rice and fixed: `indices` (local, ascending in each chunk) and `codes`, one per entry. Mode dense: `halves`,
    the bits of fp16 values. Mode empty: nothing. lo, hi: the levels, exact fp16 values.
    """

    mode: int
    rice: int = 0
    lo: float = 0.0
    hi: float = 0.0
    unary_bits: int = 0
    indices: NDArray[np.uint16] = field(default_factory=lambda: np.zeros(0, np.uint16))
    codes: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    halves: NDArray[np.uint16] = field(default_factory=lambda: np.zeros(0, np.uint16))

    def within(self, entries: slice, elements: slice) -> Part:
        """Return the content for a strip of the section, given its entries and elements within the section.

        It has no streams of indices.
        """
        indices, codes, halves = self.indices[entries], self.codes[entries], self.halves[elements]
        return Part(self.mode, 0, self.lo, self.hi, 0, indices, codes, halves)


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """Content of one payload: a part for each section of the layout.

    It holds the result of all choices that depend on the data.
    """

    codec: Sparse
    chunks: Chunks
    parts: tuple[Part, ...]

    def scatter(self, out: Floats, scale: float = 1.0, threads: int = 1) -> None:
        """Add scale·v̂ to the sent entries of out, the model's flat vector, in float32."""
        self.chunks.check(out)
        jobs = [(section, part, out, scale) for section, part in zip(self.chunks.sections, self.parts, strict=True)]
        with Team(threads) as team:
            team.spread(self._add, jobs, self.chunks.sizes, BIG)

    def _add(self, section: Section, part: Part, out: Floats, scale: float, team: Team) -> None:
        if part.mode == EMPTY:
            return
        elements = section.gather(out)
        self.add(section, part, elements, scale, team)
        section.put(elements, out)

    def add(self, section: Section, part: Part, elements: Floats, scale: float, team: Team) -> None:
        """Add scale·v̂ to the sent entries of the section's flat elements, in float32."""
        if part.mode == EMPTY:
            return
        if part.mode == DENSE:
            elements += np.float32(scale) * self.values(part)
        else:
            levels = np.float32(scale) * self.codec.levels(part.lo, part.hi)
            given = (part.indices, part.codes, levels, section.geometry(self.codec.k))
            cuts = team.ranges(section.count, selection.CHUNKS)
            team.each(scatterkernels.scatter, [(*given, a, b, elements) for a, b in cuts])

    def values(self, part: Part) -> Floats:
        """Return v̂ of each entry, the value that every receiver decodes."""
        if part.mode == DENSE:
            return part.halves.view(np.float16).astype(np.float32)
        return self.codec.levels(part.lo, part.hi)[part.codes]


@dataclass(frozen=True, slots=True)
class Sparse:
    """Codec that sends k of every `chunk` values (k in proportion in chunks with padding).

    See the module docstring for the wire format. values: "2bit" (sign and one of two magnitudes) or "1bit" (sign and
    the mean magnitude), with levels chosen per section. indices: "rice" (entropy-coded) or "fixed" (12 bits each).
    Raises ValueError for anything else.
    """

    k: int = 64
    chunk: int = 4096
    values: Levels = "2bit"
    indices: Indices = "rice"

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
        """Return v̂ by code."""
        return np.array([-lo, -hi, lo, hi] if self.width == 2 else [-hi, hi], np.float32)

    def dense(self, section: Section) -> bool:
        """Return True if all elements of a section are selected."""
        return section.kept(self.k) == section.size

    def bound(self, chunks: Chunks) -> int:
        """Return the size in bytes of the largest possible payload of this layout."""
        self._fit(chunks)
        total = 0
        for section in chunks.sections:
            kept = section.kept(self.k)
            total += HEADER.size
            if kept == section.size:
                total += 2 * kept
            else:
                # The chosen parameter is at most as expensive as 8: 9 bits per entry, and (chunk − 1) >> 8 ones per
                # chunk.
                bits = 9 * kept + section.count * ((self.chunk - 1) >> 8)
                total += (bits + 14) // 8 if self.indices == "rice" else (12 * kept + 7) // 8
                total += (self.width * kept + 7) // 8
        return total

    def select(self, a: Floats, chunks: Chunks, threads: int = 1) -> Selected:
        """Select the entries to send of the accumulator a, the model's flat vector.

        Raises CodecError if a value is not finite.
        """
        chunks.check(a)
        return self.select_from(lambda section: section.gather(a), chunks, threads)

    def select_from(self, gather: Gather, chunks: Chunks, threads: int = 1) -> Selected:
        """Select the entries to send of an accumulator that is computed strip by strip.

        With several threads `gather` must return separate arrays. Raises CodecError if a value is not finite.
        """
        self._fit(chunks)
        with Team(threads) as team:
            parts = team.spread(self.part, [(s, gather) for s in chunks.sections], chunks.sizes, BIG)
        return Selected(self, chunks, tuple(parts))

    def nbytes(self, selected: Selected) -> int:
        """Return the exact size of the payload in bytes."""
        return sum(self.sizes(selected))

    def sizes(self, selected: Selected) -> list[int]:
        """Return the size in bytes of each section of the payload, in order."""
        return [HEADER.size + sum(self._lengths(part)) for part in selected.parts]

    def encode(self, selected: Selected, threads: int = 1) -> bytes:
        """Return the payload."""
        out = np.empty(self.nbytes(selected), np.uint8)
        jobs, at = [], 0
        for section, part in zip(selected.chunks.sections, selected.parts, strict=True):
            stop = at + HEADER.size + sum(self._lengths(part))
            jobs.append((section, part, out[at:stop]))
            at = stop
        with Team(threads) as team:
            team.spread(self._write, jobs, selected.chunks.sizes, BIG)
        return out.tobytes()

    def decode(self, payload: Buffer, chunks: Chunks, cap: float = CAP, threads: int = 1) -> Selected:
        """Decode a payload.

        All lengths, headers and counts are checked before anything is allocated, and the memory allocated is a small
        multiple of the bytes present. Raises CodecError, which names the tensor, for anything that `encode` does not
        write for this layout, and for a level above `cap`.
        """
        self._fit(chunks)
        opened = self._opened(payload, chunks, cap)
        with Team(threads) as team:
            return Selected(self, chunks, tuple(team.each(self._read, opened)))

    def _fit(self, chunks: Chunks) -> None:
        if chunks.chunk != self.chunk:
            raise ValueError(f"{self.spec} on chunks of {chunks.chunk}")

    def part(self, section: Section, gather: Gather, team: Team) -> Part:
        """Select the entries to send of one section. Raises CodecError if a value is not finite."""
        if self.dense(section):
            values = gather(section)
            if not np.isfinite(values).all():
                raise CodecError(f"{section.name}: a value is not finite", "not finite")
            halves = np.clip(values, -CAP, CAP).astype(np.float16)
            return Part(DENSE, halves=halves.view(np.uint16)) if halves.any() else Part(EMPTY)
        indices, chosen, peak = selection.choose(section, gather, self.k, team)
        lo, hi = selection.codebook(chosen, peak, self.width, team)
        if hi == 0:
            return Part(EMPTY)
        codes = selection.codes(chosen, lo, hi, self.width, team)
        if self.indices == "fixed":
            return Part(FIXED, 0, lo, hi, 0, indices, codes)
        rice, unary_bits = index_coding.parameter(index_coding.gaps(section, indices, self.k, team), team)
        return Part(RICE, rice, lo, hi, unary_bits, indices, codes)

    def _lengths(self, part: Part) -> tuple[int, int, int]:
        """Return the sizes in bytes of the three streams."""
        count = part.indices.size
        low = index_coding.length(count, FIXED_WIDTH if part.mode == FIXED else part.rice)
        return (
            index_coding.length(part.unary_bits, 1),
            low,
            index_coding.length(count, self.width) + 2 * part.halves.size,
        )

    def _write(self, section: Section, part: Part, out: NDArray[np.uint8], team: Team) -> None:
        lo, hi = (int(np.float16(level).view(np.uint16)) for level in (part.lo, part.hi))
        HEADER.pack_into(out.data, 0, part.mode, part.rice, lo, hi, part.unary_bits)
        unary, low, values = _split(out[HEADER.size :], self._lengths(part))
        if part.mode == RICE:
            gaps = index_coding.gaps(section, part.indices, self.k, team)
            index_coding.write_rice(gaps, part.rice, part.unary_bits, unary, low, team)
        elif part.mode == FIXED:
            index_coding.write_fixed(part.indices, low, team)
        if part.mode == DENSE:
            values[:] = part.halves.astype("<u2").view(np.uint8)
        else:
            index_coding.write_codes(part.codes, self.width, values, team)

    def _opened(self, payload: Buffer, chunks: Chunks, cap: float) -> list[tuple[Section, Header, Streams]]:
        """Return the header and the streams of each section.

        Everything is checked except the indices and the dense values.
        """
        raw = np.frombuffer(payload, np.uint8)
        # Always the same array type, whatever the buffer, because the kernels are compiled for that type only.
        raw.flags.writeable = False
        opened, at = [], 0
        for section in chunks.sections:
            if raw.size - at < HEADER.size:
                raise CodecError(f"{section.name}: the payload ends before its header", "length")
            header = Header(*HEADER.unpack_from(raw.data, at))
            at += HEADER.size
            kept = section.kept(self.k)
            bits = header.streams(section.name, section.size, kept, self.width, INDICES[self.indices], cap)
            lengths = tuple(index_coding.length(each, 1) for each in bits)
            if raw.size - at < sum(lengths):
                raise CodecError(f"{section.name}: the payload ends within its streams", "length")
            streams = _split(raw[at : at + sum(lengths)], lengths)
            at += sum(lengths)
            opened.append((section, header, streams, bits))
        if at != raw.size:
            raise CodecError(f"payload of {raw.size} bytes, expected {at}", "length")
        for section, _, streams, bits in opened:
            index_coding.check(section, streams, bits, section.kept(self.k))
        return [(section, header, streams) for section, header, streams, _ in opened]

    def _read(self, section: Section, header: Header, streams: Streams) -> Part:
        mode, rice, lo, hi, unary_bits = header
        if mode == EMPTY:
            return Part(EMPTY)
        if mode == DENSE:
            halves = streams[2].view("<u2").astype(np.uint16)
            magnitudes = halves & 0x7FFF
            if magnitudes.max() >= 0x7C00:
                raise CodecError(f"{section.name}: a value is not finite", "not finite")
            if not magnitudes.any():
                raise CodecError(f"{section.name}: nothing but zeros is sent as empty")
            return Part(DENSE, halves=halves)
        if mode == RICE:
            indices = index_coding.read_rice(section, streams[0], streams[1], rice, self.k)
        else:
            indices = index_coding.read_fixed(section, streams[1], self.k)
        codes = index_coding.read_codes(streams[2], self.width, indices.size)
        return Part(mode, rice, half(lo), half(hi), unary_bits, indices, codes)


def _split(raw: NDArray[np.uint8], lengths: tuple[int, ...]) -> Streams:
    first, second, third = lengths
    return raw[:first], raw[first : first + second], raw[first + second : first + second + third]
