"""Dense codecs against their reference, their wire format, and the payloads they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kit.reference import dense as reference
from thinwire.compression.core.codec import Codec, CodecError
from thinwire.compression.dense.blockint import Int3, Int4, Int8, Integers
from thinwire.compression.dense.e3m0 import E3M0
from thinwire.compression.dense.floats import Fp32, bf16, fp16

INTEGERS = [
    Integers(bits, block, asymmetric, stochastic)
    for bits, block in ((8, 16), (8, 100), (8, 256), (4, 16), (4, 256), (3, 24), (3, 256))
    for asymmetric in (False, True)
    for stochastic in (False, True)
]
CODECS: list[Codec] = [Fp32(), fp16(), bf16(), E3M0(16), E3M0(24), E3M0(), *INTEGERS]
SEED = 0xFEDCBA9876543210
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = hnp.arrays(np.float32, st.integers(0, 600), elements=finite)
moderate = hnp.arrays(np.float32, st.integers(1, 600), elements=st.floats(-100, 100, width=32))


def encode(codec: Codec, x: np.ndarray) -> bytes:
    out = np.full(codec.nbytes(x.size), 0xAA, np.uint8)
    codec.encode(x, out, SEED)
    return out.tobytes()


def decode(codec: Codec, payload: bytes, n: int) -> np.ndarray:
    out = np.full(n, np.nan, np.float32)
    codec.decode(payload, out)
    return out


def noise(n: int, seed: int = 0) -> np.ndarray:
    """Heavy-tailed values over many orders of magnitude."""
    rng = np.random.default_rng(seed)
    return (rng.standard_t(3, n) * 10.0 ** rng.uniform(-9, 5, n)).astype(np.float32)


def test_dense_codecs_write_golden_bytes() -> None:
    x = np.arange(-8, 10, dtype=np.float32) / 4
    # max 2 and 2.25: scales 2^-6·(1 + 9/1024) and 2^-6·(1 + 138/1024), the first fp16 above 2/127 and 2.25/127.
    expected = "09248a24" + "8191a1b1c1d0e0f0001020303f4f5f6f" + "717f"
    assert encode(Int8(16), x).hex() == expected
    assert Int8(16).nbytes(18) == len(expected) // 2
    assert encode(Fp32(), x[:2]).hex() == "000000c00000e0bf"


def expected(codec: Codec, x: np.ndarray) -> bytes:
    """Return the encoding by the reference."""
    if isinstance(codec, Integers):
        return reference.integers_encode(x, codec.bits, codec.block, codec.asymmetric, codec.stochastic, SEED)
    if isinstance(codec, E3M0):
        return reference.e3m0_encode(x, codec.block)
    return x.tobytes() if codec.spec == "fp32" else reference.halves_encode(x, codec.spec == "bf16")


def restored(codec: Codec, payload: bytes, n: int) -> np.ndarray:
    """Return the decoding by the reference."""
    if isinstance(codec, Integers):
        return reference.integers_decode(payload, n, codec.bits, codec.block, codec.asymmetric)
    if isinstance(codec, E3M0):
        return reference.e3m0_decode(payload, n, codec.block)
    return (
        np.frombuffer(payload, "<f4")
        if codec.spec == "fp32"
        else reference.halves_decode(payload, codec.spec == "bf16")
    )


@settings(max_examples=250, deadline=None)
@given(vectors, st.sampled_from(CODECS), st.sampled_from([1.0, 1e-3, 1e-7, 1e-36]), st.sampled_from([0.0, 1.0, -7e4]))
def test_dense_codecs_equal_the_reference(x: np.ndarray, codec: Codec, factor: float, shift: float) -> None:
    x = (x * np.float32(factor)).clip(-3e38, 3e38) + np.float32(shift)
    payload = encode(codec, x)
    assert payload == expected(codec, x) and len(payload) == codec.nbytes(x.size)
    assert decode(codec, payload, x.size).tobytes() == restored(codec, payload, x.size).tobytes()
    assert codec.check(payload, x.size) >= 0.0


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec)
def test_dense_codecs_equal_the_reference_on_many_scales(codec: Codec) -> None:
    for x in (noise(9001), noise(9001, 1) * np.float32(1e-3), np.abs(noise(600, 2)), np.zeros(601, np.float32)):
        payload = encode(codec, x)
        assert payload == expected(codec, x)
        assert decode(codec, payload, x.size).tobytes() == restored(codec, payload, x.size).tobytes()


def test_packed_codes_have_golden_bytes() -> None:
    x = np.arange(-7, 8, dtype=np.float32)
    # Scale 1; codes −7…7 and one zero behind them, in halves of 8: the low halves of the bytes are −7…0, the high ones
    # 1…7, 0.
    assert encode(Int4(16), x).hex() == "003c" + "192a3b4c5d6e7f00"
    # Offset −7, scale 14/15 rounded up: 0x3b78 is 0.93359375.
    assert encode(Int4(16, asymmetric=True), x).hex() == "783b" + "00c7" + "90a1b2c3d4e5f607"
    assert encode(fp16(), x[:2]).hex() == "00c700c6" and encode(bf16(), x[:2]).hex() == "e0c0c0c0"


def test_three_bit_codes_are_packed_in_groups_of_eight() -> None:
    x = np.array([3, -3, 2, -2, 1, -1, 0, 3] + [0] * 8 + [-3], np.float32)
    # Two groups: codes 0, 2, 4 … of the block in one, 1, 3, 5 … in the other; then a separate group for the last value.
    even, odd = (3, 2, 1, 0, 0, 0, 0, 0), (-3, -2, -1, 3, 0, 0, 0, 0)
    words = [sum((code & 7) << 3 * k for k, code in enumerate(codes)) for codes in (even, odd)]
    planes = b"".join(bytes(word >> 8 * k & 255 for word in words) for k in range(3))
    assert encode(Int3(16), x) == bytes.fromhex("003c003c") + planes + (-3 & 7).to_bytes(3, "little")


@pytest.mark.parametrize("codec", [codec for codec in INTEGERS if codec.stochastic], ids=lambda codec: codec.spec)
def test_stochastic_rounding_is_unbiased_and_seeded(codec: Integers) -> None:
    x = np.random.default_rng(5).standard_normal(200).astype(np.float32)
    out, back, total = np.zeros(codec.nbytes(x.size), np.uint8), np.zeros_like(x), np.zeros(x.size)
    seen = set()
    for seed in range(400):
        codec.encode(x, out, seed << 20)
        seen.add(out.tobytes())
        codec.decode(out.data, back)
        total += back
    step = np.repeat(np.frombuffer(out, np.float16, -(-x.size // codec.block)).astype(np.float64), codec.block)[
        : x.size
    ]
    # A step's error has a standard deviation of at most half a step; 400 draws make that a fortieth, and 6 of those are
    # far.
    assert (np.abs(total / 400 - x) < 6 * step / 40).all() and len(seen) > 350
    codec.encode(x, out, 399 << 20)
    codec.decode(out.data, back)
    codec.encode(x, out, 399 << 20)
    assert out.tobytes() in seen


def test_stochastic_rounding_is_independent_across_positions_and_seeds() -> None:
    """Pairs of positions, and of seeds, are as independent as numbers drawn at random."""
    index = np.arange(20_000, dtype=np.uint64)
    draws = [reference.uniform(index, seed) for seed in (0, 1, 1 << 32, 2**64 - 1)]
    for one in draws:
        assert 0 <= one.min() and one.max() < 1 and abs(one.mean() - 0.5) < 0.02 and abs(one.std() - 12**-0.5) < 0.01
        assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.03
    assert np.abs(np.corrcoef(draws) - np.eye(4)).max() < 0.03


def test_fp16_scale_is_the_smallest_that_reaches_the_maximum() -> None:
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
    # Quantization is idempotent, below the range of subnormal scales.
    if ((step == 0) | (step >= 2.0**-14)).all():
        assert encode(codec, back) == payload


def test_blockint_handles_zero_tiny_and_huge_blocks() -> None:
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
def test_dense_codecs_refuse_wrong_lengths(codec: Codec, wrong: int) -> None:
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
def test_dense_codecs_name_non_finite_values(bad: float) -> None:
    x = noise(1000)
    x[777] = bad
    payload = encode(Fp32(), x)
    for act in (
        lambda: Fp32().check(payload, 1000),
        lambda: decode(Fp32(), payload, 1000),
        *(lambda codec=codec: encode(codec, x) for codec in CODECS[1:]),
    ):
        with pytest.raises(CodecError, match="not finite"):
            act()


@pytest.mark.parametrize("scale", [0x7C00, 0x7E01, 0xFC00, 0x8000, 0xB000])
@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_blockint_refuses_invalid_scales(scale: int, bits: int, asymmetric: bool) -> None:
    codec = Integers(bits, 16, asymmetric)
    payload = bytearray(encode(codec, noise(40)))
    payload[2:4] = scale.to_bytes(2, "little")
    with pytest.raises(CodecError, match="scale"):
        codec.check(payload, 40)
    with pytest.raises(CodecError, match="scale"):
        decode(codec, payload, 40)


def honest(payload: bytes, n: int, codec: Integers) -> bool:
    """Return True if the format allows a payload; written independently of the kernels."""
    blocks = -(-n // codec.block)
    scales = np.frombuffer(payload, "<f2", blocks)
    heads = 4 * blocks if codec.asymmetric else 2 * blocks
    if not np.isfinite(scales).all() or np.signbit(scales).any():
        return False
    if codec.asymmetric:
        offsets = np.frombuffer(payload, "<f2", blocks, 2 * blocks)
        if not np.isfinite(offsets).all() or (np.signbit(offsets) & (offsets == 0)).any():
            return False
    whole = len(reference.pack(np.zeros(codec.block, np.int64), codec.bits))
    for b in range(blocks):
        part = payload[heads + b * whole : heads + (b + 1) * whole]
        count = min(codec.block, n - b * codec.block)
        codes = reference.unpack(part, count, codec.bits, not codec.asymmetric)
        if reference.pack(codes, codec.bits) != part or (scales[b] == 0 and codes.any()):
            return False
        if not codec.asymmetric and codes.min() == -(2 ** (codec.bits - 1)):
            return False
    return True


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(INTEGERS), st.integers(1, 60), st.data())
def test_blockint_accepts_exactly_valid_payloads(codec: Integers, n: int, data: st.DataObject) -> None:
    payload = bytearray(encode(codec, noise(n, n)))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.sampled_from([0, 0x80, 0xFF, 0x7C, 0xFC, payload[at] ^ 0x80, payload[at] ^ 0x10]))
    allowed = honest(bytes(payload), n, codec)
    for act in (lambda: codec.check(payload, n), lambda: decode(codec, payload, n)):
        if allowed:
            act()
        else:
            with pytest.raises(CodecError):
                act()


@pytest.mark.parametrize("position", [0, 15, 16, 39])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_blockint_refuses_most_negative_code(position: int, bits: int) -> None:
    codec = Integers(bits, 16)
    codes = np.ones(40, np.int64)
    codes[position] = -(2 ** (bits - 1))
    packed = b"".join(reference.pack(codes[start : start + 16], bits) for start in (0, 16, 32))
    payload = bytes.fromhex("003c") * 3 + packed
    with pytest.raises(CodecError, match="code"):
        codec.check(payload, 40)
    with pytest.raises(CodecError, match="code"):
        decode(codec, payload, 40)


def test_blockint_refuses_codes_under_zero_scale() -> None:
    payload = bytearray(18)
    payload[10] = 5
    with pytest.raises(CodecError, match="code"):
        Int8(16).check(payload, 16)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec)
def test_check_returns_squared_norm_of_decoded_values(codec: Codec) -> None:
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
def test_dense_mean_equals_the_reference(codec: Codec, case: tuple[list[int], int], n: int) -> None:
    weights, seed = case
    payloads = [encode(codec, noise(n, seed + i)) for i in range(len(weights))]
    out = np.full(n, np.nan, np.float32)
    codec.mean(payloads, weights, out)
    rows = [decode(codec, payload, n) for payload in payloads]
    assert out.tobytes() == reference.mean(rows, weights).tobytes()


def test_dense_mean_works_for_one_and_256_peers() -> None:
    codec = Int8()
    payloads = [encode(codec, noise(999, i)) for i in range(256)]
    out = np.zeros(999, np.float32)
    codec.mean(payloads, [1.0] * 256, out)
    assert np.array_equal(out, reference.mean([decode(codec, p, 999) for p in payloads], [1.0] * 256))
    codec.mean(payloads[:1], [12_345.0], out)
    assert np.array_equal(out, decode(codec, payloads[0], 999))


def test_dense_codecs_accept_unaligned_payloads() -> None:
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
def test_dense_mean_raises_for_invalid_weights(weights: list[float]) -> None:
    for codec in CODECS:
        with pytest.raises(ValueError, match="weights"):
            codec.mean([bytes(codec.nbytes(8))] * 2, weights, np.zeros(8, np.float32))


def test_encode_refuses_misshaped_arrays() -> None:
    for codec in CODECS:
        with pytest.raises(ValueError, match="bytes"):
            codec.encode(np.zeros(10, np.float32), np.zeros(3, np.uint8))
        with pytest.raises(ValueError, match="flat float32"):
            codec.encode(np.zeros(10, np.float64), np.zeros(codec.nbytes(10), np.uint8))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="flat float32"):
            codec.encode(np.zeros(20, np.float32)[::2], np.zeros(codec.nbytes(10), np.uint8))
