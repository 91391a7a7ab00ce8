import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.reference import activations as reference
from thinwire.compression import registry
from thinwire.compression.activations import codecs
from thinwire.compression.activations.codecs import Rows, Tah
from thinwire.compression.core.codec import CodecError
from thinwire.compression.dense.blockint import Integers


def outliers(rows: int = 256, cols: int = 1024) -> np.ndarray:
    """Gaussian, with every 128th column or so thirty times as large."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    x[:, np.arange(0, cols, 128) + rng.integers(0, min(cols, 128), -(-cols // 128))] *= 30
    return x


def through(codec: Rows | Tah, x: np.ndarray) -> np.ndarray:
    payload = np.empty(codec.nbytes(*x.shape), np.uint8)
    codec.encode(x, payload)
    out = np.empty_like(x)
    codec.decode(payload.tobytes(), out)
    return out


def error(codec: Rows | Tah, x: np.ndarray) -> float:
    return float(np.linalg.norm(through(codec, x) - x) / np.linalg.norm(x))


def test_outlier_columns_hurt_rows_codec_more_than_tah() -> None:
    x = outliers()
    figures = {codec.spec: error(codec, x) for codec in (Tah(), Rows(4), Rows(8))}
    assert figures["tah"] < 0.06 and figures["rows(bits=8)"] < 0.06 and figures["rows(bits=4)"] > 0.3
    plain = np.empty(x.size, np.float32)
    integers = Integers(4, 64, asymmetric=True)
    payload = np.empty(integers.nbytes(x.size), np.uint8)
    integers.encode(x.reshape(-1), payload)
    integers.decode(payload.data, plain)
    assert np.linalg.norm(plain - x.reshape(-1)) / np.linalg.norm(x) > 1.3 * figures["tah"]
    assert Tah().nbytes(*x.shape) * 8 == 4.625 * x.size
    assert Rows(8).nbytes(*x.shape) * 8 == (8 + 16 / 1024) * x.size


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.0, 1.0, 4.0]), ties=st.booleans())
def test_kernel_and_torch_rotation_are_equal_bit_for_bit(seed: int, spread: float, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((9, 64)) * np.exp(spread * rng.standard_normal((9, 64)))).astype(np.float32)
    if ties:
        x = np.rint(x)
        x[0] = 0
    out, marks = np.empty(x.size, np.float32), np.empty(9, np.uint8)
    codecs.transform(x.reshape(-1), out, marks)
    turned, expected = reference.transform_torch(torch.from_numpy(x))
    assert marks.tolist() == expected.tolist()
    assert out.tobytes() == turned.numpy().tobytes()
    back = reference.transform_back_torch(turned, expected).numpy()
    codecs.transform_back(out, marks)
    assert out.tobytes() == back.tobytes()
    assert np.abs(back - x).max() <= 1e-6 * np.abs(x).max()


def test_tah_transform_is_orthonormal_and_its_own_inverse() -> None:
    h = reference.hadamard_torch(torch.eye(64))
    assert (h @ h == torch.eye(64)).all() and (h == h.T).all() and (h.abs() == 0.125).all()


@pytest.mark.parametrize("shape", [(1, 16), (3, 24), (5, 40), (2, 64), (7, 136), (0, 16)])
def test_activation_codecs_round_trip_every_shape(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    for codec, limit in ((Rows(8), 0.02), (Rows(4), 0.2), (Tah(), 0.2)):
        assert registry.parse(codec.spec) == codec
        assert x.size == 0 or error(codec, x) < limit
        payload = np.empty(codec.nbytes(*shape), np.uint8)
        codec.encode(x, payload)
        for wrong in (payload[1:], np.append(payload, 0)):
            if wrong.size != payload.size:
                with pytest.raises(CodecError):
                    codec.decode(wrong.astype(np.uint8).tobytes(), np.empty_like(x))


def test_activation_codecs_refuse_invalid_headers() -> None:
    x, codec = outliers(1, 128), Tah()
    payload = np.empty(codec.nbytes(1, 128), np.uint8)
    codec.encode(x, payload)
    for mark in (1, 0x3F, 0x40, 0xC0, 0xFF):
        bad = payload.copy()
        bad[0] = mark
        with pytest.raises(CodecError, match="mark"):
            codec.decode(bad.tobytes(), np.empty_like(x))


def test_activation_codecs_refuse_non_finite_and_misshaped_input() -> None:
    for codec in (Rows(8), Rows(4), Tah()):
        for bad in (np.nan, np.inf):
            x = outliers(2, 64)
            x[1, 5] = bad
            with pytest.raises(CodecError, match="finite"):
                codec.encode(x, np.empty(codec.nbytes(2, 64), np.uint8))
        for wrong in (np.zeros(64, np.float32), np.zeros((2, 64)), np.zeros((64, 2), np.float32).T):
            with pytest.raises(ValueError):
                codec.encode(wrong, np.empty(codec.nbytes(2, 64), np.uint8))
    with pytest.raises(ValueError, match="8 or 4"):
        Rows(5)
