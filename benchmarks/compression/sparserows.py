"""Rows of the sparse codec in benchmarks/compression/codecspeed.py: accumulator to payload, and payload to sum.

Half of the model is one matrix, which threads share, the rest are four, which they take in turn. Plain torch does less: its
encoder has top-k and codes, but neither fitted levels nor entropy coding, and its sum starts from indices and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from thinwire.compression import registry
from thinwire.compression.core.parameter_chunks import Chunks
from thinwire.compression.core.types import Floats
from thinwire.compression.sparse import mean
from thinwire.compression.sparse.topk import Sparse
from torch import Tensor

COLUMNS = 2048
PEERS = 4

Act = Callable[[], object]
Figures = tuple[str, Callable[[int], Act], Act | None, int]
"""Name of the row, threads -> what to time, the same in plain torch, bytes of fp32 a call reads."""


def layout(elements: int) -> Chunks:
    """One matrix of half the elements and four of an eighth."""
    rows = elements // COLUMNS
    return Chunks((("a", (rows - 4 * (rows // 8), COLUMNS)), *((name, (rows // 8, COLUMNS)) for name in "bcde")))


def figures(x: Floats) -> Iterator[Figures]:
    """The rows, for the values x."""
    chunks, tensor = layout(x.size), torch.from_numpy(x)
    for spec in ("topk(k=64)", "topk(k=32)", "topk(k=128)", "topk(k=64)|1bit", "topk(k=64)|2bit|fixed"):
        codec = registry.parse(spec)
        assert isinstance(codec, Sparse)

        def encode(threads: int, codec: Sparse = codec) -> Act:
            return lambda: codec.encode(codec.select(x, chunks, threads), threads)

        payload = encode(1)()
        assert isinstance(payload, bytes)
        bits = 8 * len(payload) / x.size
        yield f"{codec.spec} encode ({bits:.4f} bit)", encode, partial(plain_encode, tensor, codec.k), x.nbytes
    codec, out = Sparse(), np.zeros_like(x)
    payload, selected = (
        codec.encode(codec.select(x, chunks)),
        [codec.select(np.roll(x, i), chunks) for i in range(PEERS)],
    )
    where, values, target = *plain_entries(codec, payload, chunks), torch.zeros_like(tensor)
    yield (
        f"{codec.spec} accumulate",
        lambda threads: lambda: codec.decode(payload, chunks, threads=threads).scatter(out, threads=threads),
        lambda: target.index_add_(0, where, values),
        x.nbytes,
    )
    yield (
        f"{codec.spec} average of {PEERS}",
        lambda threads: lambda: mean.mean(selected, [1.0] * PEERS, chunks, threads=threads, out=out),
        None,
        PEERS * x.nbytes,
    )


def plain_encode(x: Tensor, k: int) -> tuple[Tensor, ...]:
    """Indices of 16 bits, two levels and codes, as in a plain implementation."""
    rows = x.view(-1, 4096)
    index = rows.abs().topk(k, dim=1).indices.sort(dim=1).values
    kept = rows.gather(1, index)
    magnitude = kept.abs()
    middle = magnitude.mean()
    strong = magnitude > middle
    codes = 2 * (kept > 0).to(torch.uint8) + strong.to(torch.uint8)
    quads = codes.view(-1, 4)
    packed = quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6
    return index.to(torch.int16), magnitude[strong].mean(), magnitude[~strong].mean(), packed


def plain_entries(codec: Sparse, payload: bytes, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Positions and values of the entries of a payload."""
    decoded = np.zeros(chunks.total, np.float32)
    codec.decode(payload, chunks).scatter(decoded)
    where = torch.from_numpy(np.flatnonzero(decoded))
    return where, torch.from_numpy(decoded)[where]
