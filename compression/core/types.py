"""Types of what codecs read and write."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
"""Flat, C-contiguous float32 array."""

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Anything with the buffer protocol, one dimension of bytes."""

Denominator: TypeAlias = Literal["bounded_contributor_mean", "contributor_mean", "mean"]
"""Divisor of a coordinate of a sparse mean; see `sparse.mean.mean`."""

OnExclusion: TypeAlias = Literal["drop", "restore"]
"""Treatment of a payload that is not in its round's record: counted as sent, or left in the residual."""

Levels: TypeAlias = Literal["2bit", "1bit"]
"""Code of a sparse value: a sign and one of two magnitudes, or a sign alone."""

Indices: TypeAlias = Literal["rice", "fixed"]
"""Code of a sparse value's index."""

CodecKind: TypeAlias = Literal["dense", "tensor", "factors", "rows"]
"""Kind of a codec: flat chunks; whole models; two dependent dense averages (PowerSGD); activations."""
