"""Selection of the entries of a section to send, and levels for their magnitudes.

`tests/kit/reference/sparse.py` defines what the kernels compute here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.parameter_chunks import Gather, Section
from thinwire.compression.core.types import Floats
from thinwire.compression.kernels import common as kernels
from thinwire.compression.kernels import topk as topkkernels
from thinwire.compression.kernels.threads import Team

ROUNDS = 6
"""Rounds of Lloyd's algorithm."""

CHUNKS = 64
"""Minimum number of chunks to search that is worth a thread."""

ENTRIES, MANY = 1 << 15, 1 << 19
"""Minimum number of entries that is worth a thread: to write their bits, and to read each once."""


def choose(section: Section, gather: Gather, k: int, team: Team) -> tuple[NDArray[np.uint16], Floats, np.float32]:
    """Return local indices and values of the entries of largest magnitude, and the largest magnitude.

    Raises CodecError if a value is not finite.
    """
    count, start, peak = section.kept(k), 0, np.uint32(0)
    indices, chosen = np.empty(count, np.uint16), np.empty(count, np.float32)
    for strip in section.strips():
        geometry, stop = strip.geometry(k), start + strip.kept(k)
        frozen = gather(strip).view()
        frozen.flags.writeable = False
        ranges = team.ranges(strip.count, CHUNKS)
        jobs = [(frozen, geometry, a, b, indices[start:stop], chosen[start:stop]) for a, b in ranges]
        peak, start = max([peak, *team.each(topkkernels.topk, jobs)]), stop
    if peak >= kernels.INFINITE:
        raise CodecError(f"{section.name}: a value is not finite", "not finite")
    return indices, chosen, np.uint32(peak).view(np.float32)


def codebook(chosen: Floats, peak: np.float32, levels: int, team: Team) -> tuple[float, float]:
    """Return the levels (lo, hi) for the magnitudes, as exact fp16 values.

    `peak` is the largest magnitude.
    """
    cuts = team.ranges(chosen.size, MANY)
    units = np.empty(chosen.size, np.int32)
    total = sum(map(int, team.each(topkkernels.units, [(chosen[a:b], unit(peak), units[a:b]) for a, b in cuts])))

    def beyond(threshold: int) -> tuple[int, int]:
        sums = team.each(topkkernels.beyond, [(units[a:b], threshold) for a, b in cuts])
        return sum(int(s) for s, _ in sums), sum(int(n) for _, n in sums)

    return lloyd(total, chosen.size, beyond, peak, levels)


def unit(peak: np.float32) -> float:
    """Return the number of units per 1.0, a power of two; the largest magnitude is below 2**30 units."""
    return float(np.ldexp(1.0, 30 - int(np.frexp(np.float64(peak))[1])))


def lloyd(
    total: int, count: int, beyond: Callable[[int], tuple[int, int]], peak: np.float32, levels: int
) -> tuple[float, float]:
    """Return the levels for `count` magnitudes with a sum of `total` units.

    beyond: maps a threshold to (sum, number) of the magnitudes above it.
    """
    mean = total / count
    lo, hi = (mean, mean) if levels == 1 else (0.8 * mean, 1.5 * mean)
    for _ in range(ROUNDS if levels == 2 else 0):
        upper, number = beyond(int((lo + hi) / 2))
        if number:
            hi = upper / number
        if count - number:
            lo = (total - upper) / (count - number)
    # The unit is a power of two, so these quotients are exact, except for values too small for float64, which are zero
    # in fp16.
    return half(lo / unit(peak)), half(hi / unit(peak))


def half(x: float) -> float:
    """Return the nearest fp16, rounded via float32, at most the largest finite one. x ≥ 0."""
    return float(np.float16(min(np.float32(x), np.float32(65504))))


def codes(chosen: Floats, lo: float, hi: float, levels: int, team: Team) -> NDArray[np.uint8]:
    """Return the code of each entry."""
    out = np.empty(chosen.size, np.uint8)
    cuts = team.ranges(chosen.size, MANY)
    if levels == 1:
        team.each(topkkernels.signs, [(chosen[a:b], out[a:b]) for a, b in cuts])
    else:
        middle = (np.float32(lo) + np.float32(hi)) * np.float32(0.5)
        team.each(topkkernels.codes, [(chosen[a:b], middle, out[a:b]) for a, b in cuts])
    return out
