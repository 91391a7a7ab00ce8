"""Which entries of a section are sent, and the levels that stand for their magnitudes. `sparsereference.py` says what the
kernels compute here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from thinwire.compression import kernels, topkkernels
from thinwire.compression.chunks import Section
from thinwire.compression.codec import CodecError, Floats
from thinwire.compression.parallel import Team
from thinwire.compression.sparsereference import ROUNDS, half

CHUNKS, ENTRIES = 64, 1 << 16
"""The least number of chunks, and of entries, that are worth a thread."""


def choose(section: Section, values: Floats, k: int, team: Team) -> tuple[NDArray[np.uint16], Floats, np.float32]:
    """Local indices and values of the entries of largest magnitude, and the largest one. values: the section's elements, flat.

    Raises CodecError when a value is not finite.
    """
    geometry, count = section.geometry(k), section.kept(k)
    indices, chosen = np.empty(count, np.uint16), np.empty(count, np.float32)
    frozen = values.view()
    frozen.flags.writeable = False
    jobs = [(frozen, geometry, a, b, indices, chosen) for a, b in team.ranges(section.count, CHUNKS)]
    peak = max(team.each(topkkernels.topk, jobs))
    if peak >= kernels.INFINITE:
        raise CodecError(f"{section.name}: a value is not finite", "not finite")
    return indices, chosen, np.uint32(peak).view(np.float32)


def codebook(chosen: Floats, peak: np.float32, levels: int, team: Team) -> tuple[float, float]:
    """The levels (lo, hi) for the magnitudes, the largest of which is `peak`, as fp16 can say them."""
    cuts = team.ranges(chosen.size, ENTRIES)
    exponent = int(np.frexp(np.float64(peak))[1])
    units = np.empty(chosen.size, np.int32)
    scale = float(np.ldexp(1.0, 30 - exponent))
    total = sum(team.each(topkkernels.units, [(chosen[a:b], scale, units[a:b]) for a, b in cuts]))
    mean = total / chosen.size
    lo, hi = (mean, mean) if levels == 1 else (0.8 * mean, 1.5 * mean)
    for _ in range(ROUNDS if levels == 2 else 0):
        threshold = int((lo + hi) / 2)
        sums = team.each(topkkernels.beyond, [(units[a:b], threshold) for a, b in cuts])
        upper, number = sum(s for s, _ in sums), sum(n for _, n in sums)
        if number:
            hi = upper / number
        if chosen.size - number:
            lo = (total - upper) / (chosen.size - number)
    return tuple(float(half(np.ldexp(np.float64(level), exponent - 30))) for level in (lo, hi))  # type: ignore[return-value]


def codes(chosen: Floats, lo: float, hi: float, levels: int, team: Team) -> NDArray[np.uint8]:
    """The code of each entry."""
    out = np.empty(chosen.size, np.uint8)
    cuts = team.ranges(chosen.size, ENTRIES)
    if levels == 1:
        team.each(topkkernels.signs, [(chosen[a:b], out[a:b]) for a, b in cuts])
    else:
        middle = (np.float32(lo) + np.float32(hi)) * np.float32(0.5)
        team.each(topkkernels.codes, [(chosen[a:b], middle, out[a:b]) for a, b in cuts])
    return out
