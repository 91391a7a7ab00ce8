"""DeMo: momentum stays local, and its strongest cosine coefficients are exchanged. arXiv 2411.19870.

A step on one peer, where the momentum δ is a flat float32 vector of the model:

    accumulate: δ ← β·δ + lr·g;   payload = encode(select(δ))
    selected.scatter(δ, −1): δ ← δ − decoded   (`error_feedback.py`)
    G = mean of all payloads (`mean`);   step: θ ← θ − lr·(sign G + decay·θ)

Every chunk (parameter_chunks.py) is transformed as a block (dct.py). A padded chunk is transformed whole, since its
coefficients do not stop at its edges. Coefficients therefore have a separate layout, `spectrum`; within it, a payload is
byte for byte that of `topk.Sparse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from thinwire.compression.core.parameter_chunks import Chunks, Gather, Section
from thinwire.compression.core.types import Buffer, Denominator, Floats, Indices, Levels
from thinwire.compression.kernels import block_dct, dct
from thinwire.compression.kernels.threads import Team
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.mean import Average, Pieces
from thinwire.compression.sparse.topk import CAP, Selected, Sparse

ALONE = sparsemean.ALONE

BLOCKS = 64
"""Minimum number of blocks that is worth a thread."""


@lru_cache(maxsize=16)
def spectrum(chunks: Chunks) -> Chunks:
    """Return the layout of the coefficients: for each section one column of whole blocks.

    Its flat vector is the blocks one after the other. The names are numbered, because the sections of a layout need not
    be in ascending order of their names.
    """
    shapes = ((f"{i:06d} {s.name}", (s.count * s.side, s.side)) for i, s in enumerate(chunks.sections))
    return Chunks(tuple(shapes), chunks.chunk)


@dataclass(frozen=True, slots=True, eq=False)
class Coefficients:
    """Decoded content of one payload: `selected` refers to the spectrum of `chunks`."""

    codec: Demo
    chunks: Chunks
    selected: Selected

    def scatter(self, out: Floats, scale: float = 1.0, threads: int = 1) -> None:
        """Add scale·decoded to all elements of out, the model's flat vector, in float32."""
        self.chunks.check(out)
        spectral = self.selected.chunks.sections
        with Team(threads) as team:
            for section, flat, part in zip(self.chunks.sections, spectral, self.selected.parts, strict=True):
                coefficients, values = np.zeros(flat.size, np.float32), section.gather(out)
                self.selected.add(flat, part, coefficients, 1.0, team)
                synthesise(section, coefficients, values, scale, team)
                section.put(values, out)


@dataclass(frozen=True, slots=True)
class Demo:
    """Codec that sends the k largest of the `chunk` cosine coefficients of every block.

    Values and indices are encoded as in `topk.Sparse`, and the methods are those of `Sparse`. Raises ValueError for
    parameters that `Sparse` does not accept.
    """

    k: int = 32
    chunk: int = 4096
    values: Levels = "2bit"
    indices: Indices = "rice"

    def __post_init__(self) -> None:
        if self.chunk not in (256, 1024, 4096) or not 1 <= self.k <= self.chunk:
            raise ValueError(f"demo: chunk must be 256, 1024 or 4096 and k 1…chunk, not {self.chunk} and {self.k}")
        self.sparse()

    @property
    def spec(self) -> str:
        return f"demo(k={self.k},chunk={self.chunk})|{self.values}|{self.indices}"

    def sparse(self) -> Sparse:
        """Return the codec that encodes the coefficients."""
        return Sparse(self.k, self.chunk, self.values, self.indices)

    def bound(self, chunks: Chunks) -> int:
        """Return the size in bytes of the largest possible payload of this layout."""
        return self.sparse().bound(spectrum(chunks))

    def select(self, a: Floats, chunks: Chunks, threads: int = 1) -> Coefficients:
        """Select the entries to send of the momentum a, the model's flat vector.

        Raises CodecError if a value is not finite.
        """
        chunks.check(a)
        return self.select_from(lambda section: section.gather(a), chunks, threads)

    def select_from(self, gather: Gather, chunks: Chunks, threads: int = 1) -> Coefficients:
        """Select the entries to send of a momentum that is computed section by section.

        See `Sparse.select_from`.
        """
        codec, layout, parts = self.sparse(), spectrum(chunks), []
        with Team(threads) as team:
            for section, spectral in zip(chunks.sections, layout.sections, strict=True):
                coefficients = analyse(section, gather(section), team)
                parts.append(codec.part(spectral, partial(_of_strip, coefficients, spectral.spans[0][0]), team))
        return Coefficients(self, chunks, Selected(codec, layout, tuple(parts)))

    def nbytes(self, selected: Coefficients) -> int:
        """Return the exact size of the payload in bytes."""
        return self.sparse().nbytes(selected.selected)

    def encode(self, selected: Coefficients, threads: int = 1) -> bytes:
        """Return the payload."""
        return self.sparse().encode(selected.selected, threads)

    def decode(self, payload: Buffer, chunks: Chunks, cap: float = CAP, threads: int = 1) -> Coefficients:
        """Decode a payload.

        Raises CodecError for anything that `encode` does not write, and for a level above `cap`.
        """
        return Coefficients(self, chunks, self.sparse().decode(payload, spectrum(chunks), cap, threads))


