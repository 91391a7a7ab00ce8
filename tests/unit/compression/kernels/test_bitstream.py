"""Kernels of bit streams on bytes that no check has seen, as if another process changed them after the check."""

from __future__ import annotations

from threading import Thread

import numpy as np
import pytest
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.kernels import bitstream

(SECTION,) = Chunks((("a", (40, 100)),), 256).sections
GEOMETRY, ENTRIES = SECTION.geometry(8), SECTION.kept(8)


def read_rice(unary: np.ndarray, low: np.ndarray, indices: np.ndarray) -> list[int]:
    """Return the kernel's result, or nothing if it does not end. Another thread, because the kernel cannot be interrupted."""
    found: list[int] = []
    for stream in (unary, low):
        stream.flags.writeable = False  # as those of codecs are: the kernel is compiled for them
    thread = Thread(target=lambda: found.append(bitstream.read_rice(unary, low, 5, GEOMETRY, indices)), daemon=True)
    thread.start()
    thread.join(60)
    return found


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100])
@pytest.mark.parametrize("zeros", [0, 3])
def test_rice_stream_that_ends_in_ones_is_refused(size: int, zeros: int) -> None:
    unary, low = np.full(size, 0xFF, np.uint8), np.zeros(ENTRIES * 5 // 8 + 1, np.uint8)
    unary[:zeros] = 0b11111110
    assert ENTRIES > 3
    assert read_rice(unary, low, np.empty(ENTRIES, np.uint16)) == [bitstream.OUTSIDE]


def test_rice_streams_of_any_bytes_write_within_the_indices() -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        unary, low = (rng.integers(0, 256, size, dtype=np.uint8) for size in (ENTRIES // 4, ENTRIES * 5 // 8 + 1))
        whole = np.full(ENTRIES + 64, 0xABCD, np.uint16)
        assert len(read_rice(unary, low, whole[32:-32])) == 1
        assert (whole[:32] == 0xABCD).all() and (whole[-32:] == 0xABCD).all()
