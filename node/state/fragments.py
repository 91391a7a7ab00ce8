"""Division of a model into parts that are exchanged in turn (Streaming DiLoCo, arXiv 2501.18512)."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import blake3
import numpy as np
from numpy.typing import NDArray
from thinwire.compression.core.types import Floats
from thinwire.node.state.layout import Layout, Piece
from thinwire.swarm.manifest.manifest import Manifest, ManifestError

Span = tuple[int, int]
"""Elements [start, stop) of the layout's vector."""

_LAYER = re.compile(r"((?:[^.]+\.)*?)([0-9]+)\.")
_CUT = re.compile(r"(.*)\[(\d+):\d+ of ([\dx]*)\]")


@dataclass(frozen=True, slots=True)
class FragmentSpans:
    """Some elements of the layout's vector, as a separate vector. `spans`: ascending, none empty."""

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
        """Yield the spans of the layout's vector that have elements [start, stop) of the part, in order."""
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            low = self.spans[index][0] + start - self._starts[index]
            count = min(stop, self._starts[index + 1]) - start
            yield low, low + count
            start, index = start + count, index + 1

    def take(self, vector: Floats) -> Floats:
        """Return a copy of the part's elements."""
        return np.concatenate([vector[start:stop] for start, stop in self.spans])

    def put(self, vector: Floats, values: Floats) -> None:
        """Set the part's elements."""
        for at, (start, stop) in zip(self._starts, self.spans, strict=False):
            vector[start:stop] = values[at : at + stop - start]


def shares(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage, nearly equal; the first have fewer, since stage 0 has the ends too."""
    least, more = divmod(layers, stages)
    return tuple(least + (stage >= stages - more) for stage in range(stages))


def fragments_of(manifest: Manifest, layout: Layout) -> tuple[FragmentSpans, ...]:
    """Return the fragments of a run's model. Raises ManifestError.

    Layers go to the fragments in turn; if peers may hold single fragments, each has consecutive layers.
    """
    if manifest.pipeline.stages:
        return stages_of(layout, manifest.pipeline.stages)
    return parts_of(layout, manifest.outer.fragment_count)


def stages_of(layout: Layout, count: int) -> tuple[FragmentSpans, ...]:
    """Return a model in `count` runs of consecutive layers, see `shares`; the first has the rest.

    Layers and models with fewer of them: see `parts_of`.
    """
    keys = [layer_of(piece.name) for piece in layout.pieces]
    layers = sorted({key for key in keys if key is not None})
    if len(layers) < count:
        return parts_of(layout, count)
    bounds = list(accumulate(shares(len(layers), count)))
    places = {key: bisect_right(bounds, place) for place, key in enumerate(layers)}
    return _gathered(layout, [0 if key is None else places[key] for key in keys], count)


def parts_of(layout: Layout, count: int) -> tuple[FragmentSpans, ...]:
    """Return a model in `count` parts: layer l is in part l mod count, and the rest is one layer more.

    A layer has the same first number in its parameters' names, as in `blocks.3.norm.weight`. A model with fewer layers
    than parts is cut into runs of equal length. Raises ManifestError if there are fewer parameters than parts.
    """
    if layout.total < count:
        raise ManifestError(f"outer.fragments is {count}, the model has {layout.total} parameters", "lower it")
    keys = [layer_of(piece.name) for piece in layout.pieces]
    layers = sorted({key for key in keys if key is not None})
    places = {key: place for place, key in enumerate(layers)}
    if len(layers) + (None in keys) < count:
        bounds = [layout.total * index // count for index in range(count + 1)]
        return tuple(FragmentSpans(((start, stop),)) for start, stop in zip(bounds, bounds[1:], strict=False))
    return _gathered(layout, [(len(layers) if key is None else places[key]) % count for key in keys], count)


def layout_of_part(layout: Layout, part: FragmentSpans, number: int, count: int) -> Layout:
    """Return the layout of one of `count` parts: its parameters, in the order of the model.

    A parameter that is split between parts becomes a flat piece. The name of the piece gives the range of elements and the
    shape of the whole parameter, so that `joined` can reassemble it. With one part the layout is that of the model.
    """
    if count == 1:
        return layout
    found, at = [], 0
    for start, stop in part.spans:
        for piece in layout.pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low >= high:
                continue
            whole = (low, high) == (piece.start, piece.stop)
            of = "x".join(map(str, piece.shape))
            name = piece.name if whole else f"{piece.name}[{low - piece.start}:{high - piece.start} of {of}]"
            shape = piece.shape if whole else (high - low,)
            found.append(Piece(name, shape, piece.dtype, at, at + high - low))
            at += high - low
    digest = blake3.blake3(b"thinwire/part/1\0" + layout.digest + number.to_bytes(2, "big") + count.to_bytes(2, "big"))
    return Layout(tuple(found), at, digest.digest())


def joined(weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return all parameters whole, by name. Raises ValueError when a part of a parameter is missing."""
    whole: dict[str, NDArray[Any]] = {}
    cut: dict[tuple[str, str], dict[int, NDArray[Any]]] = {}
    for name, values in weights.items():
        match = _CUT.fullmatch(name)
        if match:
            cut.setdefault((match[1], match[3]), {})[int(match[2])] = values
        else:
            whole[name] = values
    for (name, of), found in cut.items():
        shape = tuple(map(int, of.split("x"))) if of else ()
        flat = np.concatenate([found[start] for start in sorted(found)])
        starts = np.cumsum([0, *(found[start].size for start in sorted(found))])
        if flat.size != math.prod(shape) or list(starts[:-1]) != sorted(found):
            raise ValueError(f"a part of {name} is missing")
        whole[name] = flat.reshape(shape)
    return whole


def layer_of(name: str) -> tuple[str, int] | None:
    """Return the layer of a parameter: ("blocks.", 3) for "blocks.3.norm.weight"; None without a number."""
    match = _LAYER.match(name)
    return (match[1], int(match[2])) if match else None


def _gathered(layout: Layout, numbers: Sequence[int], count: int) -> tuple[FragmentSpans, ...]:
    """Return `count` fragments; piece i of the layout belongs to fragment numbers[i]."""
    spans: list[list[Span]] = [[] for _ in range(count)]
    for piece, number in zip(layout.pieces, numbers, strict=True):
        spans[number].append((piece.start, piece.stop))
    return tuple(FragmentSpans(_joined(those)) for those in spans)


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the same elements in as few spans as possible."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)
