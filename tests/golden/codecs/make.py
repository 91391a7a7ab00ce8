"""Golden payloads of every codec: `python tests/golden/codecs/make.py` rewrites them beside this file.

A changed byte is a change of the wire format and needs a new protocol version in the manifest. The inputs are portable
random numbers (compression/core/noise.py), cubed for heavy tails. decoded.txt has the digest of the decoded values of each
payload.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
from thinwire.compression import registry
from thinwire.compression.activations import subspace
from thinwire.compression.core.noise import normal
from thinwire.compression.core.parameter_chunks import Chunks

HERE = Path(__file__).parent
DENSE = ("fp32", "fp16", "bf16", "int8", "int4", "int3", "int8(block=64)", "e3m0", "e3m0(block=64)")
DENSE += tuple(f"int{bits}(block=64,{flag}=1)" for bits in (8, 4, 3) for flag in ("asymmetric", "stochastic"))
TENSOR = ("topk|2bit|rice", "topk|1bit|rice", "topk|2bit|fixed", "topk(k=9,chunk=256)", "topk(k=4096)")
TENSOR += ("demo", "demo|1bit", "demo|2bit|fixed", "demo(k=4,chunk=1024)")
ROWS = ("rows", "rows(bits=4)", "tah")
SHAPES = (("a.bias", (5,)), ("a.weight", (70, 65)), ("b.zero", (9, 8)), ("c.kernel", (8, 3, 30)), ("z.scale", (130,)))


def payloads() -> dict[str, tuple[bytes, bytes]]:
    """Return by file name the payload and its decoded values as little-endian float32."""
    made: dict[str, tuple[bytes, bytes]] = {}
    x = _values("dense", 1000)
    for spec in DENSE:
        codec: Any = registry.parse(spec)
        payload, out = np.empty(codec.nbytes(x.size), np.uint8), np.empty_like(x)
        codec.encode(x, payload, 7)
        codec.decode(payload.tobytes(), out)
        made[_file(codec.spec)] = payload.tobytes(), _bytes(out)
    for spec in TENSOR:
        codec = registry.parse(spec)
        chunks = Chunks(SHAPES, codec.chunk)
        a = _values("tensor", chunks.total)
        a[5 + 70 * 65 :][: 9 * 8] = 0
        selected, out = codec.select(a, chunks), np.zeros_like(a)
        payload = codec.encode(selected)
        codec.decode(payload, chunks).scatter(out)
        made[_file(codec.spec)] = payload, _bytes(out)
    y = _values("rows", 10 * 72).reshape(10, 72)
    for spec in ROWS:
        codec = registry.parse(spec)
        payload, out = np.empty(codec.nbytes(*y.shape), np.uint8), np.empty_like(y)
        codec.encode(y, payload)
        codec.decode(payload.tobytes(), out)
        made[_file(codec.spec)] = payload.tobytes(), _bytes(out)
    return made | _factors() | _boundary()


def _factors() -> dict[str, tuple[bytes, bytes]]:
    """Both vectors of one peer's round, and its result."""
    codec: Any = registry.parse("powersgd(rank=4)")
    chunks = Chunks(SHAPES)
    m = _values("factors", chunks.total)
    first = codec.project(m, codec.start(chunks, 7), chunks)
    sent = _bytes(first)
    codec.orthonormalise(first, chunks)
    second = codec.project_back(m, first, chunks)
    return {_file(codec.spec): (sent + _bytes(second), _bytes(codec.rebuild(first, second, chunks)))}


def _boundary() -> dict[str, tuple[bytes, bytes]]:
    """A boundary's two payloads, and the basis and the table that every stage draws."""
    codec: Any = registry.parse("subspace(k=6)")
    h = _values("boundary", 5 * 6).reshape(5, 6)
    made = {}
    for way, vocabulary in (("forward", 300), ("wide", 70_000), ("backward", 0)):
        tokens = np.array([0, 1, 299, 77, 13]) if vocabulary else None
        payload = codec.encode(h, tokens, vocabulary)
        made[_file(f"{codec.spec} {way}")] = payload, _bytes(codec.decode(payload, 5, vocabulary)[0])
    drawn = _bytes(subspace.basis(24, 6, 7)) + _bytes(subspace.table(11, 24, 7))
    return made | {"subspace-drawn.bin": (drawn, drawn)}


def _values(purpose: str, n: int) -> np.ndarray:
    x = normal(7, f"golden {purpose}", n)
    return x * x * x


def _bytes(x: np.ndarray) -> bytes:
    return x.astype("<f4").tobytes()


def _file(spec: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", spec).strip("-") + ".bin"


def digests(made: dict[str, tuple[bytes, bytes]]) -> str:
    """The text of decoded.txt."""
    return "".join(f"{hashlib.sha256(decoded).hexdigest()}  {name}\n" for name, (_, decoded) in sorted(made.items()))


if __name__ == "__main__":
    fresh = payloads()
    for stale in HERE.glob("*.bin"):
        stale.unlink()
    for name, (payload, _) in fresh.items():
        (HERE / name).write_bytes(payload)
    (HERE / "decoded.txt").write_text(digests(fresh))
    print(f"{len(fresh)} payloads, {sum(len(payload) for payload, _ in fresh.values())} bytes")
