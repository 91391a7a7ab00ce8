"""Compilation of all kernels in advance, or their loading from the disk cache."""

from __future__ import annotations

import numpy as np
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.square_chunks import Chunks
from thinwire.compression.dense.blockint import Integers
from thinwire.compression.dense.e3m0 import E3M0
from thinwire.compression.dense.floats import Fp32, Half
from thinwire.compression.kernels.common import sgd_step
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.topk import Sparse


def warm_up() -> None:
    """Run all that a round computes once, for writable and for read-only inputs; call before serving.

    A kernel is compiled once per argument type; bit widths and sizes do not matter.
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
