"""Fuzzing targets for payloads that are not of one codec: buffers, sparse butterflies, and elements outside training.

Each target refuses an input with CodecError, or accepts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from thinwire.collectives.allreduce import element_arithmetic
from thinwire.collectives.allreduce.element_arithmetic import INTEGERS, OPS, TYPES, elements, numpy_type
from thinwire.compression import registry
from thinwire.compression.core import exact_block
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.exact_block import BufferedCodec, ExactBlock
from thinwire.compression.core.noise import normal
from thinwire.compression.sparse import portions
from thinwire.compression.sparse.portions import PortionCodecs, portion_chunks
from thinwire.compression.sparse.topk import Sparse

MODULES = (exact_block, portions, element_arithmetic)
"""Modules whose functions are instrumented."""

Target = tuple[str, Callable[[bytes], None], list[bytes]]

ELEMENTS = 300
PAIRS = [
    (element, op)
    for element in TYPES
    for op in OPS
    if not (element in (*INTEGERS, "bool") and op == "mean") and (element, op) != ("bool", "sum")
]
"""Types of elements, and the operations that they have."""


def targets() -> list[Target]:
    """Every such payload."""
    return [_buffers(), _portions(), _elements()]


def _buffers() -> Target:
    codec = BufferedCodec(registry.dense("int8(block=32)"), ExactBlock(5, 3), 2 * ELEMENTS)
    size = codec.nbytes(ELEMENTS)

    def take(data: bytes) -> None:
        payload = fitted(data, size)
        assert math.isfinite(codec.check(payload, ELEMENTS))
        out, share = np.empty(ELEMENTS, np.float32), np.zeros(size, np.uint8)
        codec.mean([payload, payload], [1.0, 3.0], out)
        codec.combine([payload, payload], [1.0, 3.0], ELEMENTS, share)
        assert np.isfinite(out).all()
        np.testing.assert_array_equal(codec.share(ELEMENTS).read(share), codec.share(ELEMENTS).read(payload))

    whole = np.zeros(size, np.uint8)
    codec.encode(normal(1, "fuzz", ELEMENTS), whole)
    codec.put(normal(2, "fuzz", 8), 0, ELEMENTS, ELEMENTS, whole)
    return "buffers", take, [b"\1" + whole.tobytes()]


def _portions() -> Target:
    """The first bit of an input picks a contribution or a result."""
    portions = PortionCodecs(Sparse(4, 256), Sparse(16, 256))
    chunks, x = portion_chunks(ELEMENTS, ELEMENTS, 256), normal(3, "fuzz", ELEMENTS)

    def take(data: bytes) -> None:
        if not data:
            raise CodecError("empty")
        payload = data[1:]
        assert len(payload) <= portions.nbytes(ELEMENTS) or not _accepts(portions, payload)
        if data[0] & 1:
            portions.check_sum(payload, ELEMENTS)
            return
        portions.check(payload, ELEMENTS)
        sent, left = portions.reduce([payload, payload], [1.0, 3.0], None, ELEMENTS)
        assert math.isfinite(portions.check_sum(sent, ELEMENTS)) and np.isfinite(left).all()

    made = [one.encode(one.select(x.copy(), chunks)) for one in (portions.codec, portions.wide)]
    return "sparse butterfly", take, [b"\0" + made[0], b"\1" + made[1]]


def _accepts(portions: PortionCodecs, payload: bytes) -> bool:
    for check in (portions.check, portions.check_sum):
        try:
            check(payload, ELEMENTS)
        except CodecError:
            continue
        return True
    return False


def _elements() -> Target:
    """The first byte picks the element type and operation; the second one the number of elements."""

    def take(data: bytes) -> None:
        if len(data) < 2:
            raise CodecError("empty")
        (element, op), n = PAIRS[data[0] % len(PAIRS)], data[1] % 64
        for codec in ("exact", "int8(block=32)") if element in ("float32", "bfloat16") else ("exact",):
            one = elements(element, op, codec, registry.dense)
            payload = fitted(data[2:], one.nbytes(n))
            one.check(payload, n)
            out = np.empty(n, numpy_type(element))
            one.decode(payload, out)
            if element == "bool":
                assert set(out.view(np.uint8)) <= {0, 1}
            assert memoryview(one.result([payload, payload], [1.0, 3.0], n)).nbytes == one.nbytes(n)

    return "elements", take, [bytes([number, 8, 1]) + bytes(64) for number in range(len(PAIRS))]


def fitted(data: bytes, size: int) -> bytes:
    """Make a payload fit a fixed length if it begins with an odd byte, for lengths are nearly always wrong."""
    return data[1 : size + 1].ljust(size, b"\0") if data[:1] and data[0] & 1 else data[1:]
