"""Compilation of a run's kernels in advance, or their loading from the disk cache."""

from __future__ import annotations

from functools import cache

import numpy as np
from thinwire.compression import powersgd, registry
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.dense.floats import Fp32
from thinwire.compression.kernels.common import sgd_step
from thinwire.compression.powersgd import PowerSGD
from thinwire.compression.sparse import demo
from thinwire.compression.sparse import mean as sparsemean
from thinwire.compression.sparse.demo import Demo
from thinwire.compression.sparse.topk import Sparse


@cache
def warm_up(*specs: str) -> None:
    """Compile the kernels of rounds with these codecs, by one call of each with small inputs.

    Call before the first round. A kernel is compiled once per argument type, and read-only inputs are another type; sizes do
    not matter. Full precision is always included. Raises SpecError.
    """
    step = np.zeros(16, np.float32)
    for frozen in (False, True):
        x = np.zeros(16, np.float32)
        x.flags.writeable = not frozen
        sgd_step(step, step.copy(), x, np.float32(0.0), np.float32(0.0), True)
    _compile_dense(Fp32())
    for spec in specs:
        codec = registry.parse(spec)
        if isinstance(codec, Demo):
            demo.warm_up()
            _compile_sparse(codec.sparse())
        elif isinstance(codec, Sparse):
            _compile_sparse(codec)
        elif isinstance(codec, PowerSGD):
            powersgd.warm_up()
        elif registry.kind_of(spec) == "dense":
            _compile_dense(registry.dense(spec))


def _compile_dense(codec: Codec) -> None:
    payload, back = np.zeros(codec.nbytes(16), np.uint8), np.zeros(16, np.float32)
    for frozen in (False, True):
        x = np.zeros(16, np.float32)
        x.flags.writeable = not frozen
        codec.encode(x, payload)
        for buffer in (payload.data, payload.tobytes()):
            codec.decode(buffer, back)
            codec.check(buffer, 16)
    codec.mean([payload.data], [1.0], back)


def _compile_sparse(codec: Sparse) -> None:
    chunks = Chunks((("matrix", (16, 17)),), 256)
    small = Sparse(4, 256, codec.values, codec.indices)
    values = np.ones(chunks.total, np.float32)
    selected = small.decode(small.encode(small.select(values, chunks)), chunks)
    selected.scatter(values)
    sparsemean.mean([selected], [1.0], chunks)
