import json
import weakref
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load, save
from thinwire.node.state.tensor_file import TensorFileError, parse, pieces


def written(tensors, size=64):
    return b"".join(bytes(piece) for piece in pieces(tensors, size))


def with_header(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
arrays = st.sampled_from([np.float32, np.float64, np.int64, np.int32, np.uint8, np.bool_]).flatmap(
    lambda dtype: hnp.arrays(dtype, shapes, elements=None if np.dtype(dtype).kind != "f" else {"allow_nan": False})
)


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480, 0x0580, 0x4B50])
def test_header_whose_length_looks_like_a_pickle_is_read(length):
    """The file begins with the length of its header, and some lengths are the first bytes of a pickle."""
    bare = len(written({"": np.zeros(1, np.float32)})) - 8 - 4
    data = written({"x" * (length - bare): np.zeros(1, np.float32)})
    assert int.from_bytes(data[:8], "little") == length
    assert list(parse(data)) == ["x" * (length - bare)]


@pytest.mark.parametrize(
    "header", [{"w": {**ENTRY, "dtype": []}}, {"w": []}, b'{"w":' + b"1" * 5000 + b"}", b"[" * 5000, b'{"\\ud800":1}']
)
def test_odd_header_is_refused(header):
    with pytest.raises(TensorFileError):
        parse(with_header(header, bytes(4)))


@pytest.mark.trial
@given(st.dictionaries(st.text(min_size=1, max_size=8).filter("__metadata__".__ne__), arrays, max_size=5))
@settings(max_examples=60, deadline=None)
def test_tensor_file_round_trips_and_safetensors_agrees(tensors):
    tensors = {name: np.nan_to_num(t) if t.dtype.kind == "f" else t for name, t in tensors.items()}
    tensors = {n: np.clip(t, -1e30, 1e30) if t.dtype.kind == "f" else t for n, t in tensors.items()}
    data = written(tensors, size=5)
    for read in (parse(data), load(data), parse(save({n: np.ascontiguousarray(t) for n, t in tensors.items()}))):
        assert read.keys() == tensors.keys()
    for name, tensor in parse(data).items():
        assert tensor.dtype == tensors[name].dtype and tensor.shape == tensors[name].shape
        assert np.array_equal(tensor, tensors[name])


def test_tensor_file_pieces_are_views_of_bounded_size():
    weight = np.arange(1000, dtype=np.float32).reshape(10, 100)
    header, *rest = pieces({"w": weight}, 512)
    assert [len(piece) for piece in rest] == [512] * 7 + [416]
    assert all(np.shares_memory(np.frombuffer(piece, np.uint8), weight) for piece in rest)
    assert (8 + int.from_bytes(header[:8], "little")) % 8 == 0


def test_strided_tensor_is_written_in_logical_order():
    weight = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert np.array_equal(parse(written({"w": weight}))["w"], weight)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_tensor_file_refuses_non_finite_on_read_and_write(bad):
    tensor = np.array([1.0, bad], np.float32)
    with pytest.raises(TensorFileError, match="w: not all values are finite"):
        written({"w": tensor})
    with pytest.raises(TensorFileError, match="finite"):
        parse(save({"w": tensor}))


def test_tensor_file_checks_before_the_first_piece():
    stream = pieces({"a": np.zeros(3, np.float32), "z": np.array([np.nan], np.float32)}, 64)
    with pytest.raises(TensorFileError):
        next(stream)


def test_tensor_file_refuses_other_element_types():
    with pytest.raises(TensorFileError, match="float16"):
        written({"w": np.zeros(2, np.float16)})
    with pytest.raises(TensorFileError, match="element type"):
        parse(save({"w": np.zeros(2, np.float16)}))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cut short"),
        (b"\x10\0\0\0\0\0\0\0{}", "cut short"),
        (b"\xff" * 16, "cut short"),
        (b"PK\x03\x04" + b"\0" * 60, "pickle"),
        (b"\x80\x04\x95" + b"\0" * 60, "pickle"),
        (b"\x80\x02}q" + b"\0" * 60, "pickle"),
        (with_header(b"nonsense"), "not JSON"),
        (with_header(b"\xff\xff"), "not JSON"),
        (with_header(b"[" * 5000 + b"]" * 5000), "not JSON"),
        (with_header([1]), "not an object"),
        (with_header({"w": [1]}), "element type"),
        (with_header(b'{"w": %b, "w": %b}' % ((json.dumps(ENTRY).encode(),) * 2), b"\0" * 4), "key 'w' twice"),
        (
            with_header(b'{"w":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}', b"\0" * 4),
            "key 'shape' twice",
        ),
        (with_header({"w": ENTRY}, b"\0" * 3), "not a valid"),
        (with_header({"w": ENTRY}, b"\0" * 5), "not a valid"),
        (with_header({"w": {**ENTRY, "shape": [2]}}, b"\0" * 4), "not a valid"),
        (with_header({"w": {**ENTRY, "shape": [-1]}}, b"\0" * 4), "not a valid"),
        (with_header({"w": {**ENTRY, "data_offsets": [0, 2**60]}}, b"\0" * 4), "not a valid"),
    ],
)
def test_foreign_tensor_file_is_refused_with_reason(data, reason):
    with pytest.raises(TensorFileError, match=reason):
        parse(data)


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_garbage_tensor_file_is_a_named_error(data):
    try:
        parse(data)
    except TensorFileError:
        pass


class Remote(Mapping):
    """Arrays that are made when they are read; counts how many there are at once."""

    def __init__(self):
        self.alive = self.most = 0

    def __getitem__(self, name):
        array = np.full(100, int(name), np.float32)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(array, self.forget)
        return array

    def forget(self):
        self.alive -= 1

    def __iter__(self):
        return iter("0123456789")

    def __len__(self):
        return 10


def test_tensors_are_fetched_and_written_one_at_a_time():
    remote = Remote()
    assert load(written(remote))["7"].tolist() == [7.0] * 100
    assert remote.most <= 2, "the next one may be made before the last one is forgotten"
