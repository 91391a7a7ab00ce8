"""Types of what codecs read and write."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
"""Flat, C-contiguous float32 array."""

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Anything with the buffer protocol, one dimension of bytes."""
