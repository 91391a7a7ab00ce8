"""Parts of a model that are exchanged in turn, as in Streaming DiLoCo (arXiv 2501.18512); equal on every peer."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from thinwire.compression.codec import Floats
from thinwire.swarm.manifest import ManifestError

from .fragments import Layout

Span = tuple[int, int]
"""Elements [start, stop) of the layout's vector."""

_LAYER = re.compile(r"((?:[^.]+\.)*?)([0-9]+)\.")


@dataclass(frozen=True, slots=True)
class Part:
    """Some elements of the layout's vector, in its order, as a vector of their own. `spans`: ascending, none empty."""

    spans: tuple[Span, ...]
    _starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        lengths = [stop - start for start, stop in self.spans]
        object.__setattr__(self, "_starts", (0, *accumulate(lengths)))

    @property
    def size(self) -> int:
        """Elements of the part."""
        return self._starts[-1]

    def within(self, start: int, stop: int) -> Iterator[Span]:
        """Where elements [start, stop) of the part are in the layout's vector, in order."""
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            low = self.spans[index][0] + start - self._starts[index]
            count = min(stop, self._starts[index + 1]) - start
            yield low, low + count
            start, index = start + count, index + 1

    def take(self, vector: Floats) -> Floats:
        """A copy of the part's elements."""
        return np.concatenate([vector[start:stop] for start, stop in self.spans])

    def put(self, vector: Floats, values: Floats) -> None:
        """Set the part's elements."""
        for at, (start, stop) in zip(self._starts, self.spans, strict=False):
            vector[start:stop] = values[at : at + stop - start]


def parts_of(layout: Layout, count: int) -> tuple[Part, ...]:
    """A model in `count` parts: layer l is in part l mod count, and what belongs to no layer is one layer more.

    A layer is what shares the first number in the parameters' names, as in `blocks.3.norm.weight`. A model with fewer layers
    than parts is cut into runs of equal length. Raises ManifestError when there are fewer parameters than parts.
    """
    if layout.total < count:
        raise ManifestError(f"outer.fragments is {count}, the model has {layout.total} parameters", "lower it")
    found = [_LAYER.match(piece.name) for piece in layout.pieces]
    keys = [(match[1], int(match[2])) if match else None for match in found]
    layers = sorted({key for key in keys if key is not None})
    places = {key: place for place, key in enumerate(layers)}
    if len(layers) + (None in keys) < count:
        bounds = [layout.total * index // count for index in range(count + 1)]
        return tuple(Part(((start, stop),)) for start, stop in zip(bounds, bounds[1:], strict=False))
    spans: list[list[Span]] = [[] for _ in range(count)]
    for piece, key in zip(layout.pieces, keys, strict=True):
        place = len(layers) if key is None else places[key]
        spans[place % count].append((piece.start, piece.stop))
    return tuple(Part(_joined(those)) for those in spans)


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The same elements in as few spans as possible."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)
