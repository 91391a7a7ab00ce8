"""Compile every kernel, or load it from the disk cache, before somebody waits for one."""

from __future__ import annotations

import numpy as np
from thinwire.compression import sparsemean
from thinwire.compression.chunks import Chunks
from thinwire.compression.codec import Codec
from thinwire.compression.floats import Fp32, Half
from thinwire.compression.kernels import sgd_step
from thinwire.compression.minifloat import E3M0
from thinwire.compression.quantize import Integers
from thinwire.compression.sparse import Sparse


def warm_up() -> None:
    """Call before serving: all that a round computes, for writable and for read-only inputs.

    A kernel is compiled once per type of argument: the numbers of bits and the sizes do not matter.
    """
    codecs: list[Codec] = [Fp32(), Half(False), Integers(8), Integers(8, asymmetric=True), E3M0()]
    for codec in codecs:
        payload, back = np.zeros(codec.nbytes(16), np.uint8), np.zeros(16, np.float32)
        for frozen in (False, True):
            x = np.zeros(16, np.float32)
            x.flags.writeable = not frozen
            codec.encode(x, payload)
            sgd_step(back, back.copy(), x, np.float32(0.0), np.float32(0.0), True)
            for buffer in (payload.data, payload.tobytes()):
                codec.decode(buffer, back)
                codec.check(buffer, 16)
        codec.mean([payload.data], [1.0], back)
    chunks = Chunks((("matrix", (16, 17)),), 256)
    for sparse in (Sparse(4, 256), Sparse(4, 256, "1bit", "fixed")):
        values = np.ones(chunks.total, np.float32)
        sent = sparse.encode(sparse.select(values, chunks))
        selected = sparse.decode(sent, chunks)
        selected.scatter(values)
        sparsemean.mean([selected], [1.0], chunks)