def analyse(section: Section, values: Floats, team: Team = ALONE) -> Floats:
    """Return the flat coefficients (see `spectrum`) of a section's flat elements.

    Non-finite values give non-finite coefficients.
    """
    out = np.empty((section.count, section.side, section.side), np.float32)
    more = (dct.transposed(section.side), out)
    cuts = team.ranges(section.count, BLOCKS)
    team.each(block_dct.analyse, [(values, section.cols, a, b, *more) for a, b in cuts])
    return out.reshape(-1)


def synthesise(section: Section, coefficients: Floats, values: Floats, scale: float = 1.0, team: Team = ALONE) -> None:
    """Add scale times the elements with these coefficients to a section's flat elements, in float32.

    The result is bit-equal on every machine.
    """
    blocks = coefficients.reshape(section.count, section.side, section.side)
    more = (dct.matrix(section.side), np.float32(scale), values)
    cuts = team.ranges(section.count, BLOCKS)
    team.each(block_dct.synthesise, [(blocks, section.cols, a, b, *more) for a, b in cuts])


def _of_strip(coefficients: Floats, first: int, strip: Section) -> Floats:
    """Return the coefficients of a strip of a spectrum's section whose span begins at `first`."""
    start, stop = strip.spans[0]
    return coefficients[start - first : stop - first]


def warm_up() -> None:
    """Compile the kernels of the transform, or load them from the disk cache."""
    chunks = Chunks((("matrix", (16, 17)),), 256)
    values = np.ones(chunks.total, np.float32)
    Demo(4, 256).select(values, chunks).scatter(values, -1.0)


def means(
    contributions: Sequence[Coefficients],
    weights: Sequence[float],
    chunks: Chunks,
    denominator: Denominator = "bounded_contributor_mean",
    average: Average = sparsemean.means,
) -> Pieces:
    """Yield G section by section.

    The coefficients are aggregated by `average` in the given order, and transformed back once.
    """
    layout = spectrum(chunks)
    strips = average([contribution.selected for contribution in contributions], weights, layout, denominator)
    for section, spectral in zip(chunks.sections, layout.sections, strict=True):
        coefficients, (first, stop), at = np.empty(spectral.size, np.float32), spectral.spans[0], spectral.spans[0][0]
        while at < stop:
            strip, part = next(strips)
            _of_strip(coefficients, first, strip)[:] = part
            at = strip.spans[0][1]
        values = np.zeros(section.size, np.float32)
        synthesise(section, coefficients, values)
        yield section, values


def step(theta: Floats, means: Pieces, lr: float, decay: float = 0.0) -> None:
    """Update in place: θ ← θ − lr·decay·θ − lr·sign(G); every operation rounds to float32. sign(0) = 0."""
    rate = np.float32(lr)
    for section, mean in means:
        values = section.gather(theta)
        values -= (rate * np.float32(decay)) * values
        values -= rate * np.sign(mean)
        section.put(values, theta)
