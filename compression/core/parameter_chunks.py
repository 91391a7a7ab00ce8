"""Division of a model's parameters into chunks for the sparse codecs, with a digest to compare peers.

A tensor of two or more dimensions is a matrix (shape[0], product of the rest), cut into square blocks of side × side,
with the edges padded by zeros. Each block is a chunk; the local index of an element is row·side + column. All tensors
of fewer dimensions form one vector, cut into chunks of side². Chunks are numbered through the matrices in the order of
their names, left to right and then down, and after them through the vector.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.types import Floats

SIDES = (16, 32, 64)
"""Allowed sides of a block: powers of two for which an index of side² elements fits in 12 bits."""

MAX_TENSOR = 1 << 32
"""Upper bound of the elements of a padded tensor: the bits of its index stream are counted in 32 bits."""

STRIP = 1 << 18
"""Largest number of elements of a strip, unless one row of blocks has more."""

VECTORS = "(vectors)"
"""Name of the section that holds all tensors of fewer than two dimensions."""


@dataclass(frozen=True)
class Section:
    """One matrix, or the vector: `rows` × `cols` elements, of which the last row has only `tail`.

    spans: the ranges [start, stop) of the model's flat vector that hold the elements, in row-major order; a matrix has
    one.
    """

    name: str
    spans: tuple[tuple[int, int], ...]
    rows: int
    cols: int
    tail: int
    side: int
    vector: bool

    @property
    def size(self) -> int:
        """Number of elements without padding."""
        return self.rows * self.cols - self.cols + self.tail

    @cached_property
    def down(self) -> int:
        """Number of blocks in a column of blocks."""
        return -(-self.rows // self.side)

    @cached_property
    def across(self) -> int:
        """Number of blocks in a row of blocks."""
        return -(-self.cols // self.side)

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.down * self.across

    @cached_property
    def real(self) -> NDArray[np.int64]:
        """Elements of each chunk that are not padding, at least 1; shape (count,)."""
        high = np.minimum(self.side, self.rows - self.side * np.arange(self.down))
        wide = np.minimum(self.side, self.cols - self.side * np.arange(self.across))
        real: NDArray[np.int64] = np.outer(high, wide).reshape(-1)
        real[-1] -= self.cols - self.tail
        return real

    def keep(self, k: int) -> NDArray[np.int64]:
        """Return the number of entries that top-k selects in each chunk; shape (count,).

        k is for a full chunk; others have a number in proportion to their real elements, at least 1.
        """
        return np.maximum(1, np.rint(k * self.real / self.side**2)).astype(np.int64)

    def geometry(self, k: int) -> NDArray[np.int64]:
        """Return the read-only array that describes the section to kernels.

        Content: rows, cols, tail, side, down, across, then the value of `keep` for a block that is last neither down
        nor across, last across, last down, last in both.
        """
        return self._top(k)[0]

    def kept(self, k: int) -> int:
        """Return the number of entries that top-k selects in all chunks."""
        return self._top(k)[1]

    def _top(self, k: int) -> tuple[NDArray[np.int64], int]:
        if k not in self._known:
            high, wide = self.rows - self.side * (self.down - 1), self.cols - self.side * (self.across - 1)
            corner = high * wide - self.cols + self.tail
            real = np.array([self.side * self.side, self.side * wide, high * self.side, corner])
            keep = np.maximum(1, np.rint(k * real / self.side**2)).astype(np.int64)
            shape = [self.rows, self.cols, self.tail, self.side, self.down, self.across]
            geometry = np.array([*shape, *keep], np.int64)
            geometry.flags.writeable = False
            right, bottom = self.across - 1, self.down - 1
            self._known[k] = geometry, int(keep @ [right * bottom, bottom, right, 1])
        return self._known[k]

    @cached_property
    def _known(self) -> dict[int, tuple[NDArray[np.int64], int]]:
        return {}

    def strips(self) -> tuple[Section, ...]:
        """Cut the section into rows of blocks, one row or more with at most STRIP elements each.

        The strips have the chunks and elements of the section in the same order, so its entries are theirs one after the
        other.
        """
        step = max(1, STRIP // (self.side * self.cols))
        if step >= self.down:
            return (self,)
        if step not in self._cuts:
            self._cuts[step] = tuple(self._strip(first, step) for first in range(0, self.down, step))
        return self._cuts[step]

    def _strip(self, first: int, count: int) -> Section:
        """Return a section of `count` rows of blocks from `first` on, or of those that are left."""
        start, ends = first * self.side * self.cols, first + count >= self.down
        stop = self.size if ends else start + count * self.side * self.cols
        spans, at = [], 0
        for low, high in self.spans:
            within = low + max(0, start - at), min(high, low + stop - at)
            if within[0] < within[1]:
                spans.append(within)
            at += high - low
        rows = self.rows - first * self.side if ends else count * self.side
        tail = self.tail if ends else self.cols
        return Section(self.name, tuple(spans), rows, self.cols, tail, self.side, self.vector)

    @cached_property
    def _cuts(self) -> dict[int, tuple[Section, ...]]:
        return {}

    def gather(self, flat: Floats) -> Floats:
        """Return the elements as a flat array: a view for a matrix, a copy for the vector."""
        if len(self.spans) == 1:
            return flat[slice(*self.spans[0])]
        return np.concatenate([flat[start:stop] for start, stop in self.spans])

    def put(self, values: Floats, flat: Floats) -> None:
        """Write all elements back into the model's flat vector; free if `values` is the view from `gather`."""
        position = 0
        for start, stop in self.spans:
            target, source = flat[start:stop], values[position : position + stop - start]
            if not np.may_share_memory(target, source):
                np.copyto(target, source)
            position += stop - start

    def cut(self, values: Floats) -> Floats:
        """Return the elements by chunk, with zeros for padding; shape (count, side²)."""
        padded = np.zeros((self.down * self.side, self.across * self.side), np.float32)
        if self.tail < self.cols:
            padded.reshape(-1)[: self.size] = values
        else:
            padded[: self.rows, : self.cols] = values.reshape(self.rows, self.cols)
        blocks = padded.reshape(self.down, self.side, self.across, self.side).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(blocks).reshape(self.count, self.side**2)

    def join(self, chunks: Floats) -> Floats:
        """Inverse of `cut`: return the flat elements. Padding is ignored."""
        blocks = chunks.reshape(self.down, self.across, self.side, self.side).transpose(0, 2, 1, 3)
        padded = blocks.reshape(self.down * self.side, self.across * self.side)
        if self.tail < self.cols:
            return padded.reshape(-1)[: self.size]
        return np.ascontiguousarray(padded[: self.rows, : self.cols]).reshape(-1)


