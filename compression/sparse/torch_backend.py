"""Sparse codec on torch tensors on any device; results are bit-equal to those of the CPU.

The heavy work runs on the device, in plain torch operations; only the selection, a hundredth of the model, is copied to
the host. All operations used give results that do not depend on their order: comparisons, sums of integers, and single
additions.
"""

from __future__ import annotations

import numpy as np
import torch
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.parameter_chunks import Chunks, Section
from thinwire.compression.kernels.common import INFINITE, MAGNITUDE
from thinwire.compression.kernels.threads import Team
from thinwire.compression.sparse import index_coding
from thinwire.compression.sparse import select as selection
from thinwire.compression.sparse.header import DENSE, EMPTY, FIXED, RICE
from thinwire.compression.sparse.topk import CAP, Part, Selected, Sparse
from torch import Tensor

GROUP = 1 << 14
"""Number of chunks processed at a time, which takes about five bytes per element."""


def select(codec: Sparse, a: Tensor, chunks: Chunks) -> Selected:
    """Return what `codec.select` selects of the accumulator a (the model's flat vector), on any device.

    Raises CodecError if a value is not finite, ValueError if a does not fit.
    """
    _fit(a, chunks)
    if codec.chunk != chunks.chunk:
        raise ValueError(f"{codec.spec} on chunks of {chunks.chunk}")
    return Selected(codec, chunks, tuple(part(codec, section, gather(section, a)) for section in chunks.sections))


def gather(section: Section, flat: Tensor) -> Tensor:
    """Return the section's elements: a view for one span, a copy for several."""
    spans = [flat[start:stop] for start, stop in section.spans]
    return spans[0] if len(spans) == 1 else torch.cat(spans)


def cut(section: Section, elements: Tensor) -> Tensor:
    """Return the elements by chunk, with zeros for padding; shape (count, side²)."""
    side, pad = section.side, torch.nn.functional.pad
    if section.vector:
        return pad(elements, (0, section.down * side * side - section.size)).view(section.down, side * side)
    grid = elements.view(section.rows, section.cols)
    grid = pad(grid, (0, section.across * side - section.cols, 0, section.down * side - section.rows))
    return grid.view(section.down, side, section.across, side).transpose(1, 2).reshape(section.count, side * side)


def largest(keys: Tensor, keep: Tensor) -> Tensor:
    """Return a mask of the `keep` largest keys of each row, of equal keys the first.

    keys: (rows, n) int32, ≥ 0, of which at least keep ≥ 1 are > 0.
    """
    threshold = torch.zeros_like(keep)
    for bit in range(30, -1, -1):
        higher = threshold + (1 << bit)
        threshold = torch.where((keys >= higher[:, None]).sum(1, dtype=torch.int32) >= keep, higher, threshold)
    above = keys > threshold[:, None]
    equal = keys == threshold[:, None]
    rest = keep - above.sum(1, dtype=torch.int32)
    return above | (equal & (equal.cumsum(1, dtype=torch.int32) <= rest[:, None]))


def part(codec: Sparse, section: Section, elements: Tensor) -> Part:
    """Select the entries to send of a section, given its flat elements.

    Raises CodecError if a value is not finite.
    """
    if codec.dense(section):
        if not bool(torch.isfinite(elements).all()):
            raise CodecError(f"{section.name}: a value is not finite", "not finite")
        halves = elements.clamp(-CAP, CAP).to(torch.float16).cpu().numpy()
        return Part(DENSE, halves=halves.view(np.uint16)) if halves.any() else Part(EMPTY)
    bits = elements.contiguous().view(torch.int32) & int(MAGNITUDE)
    if int(bits.max()) >= int(INFINITE):
        raise CodecError(f"{section.name}: a value is not finite", "not finite")
    # One is added so that real elements are above padding, which is zero.
    rows, values = cut(section, bits + 1), cut(section, elements)
    keep = torch.from_numpy(section.keep(codec.k).astype(np.int32)).to(elements.device)
    places, kept = [], []
    for first in range(0, section.count, GROUP):
        group = slice(first, first + GROUP)
        mask = largest(rows[group], keep[group])
        places.append(mask.nonzero()[:, 1].to(torch.int32))
        kept.append(values[group][mask])
    indices, chosen = torch.cat(places).cpu().numpy().astype(np.uint16), torch.cat(kept)
    magnitudes = chosen.abs()
    peak = np.float32(magnitudes.max().item())
    units = (magnitudes.to(torch.float64) * selection.unit(peak)).to(torch.int64)

    def beyond(threshold: int) -> tuple[int, int]:
        above = units > threshold
        return int((units * above).sum()), int(above.sum())

    lo, hi = selection.lloyd(int(units.sum()), units.numel(), beyond, peak, codec.width)
    if hi == 0:
        return Part(EMPTY)
    codes = (chosen > 0).to(torch.uint8)
    if codec.width == 2:
        middle = (np.float32(lo) + np.float32(hi)) * np.float32(0.5)
        codes = 2 * codes + (magnitudes > float(middle)).to(torch.uint8)
    if codec.indices == "fixed":
        return Part(FIXED, 0, lo, hi, 0, indices, codes.cpu().numpy())
    alone = Team(1)
    rice, unary_bits = index_coding.parameter(index_coding.gaps(section, indices, codec.k, alone), alone)
    return Part(RICE, rice, lo, hi, unary_bits, indices, codes.cpu().numpy())


def _fit(flat: Tensor, chunks: Chunks) -> None:
    if flat.dtype != torch.float32 or flat.shape != (chunks.total,) or not flat.is_contiguous():
        raise ValueError(f"expected {chunks.total} flat float32, not {flat.dtype} {tuple(flat.shape)}")
