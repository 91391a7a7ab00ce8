"""DeMo: momentum is kept at home and its strongest cosine coefficients are exchanged. arXiv 2411.19870.

A step on one peer, with the momentum δ a flat float32 vector of the model:

    accumulate: δ ← β·δ + lr·g;   payload = encode(select(δ));   selected.scatter(δ, −1): δ ← δ − decoded   (`feedback.py`)
    G = mean of all payloads (`mean`);   step: θ ← θ − lr·(sign G + decay·θ)

Every chunk (chunks.py) is transformed as a block (dct.py), a padded one whole: its coefficients do not stop at its edges. So
coefficients have a layout of their own, `spectrum`, and in it a payload is that of `sparse.Sparse`, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from thinwire.compression import dct, sparsemean, spectrumkernels
from thinwire.compression.chunks import Chunks
from thinwire.compression.codec import Buffer, Floats
from thinwire.compression.parallel import Team
from thinwire.compression.sparse import CAP, Selected, Sparse

BLOCKS = 64
"""Blocks from which on a thread is worth its start."""


@lru_cache(maxsize=16)
def spectrum(chunks: Chunks) -> Chunks:
    """The layout of the coefficients: for each section one column of whole blocks, so that its flat vector is the blocks one
    after the other. Numbered, because the sections of a layout need not ascend by name.
    """
    shapes = ((f"{i:06d} {s.name}", (s.count * s.side, s.side)) for i, s in enumerate(chunks.sections))
    return Chunks(tuple(shapes), chunks.chunk)


@dataclass(frozen=True, slots=True, eq=False)
class Coefficients:
    """What one payload says: `selected` of the spectrum of `chunks`."""

    codec: Demo
    chunks: Chunks
    selected: Selected

    def scatter(self, out: Floats, scale: float = 1.0, threads: int = 1) -> None:
        """out += scale·decoded, in float32, on all elements. out: the model's flat vector."""
        coefficients = np.zeros(self.selected.chunks.total, np.float32)
        self.selected.scatter(coefficients, 1.0, threads)
        synthesise(coefficients, self.chunks, out, scale, threads)


@dataclass(frozen=True, slots=True)
class Demo:
    """Keep the k largest of every block's `chunk` cosine coefficients; values and indices are written as `sparse.Sparse` does.

    Raises ValueError for what that does not know. The methods are those of Sparse.
    """

    k: int = 32
    chunk: int = 4096
    values: str = "2bit"
    indices: str = "rice"

    def __post_init__(self) -> None:
        if self.chunk not in (256, 1024, 4096) or not 1 <= self.k <= self.chunk:
            raise ValueError(f"demo: chunk must be 256, 1024 or 4096 and k 1…chunk, not {self.chunk} and {self.k}")
        self.sparse()

    @property
    def spec(self) -> str:
        return f"demo(k={self.k},chunk={self.chunk})|{self.values}|{self.indices}"

    def sparse(self) -> Sparse:
        """What writes the coefficients."""
        return Sparse(self.k, self.chunk, self.values, self.indices)

    def bound(self, chunks: Chunks) -> int:
        """Bytes of the largest payload of this layout."""
        return self.sparse().bound(spectrum(chunks))

    def select(self, a: Floats, chunks: Chunks, threads: int = 1) -> Coefficients:
        """Choose what to send of the momentum a (the model's flat vector). Raises CodecError when a value is not finite."""
        return Coefficients(self, chunks, self.sparse().select(analyse(a, chunks, threads), spectrum(chunks), threads))

    def nbytes(self, selected: Coefficients) -> int:
        """Exact size of the payload."""
        return self.sparse().nbytes(selected.selected)

    def encode(self, selected: Coefficients, threads: int = 1) -> bytes:
        """The payload."""
        return self.sparse().encode(selected.selected, threads)

    def decode(self, payload: Buffer, chunks: Chunks, cap: float = CAP, threads: int = 1) -> Coefficients:
        """What a payload says. Raises CodecError for what `encode` does not write, a level above `cap` included."""
        return Coefficients(self, chunks, self.sparse().decode(payload, spectrum(chunks), cap, threads))


def analyse(flat: Floats, chunks: Chunks, threads: int = 1) -> Floats:
    """The coefficients of the model's flat vector, themselves flat (`spectrum`). What is not finite stays so."""
    chunks.check(flat)
    out = np.empty(chunks.count * chunks.chunk, np.float32)
    _each(spectrumkernels.analyse, chunks, threads, flat, out, (dct.transposed(chunks.side),))
    return out


def synthesise(coefficients: Floats, chunks: Chunks, out: Floats, scale: float = 1.0, threads: int = 1) -> None:
    """out += scale times the model's flat vector of these coefficients, in float32: the same bits everywhere."""
    chunks.check(out)
    more = (dct.matrix(chunks.side), np.float32(scale))
    _each(spectrumkernels.synthesise, chunks, threads, out, coefficients, more)


@cache
def warm_up() -> None:
    """Compile the kernels, or load them from the disk cache; call before the first round."""
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
    """Call a kernel for each section, in as many ranges of its blocks as there are threads, and put its elements back."""
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
    denominator: str = "contributor_mean",
    clip: bool = True,
    threads: int = 1,
) -> Floats:
    """G: coefficients averaged as `sparsemean.mean` does, in the order given, and transformed back once."""
    selected = [contribution.selected for contribution in contributions]
    coefficients = sparsemean.mean(selected, weights, spectrum(chunks), denominator, clip, threads)
    out = np.zeros(chunks.total, np.float32)
    synthesise(coefficients, chunks, out, 1.0, threads)
    return out


def accumulate(momentum: Floats, gradient: Floats, beta: float, lr: float) -> None:
    """In place: δ ← β·δ + lr·g; every operation rounds to float32."""
    momentum *= np.float32(beta)
    momentum += np.float32(lr) * gradient


def step(theta: Floats, mean: Floats, lr: float, decay: float = 0.0) -> None:
    """In place: θ ← θ − lr·decay·θ − lr·sign(G); every operation rounds to float32. sign(0) = 0."""
    rate = np.float32(lr)
    theta -= (rate * np.float32(decay)) * theta
    theta -= rate * np.sign(mean)
