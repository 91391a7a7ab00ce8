"""The dense codecs against their reference, their wire format, and what they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from thinwire.compression import reference
from thinwire.compression.codec import Codec, CodecError
from thinwire.compression.floats import Fp32
from thinwire.compression.quantize import Int8

CODECS: list[Codec] = [Fp32(), Int8(), Int8(16), Int8(100)]
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = hnp.arrays(np.float32, st.integers(0, 600), elements=finite)
moderate = hnp.arrays(np.float32, st.integers(1, 600), elements=st.floats(-100, 100, width=32))


def encode(codec: Codec, x: np.ndarray) -> bytes:
    out = np.full(codec.nbytes(x.size), 0xAA, np.uint8)
    codec.encode(x, out)
    return out.tobytes()


def decode(codec: Codec, payload: bytes, n: int) -> np.ndarray:
    out = np.full(n, np.nan, np.float32)
    codec.decode(payload, out)
    return out


def noise(n: int, seed: int = 0) -> np.ndarray:
    """Heavy-tailed values over many orders of magnitude."""
    rng = np.random.default_rng(seed)
    return (rng.standard_t(3, n) * 10.0 ** rng.uniform(-9, 5, n)).astype(np.float32)


def test_golden_bytes_freeze_the_wire_format() -> None:
    x = np.arange(-8, 10, dtype=np.float32) / 4
    # max 2 and 2.25: scales 2^-6·(1 + 9/1024) and 2^-6·(1 + 138/1024), the first fp16 above 2/127 and 2.25/127.
    expected = "09248a24" + "8191a1b1c1d0e0f0001020303f4f5f6f" + "717f"
    assert encode(Int8(16), x).hex() == expected
    assert Int8(16).nbytes(18) == len(expected) // 2
    assert encode(Fp32(), x[:2]).hex() == "000000c00000e0bf"


@settings(max_examples=150, deadline=None)
@given(vectors, st.sampled_from([16, 100, 256]))
def test_int8_equals_the_reference(x: np.ndarray, block: int) -> None:
    codec = Int8(block)
    payload = encode(codec, x)
    assert payload == reference.int8_encode(x, block)
    assert decode(codec, payload, x.size).tobytes() == reference.int8_decode(payload, x.size, block).tobytes()


@pytest.mark.parametrize("block", [16, 256, 4096])
def test_int8_equals_the_reference_on_many_scales(block: int) -> None:
    x = noise(70_001)
    payload = encode(Int8(block), x)
    assert payload == reference.int8_encode(x, block)
    assert np.array_equal(decode(Int8(block), payload, x.size), reference.int8_decode(payload, x.size, block))


def test_every_fp16_scale_is_the_smallest_that_reaches_the_maximum() -> None:
    halves = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    peaks = halves * np.float32(127)
    for shifted in (peaks, np.nextafter(peaks, np.float32(0)), np.nextafter(peaks, np.float32(np.inf))):
        x = np.zeros((shifted.size, 16), np.float32)
        x[:, 3] = shifted
        scales = np.frombuffer(encode(Int8(16), x.reshape(-1)), np.float16, shifted.size).astype(np.float32)
        reached = scales * np.float32(127) >= shifted
        assert reached[shifted <= 127 * 65504.0].all()
        below = np.nextafter(scales.astype(np.float16), np.float16(0)).astype(np.float32)
        assert (below * np.float32(127) < shifted).all()


@settings(max_examples=100, deadline=None)
@given(moderate)
def test_int8_error_is_at_most_half_a_step(x: np.ndarray) -> None:
    codec = Int8()
    payload = encode(codec, x)
    back = decode(codec, payload, x.size)
    step = np.repeat(np.frombuffer(payload, np.float16, -(-x.size // 256)).astype(np.float64), 256)[: x.size]
    assert (np.abs(back.astype(np.float64) - x) <= step * 0.5000001).all()
    # Quantizing what was quantized changes nothing, below the range of subnormal scales.
    if ((step == 0) | (step >= 2.0**-14)).all():
        assert encode(codec, back) == payload


def test_zero_tiny_and_huge_blocks() -> None:
    codec = Int8(16)
    zero = encode(codec, np.zeros(16, np.float32))
    assert zero == bytes(18)
    tiny = np.full(16, 1e-30, np.float32)
    assert not decode(codec, encode(codec, tiny), 16).any()
    huge = np.full(16, -3e38, np.float32)
    assert (decode(codec, encode(codec, huge), 16) == np.float32(-127 * 65504)).all()
    assert encode(codec, np.zeros(0, np.float32)) == b""


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec)
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_wrong_length_is_refused_everywhere(codec: Codec, wrong: int) -> None:
    payload = bytes(codec.nbytes(300) + wrong)
    out = np.zeros(300, np.float32)
    for act in (
        lambda: codec.decode(payload, out),
        lambda: codec.check(payload, 300),
        lambda: codec.mean([bytes(codec.nbytes(300)), payload], [1, 1], out),
    ):
        with pytest.raises(CodecError, match="expected"):
            act()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_named(bad: float) -> None:
    x = noise(1000)
    x[777] = bad
    payload = encode(Fp32(), x)
    for act in (
        lambda: Fp32().check(payload, 1000),
        lambda: decode(Fp32(), payload, 1000),
        lambda: encode(Int8(), x),
    ):
        with pytest.raises(CodecError, match="not finite"):
            act()


@pytest.mark.parametrize("scale", [0x7C00, 0x7E01, 0xFC00, 0x8000, 0xB000])
def test_int8_refuses_scales_no_encoder_writes(scale: int) -> None:
    payload = bytearray(encode(Int8(16), noise(40)))
    payload[2:4] = scale.to_bytes(2, "little")
    with pytest.raises(CodecError, match="scale"):
        Int8(16).check(payload, 40)
    with pytest.raises(CodecError, match="scale"):
        decode(Int8(16), payload, 40)


@pytest.mark.parametrize("position", [0, 15, 16, 39])
def test_int8_refuses_code_minus_128(position: int) -> None:
    payload = bytearray(encode(Int8(16), np.ones(40, np.float32)))
    payload[6 + position] = 0x80
    with pytest.raises(CodecError, match="code"):
        Int8(16).check(payload, 40)
    with pytest.raises(CodecError, match="code"):
        decode(Int8(16), payload, 40)


def test_int8_refuses_codes_under_a_zero_scale() -> None:
    payload = bytearray(18)
    payload[10] = 5
    with pytest.raises(CodecError, match="code"):
        Int8(16).check(payload, 16)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec)
def test_check_returns_the_squared_norm_of_what_decode_gives(codec: Codec) -> None:
    x = noise(5003)
    payload = encode(codec, x)
    exact = math.fsum(decode(codec, payload, x.size).astype(np.float64) ** 2)
    assert codec.check(payload, x.size) == pytest.approx(exact, rel=1e-12)
    assert codec.check(memoryview(bytearray(payload)), x.size) == codec.check(payload, x.size)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(CODECS),
    st.integers(1, 6).flatmap(
        lambda peers: st.tuples(
            st.lists(st.integers(0, 2**40), min_size=peers, max_size=peers).filter(any), st.integers(0, 10_000)
        )
    ),
    st.integers(1, 9000),
)
def test_mean_equals_the_reference(codec: Codec, case: tuple[list[int], int], n: int) -> None:
    weights, seed = case
    payloads = [encode(codec, noise(n, seed + i)) for i in range(len(weights))]
    out = np.full(n, np.nan, np.float32)
    codec.mean(payloads, weights, out)
    rows = [decode(codec, payload, n) for payload in payloads]
    assert out.tobytes() == reference.mean(rows, weights).tobytes()


def test_mean_of_256_peers_and_of_one() -> None:
    codec = Int8()
    payloads = [encode(codec, noise(999, i)) for i in range(256)]
    out = np.zeros(999, np.float32)
    codec.mean(payloads, [1.0] * 256, out)
    assert np.array_equal(out, reference.mean([decode(codec, p, 999) for p in payloads], [1.0] * 256))
    codec.mean(payloads[:1], [12_345.0], out)
    assert np.array_equal(out, decode(codec, payloads[0], 999))


def test_payloads_may_lie_at_any_address() -> None:
    x = noise(1001)
    for codec in CODECS:
        payload = encode(codec, x)
        shifted = memoryview(b"\x01" + payload)[1:]
        assert codec.check(shifted, x.size) == codec.check(payload, x.size)
        out, again = np.zeros_like(x), np.zeros_like(x)
        codec.mean([shifted, payload], [1, 2], out)
        codec.mean([payload, payload], [1, 2], again)
        assert np.array_equal(out, again)


@pytest.mark.parametrize("weights", [[1.0], [0.0, 0.0], [1.0, -0.5], [1.0, math.nan], [1.0, math.inf]])
def test_weights_that_make_no_mean_are_our_mistake(weights: list[float]) -> None:
    for codec in CODECS:
        with pytest.raises(ValueError, match="weights"):
            codec.mean([bytes(codec.nbytes(8))] * 2, weights, np.zeros(8, np.float32))


def test_encode_refuses_arrays_that_do_not_fit() -> None:
    for codec in CODECS:
        with pytest.raises(ValueError, match="bytes"):
            codec.encode(np.zeros(10, np.float32), np.zeros(3, np.uint8))
        with pytest.raises(ValueError, match="flat float32"):
            codec.encode(np.zeros(10, np.float64), np.zeros(codec.nbytes(10), np.uint8))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="flat float32"):
            codec.encode(np.zeros(20, np.float32)[::2], np.zeros(codec.nbytes(10), np.uint8))
