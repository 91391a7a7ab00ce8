"""E3M0: its fifteen values, their error, and the payloads it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kit.reference import dense as reference
from thinwire.compression.core.codec import CodecError
from thinwire.compression.dense.e3m0 import E3M0
from thinwire.compression.registry import SpecError, dense, parse

moderate = hnp.arrays(np.float32, st.integers(1, 600), elements=st.floats(-100, 100, width=32))


def encode(codec: E3M0, x: np.ndarray) -> bytes:
    out = np.full(codec.nbytes(x.size), 0xAA, np.uint8)
    codec.encode(x, out)
    return out.tobytes()


def decode(codec: E3M0, payload: bytes, n: int) -> np.ndarray:
    out = np.full(n, np.nan, np.float32)
    codec.decode(payload, out)
    return out


def scales(codec: E3M0, payload: bytes, n: int) -> np.ndarray:
    """The scale of each value."""
    return np.repeat(np.frombuffer(payload, "<f2", -(-n // codec.block)).astype(np.float64), codec.block)[:n]


def test_e3m0_writes_golden_bytes() -> None:
    x = np.array(
        [1, -1, 0.5, -0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, -0.015625, 0.005, -0.005, 0, -0.0, 0.75, -0.76]
    )
    # Scale 1; codes 7 f 6 e 5 4 3 2 in the low halves of the bytes, 1 9 0 0 0 0 7 f in the high ones.
    assert encode(E3M0(16), x.astype(np.float32)).hex() == "003c" + "179f060e050473f2"
    # A value more is a block more; 4.06 bits a value in the long run.
    assert E3M0(16).nbytes(17) == 10 + 3 and E3M0().nbytes(1 << 20) * 8 == (4 + 1 / 16) * (1 << 20)
    assert dense("e3m0").spec == "e3m0(block=256)" and parse("e3m0(block=64)") == E3M0(64)


def test_e3m0_has_fifteen_values() -> None:
    x = np.linspace(-3, 3, 4096, dtype=np.float32)
    found = np.unique(decode(E3M0(4096), encode(E3M0(4096), x), x.size))
    magnitudes = [3 * 2.0**-k for k in range(6, -1, -1)]
    assert found.tolist() == [-m for m in reversed(magnitudes)] + [0.0] + magnitudes


@settings(max_examples=100, deadline=None)
@given(moderate, st.sampled_from([E3M0(16), E3M0()]), st.sampled_from([1.0, 1e-4, 600.0]))
def test_e3m0_error_is_bounded(x: np.ndarray, codec: E3M0, factor: float) -> None:
    x = x * np.float32(factor)
    payload = encode(codec, x)
    back, s = decode(codec, payload, x.size), scales(codec, payload, x.size)
    error = np.abs(back.astype(np.float64) - x)
    assert (error <= np.maximum(np.abs(x.astype(np.float64)) / 3, s / 128)).all()
    # No other of the fifteen values is nearer, and the sign is preserved.
    levels = np.array([0.0, *(2.0**-k for k in range(7))])
    assert (error <= np.abs(np.abs(x.astype(np.float64))[:, None] - s[:, None] * levels).min(axis=1)).all()
    assert (back.astype(np.float64) * x >= 0).all() and not np.signbit(back[back == 0]).any()
    # The scale is the smallest fp16 that reaches the largest value of its block.
    for start in range(0, x.size, codec.block):
        peak, scale = np.abs(x[start : start + codec.block]).max(), np.float16(s[start])
        assert scale >= min(peak, 65504) and (scale == 0 or np.nextafter(scale, np.float16(0)) < peak)


@settings(max_examples=100, deadline=None)
@given(moderate)
def test_e3m0_requantization_is_exact(x: np.ndarray) -> None:
    codec = E3M0(16)
    back = decode(codec, encode(codec, x), x.size)
    again = decode(codec, encode(codec, back), x.size)
    # The largest value of a block may lie a power of two below its scale only where scales are subnormal.
    fine = scales(codec, encode(codec, x), x.size) >= 2.0**-14
    assert np.array_equal(again[fine], back[fine])


def test_e3m0_handles_zero_tiny_and_huge_blocks() -> None:
    codec = E3M0(16)
    assert encode(codec, np.zeros(16, np.float32)) == bytes(10) and encode(codec, np.zeros(0, np.float32)) == b""
    assert not decode(codec, encode(codec, np.full(16, 1e-30, np.float32)), 16).any()
    assert (decode(codec, encode(codec, np.full(16, -3e38, np.float32)), 16) == np.float32(-65504)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 255, 256, 999])
def test_e3m0_refuses_non_finite_values(bad: float, at: int) -> None:
    x = np.ones(1000, np.float32)
    x[at] = bad
    with pytest.raises(CodecError, match="not finite"):
        encode(E3M0(), x)


def honest(payload: bytes, n: int, block: int) -> bool:
    """Return True if the format allows a payload; written independently of the kernels."""
    blocks = -(-n // block)
    heads = np.frombuffer(payload, "<f2", blocks)
    if not np.isfinite(heads).all() or np.signbit(heads).any():
        return False
    for b in range(blocks):
        part = payload[2 * blocks + b * (block // 2) :][: block // 2]
        codes = reference.unpack(part, min(block, n - b * block), 4, False)
        if reference.pack(codes, 4) != part or (codes == 8).any() or (heads[b] == 0 and codes.any()):
            return False
    return True


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([16, 24]), st.integers(1, 60), st.data())
def test_e3m0_accepts_exactly_valid_payloads(block: int, n: int, data: st.DataObject) -> None:
    codec, rng = E3M0(block), np.random.default_rng(n)
    payload = bytearray(encode(codec, (rng.standard_t(3, n) * 10.0 ** rng.uniform(-9, 5, n)).astype(np.float32)))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.sampled_from([0, 0x80, 0x08, 0xFF, 0x7C, 0xFC, payload[at] ^ 0x80, payload[at] ^ 1]))
    allowed = honest(bytes(payload), n, block)
    for act in (lambda: codec.check(payload, n), lambda: decode(codec, bytes(payload), n)):
        if allowed:
            act()
        else:
            with pytest.raises(CodecError):
                act()


@pytest.mark.parametrize(
    ("at", "byte", "found"),
    [(1, 0x7C, "scale"), (1, 0x80, "scale"), (10, 0x08, "code"), (10, 0x80, "code"), (13, 0x10, "code")],
)
def test_e3m0_refuses_invalid_payloads(at: int, byte: int, found: str) -> None:
    """A scale that is infinite or negative, minus zero in either half of a byte, padding."""
    payload = bytearray(encode(E3M0(16), np.ones(19, np.float32)))
    assert len(payload) == 4 + 8 + 2 and E3M0(16).check(payload, 19) == 19
    payload[at] = byte
    for act in (lambda: E3M0(16).check(payload, 19), lambda: decode(E3M0(16), bytes(payload), 19)):
        with pytest.raises(CodecError, match=found):
            act()


@pytest.mark.parametrize("spec", ["e3m0(block=8)", "e3m0(block=20)", "e3m0(block=65544)", "e3m0(bits=4)", "e3m0|2bit"])
def test_e3m0_refuses_invalid_parameters(spec: str) -> None:
    with pytest.raises(SpecError, match="e3m0"):
        parse(spec)
