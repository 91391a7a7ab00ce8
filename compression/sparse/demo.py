"""DeMo: momentum stays local, and its strongest cosine coefficients are exchanged. arXiv 2411.19870.

A step on one peer, where the momentum δ is a flat float32 vector of the model:

    accumulate: δ ← β·δ + lr·g;   payload = encode(select(δ))
    selected.scatter(δ, −1): δ ← δ − decoded   (`error_feedback.py`)
    G = mean of all payloads (`mean`);   step: θ ← θ − lr·(sign G + decay·θ)

Every chunk (chunks.py) is transformed as a block (dct.py). A padded chunk is transformed whole, since its coefficients
do not stop at its edges. Coefficients therefore have a separate layout, `spectrum`; within it, a payload is byte for
byte that of `topk.Sparse`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.core.types import Buffer, Denominator, Floats, Indices, Levels
from thinwire.compression.kernels import block_dct as spectrumkernels
from thinwire.compression.kernels import dct
from thinwire.compression.kernels.threads import Team
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.mean import Average
from thinwire.compression.sparse.topk import CAP, Selected, Sparse

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
        coefficients = np.zeros(self.selected.chunks.total, np.float32)
        self.selected.scatter(coefficients, 1.0, threads)
        synthesise(coefficients, self.chunks, out, scale, threads)


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
        return Coefficients(self, chunks, self.sparse().select(analyse(a, chunks, threads), spectrum(chunks), threads))

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


def analyse(flat: Floats, chunks: Chunks, threads: int = 1) -> Floats:
    """Return the flat coefficients (see `spectrum`) of the model's flat vector.

    Non-finite values give non-finite coefficients.
    """
    chunks.check(flat)
    out = np.empty(chunks.count * chunks.chunk, np.float32)
    _each(spectrumkernels.analyse, chunks, threads, flat, out, (dct.transposed(chunks.side),))
    return out


def synthesise(coefficients: Floats, chunks: Chunks, out: Floats, scale: float = 1.0, threads: int = 1) -> None:
    """Add scale times the model's flat vector of these coefficients to out, in float32.

    The result is bit-equal on every machine.
    """
    chunks.check(out)
    more = (dct.matrix(chunks.side), np.float32(scale))
    _each(spectrumkernels.synthesise, chunks, threads, out, coefficients, more)


def warm_up() -> None:
    """Compile the kernels of the transform, or load them from the disk cache."""
    chunks = Chunks((("matrix", (16, 17)),), 256)
    values = np.ones(chunks.total, np.float32)
    Demo(4, 256).select(values, chunks).scatter(values, -1.0)


def _each(
    work: Callable[..., None],
    chunks: Chunks,
    threads: int,
    flat: Floats,
    coefficients: Floats,
    more: tuple[object, ...],
) -> None:
    """Call a kernel for each section, over ranges of blocks for the threads, and write the elements back."""
    blocks, at = coefficients.reshape(chunks.count, chunks.side, chunks.side), 0
    with Team(threads) as team:
        for section in chunks.sections:
            values, part = section.gather(flat), blocks[at : at + section.count]
            given = (values, part) if work is spectrumkernels.analyse else (part, values)
            cuts = team.ranges(section.count, BLOCKS)
            team.each(work, [(given[0], section.cols, a, b, *more, given[1]) for a, b in cuts])
            if work is spectrumkernels.synthesise:
                section.put(values, flat)
            at += section.count


def mean(
    contributions: Sequence[Coefficients],
    weights: Sequence[float],
    chunks: Chunks,
    denominator: Denominator = "bounded_contributor_mean",
    average: Average = sparsemean.mean,
    threads: int = 1,
) -> Floats:
    """Return G: the coefficients aggregated by `average` in the given order, transformed back once."""
    selected = [contribution.selected for contribution in contributions]
    coefficients = average(selected, weights, spectrum(chunks), denominator)
    out = np.zeros(chunks.total, np.float32)
    synthesise(coefficients, chunks, out, 1.0, threads)
    return out


def step(theta: Floats, mean: Floats, lr: float, decay: float = 0.0) -> None:
    """Update in place: θ ← θ − lr·decay·θ − lr·sign(G); every operation rounds to float32. sign(0) = 0."""
    rate = np.float32(lr)
    theta -= (rate * np.float32(decay)) * theta
    theta -= rate * np.sign(mean)
