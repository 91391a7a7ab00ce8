"""View of several arrays as one flat vector, without copying."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.types import Floats


class Flat:
    """C-contiguous float32 arrays of any shape, in order, as one vector of `total` elements.

    Raises ValueError for other arrays.
    """

    def __init__(self, arrays: Sequence[NDArray[np.float32]]) -> None:
        for array in arrays:
            if array.dtype != np.float32 or not array.flags.c_contiguous:
                raise ValueError(f"arrays must be C-contiguous float32, not {array.dtype} {array.shape}")
        self._parts = [array.reshape(-1) for array in arrays if array.size]
        self._starts = [0, *accumulate(part.size for part in self._parts)]

    @property
    def total(self) -> int:
        """Elements of all arrays."""
        return self._starts[-1]

    def view(self, start: int, stop: int) -> Floats | None:
        """Return a view of elements [start, stop); None if they span several arrays."""
        at = bisect_right(self._starts, start) - 1
        first = self._starts[at]
        if start >= stop or stop > self._starts[at + 1]:
            return None
        return self._parts[at][start - first : stop - first]

    def read(self, start: int, stop: int, out: Floats) -> None:
        """Copy elements [start, stop) into `out`."""
        for inside, outside in self._pieces(start, stop):
            out[outside] = inside

    def write(self, start: int, values: Floats) -> None:
        """Copy `values` to the elements from `start` on."""
        for inside, outside in self._pieces(start, start + values.size):
            inside[:] = values[outside]

    def _pieces(self, start: int, stop: int) -> list[tuple[Floats, slice]]:
        pieces, at = [], bisect_right(self._starts, start) - 1
        here = start
        while here < stop:
            first, end = self._starts[at], min(stop, self._starts[at + 1])
            pieces.append((self._parts[at][here - first : end - first], slice(here - start, end - start)))
            here, at = end, at + 1
        return pieces