Gather: TypeAlias = Callable[[Section], Floats]
"""Function that returns the flat elements of a section or strip, which are valid until the next call."""


class Chunks:
    """Chunks of a model with tensors of `shapes`, pairs (name, shape) in ascending order of the names.

    This is also the order of the tensors in the model's flat vector, each in row-major order. total: elements of the
    flat vector. count: number of chunks. sections: matrices by name, then the vector; empty tensors have no section.
    sizes: elements by section. digest: 32-byte hash of names, shapes and chunk size; peers with different digests
    cannot exchange. Two objects are equal if their digests are. Raises ValueError for names out of order, an invalid
    shape, or a chunk size other than 256, 1024 or 4096.
    """

    def __init__(self, shapes: tuple[tuple[str, tuple[int, ...]], ...], chunk: int = 4096) -> None:
        side = math.isqrt(max(0, chunk))
        if side not in SIDES or side * side != chunk:
            raise ValueError(f"chunk must be one of {', '.join(str(s * s) for s in SIDES)}, not {chunk}")
        names = [name for name, _ in shapes]
        if any(a >= b for a, b in zip(names, names[1:], strict=False)):
            raise ValueError("tensors must come in ascending order of their names")
        self.shapes, self.chunk, self.side = shapes, chunk, side
        digest = hashlib.sha256(f"thinwire/chunks/1 {chunk}\n".encode())
        sections: list[Section] = []
        vectors: list[tuple[int, int]] = []
        position = 0
        for name, shape in shapes:
            if any(not isinstance(d, int) or d < 0 for d in shape):
                raise ValueError(f"{name} cannot have the shape {shape}")
            size = math.prod(shape)
            span = (position, position + size)
            if size and len(shape) >= 2:
                cols = size // shape[0]
                sections.append(Section(name, (span,), shape[0], cols, cols, side, False))
            elif size:
                vectors.append(span)
            position += size
            digest.update(f"{len(name.encode())} {name} {','.join(map(str, shape))}\n".encode())
        if vectors:
            length = sum(stop - start for start, stop in vectors)
            rows = -(-length // side)
            tail = length - (rows - 1) * side
            sections.append(Section(VECTORS, tuple(vectors), rows, side, tail, side, True))
        for section in sections:
            if section.count * chunk >= MAX_TENSOR:
                raise ValueError(f"{section.name} has {section.size} elements, more than a payload can hold")
        self.sections = tuple(sections)
        self.sizes = [section.size for section in sections]
        self.total = position
        self.count = sum(section.count for section in sections)
        self.digest = digest.digest()

    def cut(self, flat: Floats) -> Floats:
        """Return the model's flat vector by chunk, with zeros for padding; shape (count, chunk)."""
        self.check(flat)
        out = np.empty((self.count, self.chunk), np.float32)
        first = 0
        for section in self.sections:
            out[first : first + section.count] = section.cut(section.gather(flat))
            first += section.count
        return out

    def join(self, chunks: Floats, out: Floats) -> None:
        """Inverse of `cut`: write chunks (count, chunk) into the flat vector. Padding is ignored."""
        self.check(out)
        if chunks.shape != (self.count, self.chunk):
            raise ValueError(f"chunks of shape {chunks.shape}, expected {(self.count, self.chunk)}")
        first = 0
        for section in self.sections:
            section.put(section.join(chunks[first : first + section.count]), out)
            first += section.count

    def check(self, flat: Floats) -> None:
        """Raise ValueError unless this is a flat vector of the model."""
        if flat.dtype != np.float32 or flat.shape != (self.total,) or not flat.flags.c_contiguous:
            raise ValueError(f"expected {self.total} flat float32, not {flat.dtype} {flat.shape}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chunks) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)
