"""The top-k codec: kernels against the reference, wire format, design figures, refused payloads."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.reference import sparse as reference
from thinwire.compression import compile_kernels, device
from thinwire.compression.core import parameter_chunks
from thinwire.compression.core.codec import CodecError
from thinwire.compression.core.parameter_chunks import VECTORS, Chunks, Section
from thinwire.compression.kernels import bitstream, scatter, topk
from thinwire.compression.kernels import threads as parallel
from thinwire.compression.sparse import index_coding as entropy
from thinwire.compression.sparse import mean, select
from thinwire.compression.sparse import topk as sparse
from thinwire.compression.sparse.header import DENSE, EMPTY, RICE
from thinwire.compression.sparse.topk import Part, Selected, Sparse

SHAPES = (("a", (130, 70)), ("b", (5,)), ("c", ()), ("d", (0, 3)), ("e", (1, 1)), ("f", (3, 5, 7)), ("h", (300,)))
KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "gaussian": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "t3": lambda rng, n: rng.standard_t(3, n),
    "ties": lambda rng, n: rng.integers(-2, 3, n),
    "mostly zeros": lambda rng, n: (rng.integers(0, 300, n) == 0) * rng.standard_normal(n),
    "zeros": lambda rng, n: np.zeros(n),
    "equal": lambda rng, n: np.full(n, -3e-5),
    "many scales": lambda rng, n: rng.standard_normal(n) * 10.0 ** rng.uniform(-44, 30, n),
    "too small": lambda rng, n: rng.standard_normal(n) * 1e-20,
    "too large": lambda rng, n: rng.standard_normal(n) * 1e30,
}


def draw(kind: str, n: int, seed: int = 0) -> np.ndarray:
    return KINDS[kind](np.random.default_rng(seed), n).astype(np.float32)


def reference_payload(codec: Sparse, a: np.ndarray, chunks: Chunks) -> bytes:
    return b"".join(
        reference.payload(section, section.gather(a), codec.k, codec.width, codec.indices == "rice")
        for section in chunks.sections
    )


codecs = st.builds(
    lambda chunk, k, values, indices: Sparse(min(k, chunk), chunk, values, indices),
    st.sampled_from([256, 1024, 4096]),
    st.sampled_from([1, 3, 16, 64, 250, 256, 1500, 4096]),
    st.sampled_from(["2bit", "1bit"]),
    st.sampled_from(["rice", "fixed"]),
)
layouts = st.lists(st.lists(st.integers(0, 100), max_size=3).map(tuple), max_size=4)


@settings(max_examples=150, deadline=None)
@given(codecs, layouts, st.sampled_from(sorted(KINDS)), st.integers(0, 9))
def test_topk_equals_the_reference_and_round_trips(codec: Sparse, shapes: list, kind: str, seed: int) -> None:
    chunks = Chunks(
        tuple((f"t{i}", shape) for i, shape in enumerate(shapes) if np.prod(shape, dtype=int) < 30_000), codec.chunk
    )
    a = draw(kind, chunks.total, seed)
    selected = codec.select(a, chunks)
    payload = codec.encode(selected)
    assert payload == reference_payload(codec, a, chunks)
    assert len(payload) == codec.nbytes(selected) <= codec.bound(chunks)
    for buffer in (payload, bytearray(payload), memoryview(payload)):
        decoded = codec.decode(buffer, chunks)
    assert codec.encode(decoded) == payload
    out, back = a.copy(), a.copy()
    selected.scatter(out, -0.7)
    decoded.scatter(back, -0.7, threads=2)
    assert out.tobytes() == back.tobytes()
    for section, part in zip(chunks.sections, decoded.parts, strict=True):
        if part.mode in (DENSE, EMPTY):
            continue
        expected = reference.scatter(section, part.indices, decoded.values(part), codec.k, section.gather(a), -0.7)
        assert section.gather(back).tobytes() == expected.tobytes()
        if part.mode == RICE:
            gaps = reference.gaps(section, part.indices, codec.k)
            streams = reference.unary(gaps >> part.rice) + reference.pack(gaps, part.rice)
            assert np.array_equal(reference.read(section, streams, part.rice, part.unary_bits, codec.k), part.indices)


@pytest.mark.parametrize("k", [1, 16, 64, 500])
@pytest.mark.parametrize("chunk", [256, 4096])
def test_topk_follows_chunks_of_changing_scales(k: int, chunk: int) -> None:
    # The search for a threshold begins at that of the chunk before, so every kind must follow every other.
    chunks, rng = Chunks((("m", (64 * len(KINDS) + 5, 64 * len(KINDS) + 9)),), chunk), np.random.default_rng(3)
    tiles = np.empty((64 * len(KINDS) + 5, 64 * len(KINDS) + 9), np.float32)
    for i in range(0, tiles.shape[0], 64):
        for j in range(0, tiles.shape[1], 64):
            tile = tiles[i : i + 64, j : j + 64]
            tile[:] = draw(sorted(KINDS)[rng.integers(len(KINDS))], tile.size, i + j).reshape(tile.shape)
    codec = Sparse(min(k, chunk - 1), chunk)
    assert codec.encode(codec.select(tiles.reshape(-1), chunks)) == reference_payload(codec, tiles.reshape(-1), chunks)


@pytest.mark.parametrize("values", ["2bit", "1bit"])
@pytest.mark.parametrize("indices", ["rice", "fixed"])
def test_topk_bytes_do_not_depend_on_threads(values: str, indices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "BIG", 5000)
    monkeypatch.setattr(mean, "BIG", 5000)
    monkeypatch.setattr(select, "CHUNKS", 1)
    for module in (select, entropy):
        monkeypatch.setattr(module, "MANY", 8)
    monkeypatch.setattr(entropy, "ENTRIES", 8)
    for k in (1, 7, 64):
        codec = Sparse(k, 4096, values, indices)
        chunks = Chunks((*SHAPES, ("z", (500, 130))))
        a = draw("t3", chunks.total)
        expected = reference_payload(codec, a, chunks)
        for threads in (1, 2, 3, 5):
            selected = codec.select(a, chunks, threads)
            assert codec.encode(selected, threads) == expected
            out, alone = a.copy(), a.copy()
            codec.decode(expected, chunks, threads=threads).scatter(out, threads=threads)
            selected.scatter(alone)
            assert out.tobytes() == alone.tobytes()


@pytest.mark.parametrize(
    "codec", [Sparse(), Sparse(30, 256, "1bit", "fixed"), Sparse(4096)], ids=lambda codec: codec.spec
)
def test_topk_selects_the_same_strip_by_strip(codec: Sparse, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = Chunks((*SHAPES, ("z", (700, 192))), codec.chunk)
    a = draw("t3", chunks.total, 5)
    whole = codec.encode(codec.select(a, chunks))
    for strip in (1, 1 << 15):
        monkeypatch.setattr(parameter_chunks, "STRIP", strip)
        assert len(chunks.sections[-2].strips()) > 1
        assert codec.encode(codec.select(a, chunks)) == whole
        assert codec.encode(device.select(codec, partial(Section.gather, flat=a), chunks, device.HOST)) == whole


def test_topk_thread_ranges_cover_everything_once() -> None:
    for threads in (1, 2, 7):
        with parallel.Team(threads) as team:
            for count in (0, 1, 9, 1000):
                cuts = team.ranges(count, 10, 8)
                assert [x for a, b in cuts for x in range(a, b)] == list(range(count))
                assert all(a % 8 == 0 for a, _ in cuts) and len(cuts) <= threads
    with pytest.raises(ValueError):
        parallel.Team(0)


def test_topk_writes_golden_bytes() -> None:
    chunks = Chunks((("m", (16, 16)), ("v", (1,))), 256)
    a = np.zeros(257, np.float32)
    a[[3, 40, 41, 255, 256]] = [1.0, -4.0, 1.5, -4.0, 0.5]
    a[7] = 0.25
    payload = Sparse(4, 256).encode(Sparse(4, 256).select(a, chunks))
    # Levels 1.25 and 4, codes +lo −hi +lo −hi. Gaps 3, 36, 0, 213: b = 5 and b = 6 make 31 bits, the others more, so it
    # is 5: 0, 10, 0, 1111110 from the right, and 3, 4, 0, 21 in five bits each. The vector's only element is selected:
    # dense.
    unary = (0b10 | 0b111111 << 4).to_bytes(2, "little")
    low = 3 | 4 << 5 | 0 << 10 | 21 << 15
    head = struct.pack("<BBHHI", 1, 5, 0x3D00, 0x4400, 11)
    matrix = head + unary + low.to_bytes(3, "little") + bytes([0b01100110])
    assert payload.hex() == (matrix + struct.pack("<BBHHIH", 2, 0, 0, 0, 0, 0x3800)).hex()
    fixed = Sparse(4, 256, "1bit", "fixed")
    places = (3 | 40 << 12 | 41 << 24 | 255 << 36).to_bytes(6, "little")
    # 2.625 = (1 + 4 + 1.5 + 4) / 4.
    matrix = struct.pack("<BBHHI", 0, 0, 0x4140, 0x4140, 0) + places + bytes([0b0101])
    assert fixed.encode(fixed.select(a, chunks))[: len(matrix)].hex() == matrix.hex()


@pytest.mark.parametrize(("k", "bits"), [(16, 0.0447), (32, 0.0819), (64, 0.1485), (128, 0.266)])
def test_topk_bits_per_parameter_and_error_match_design(k: int, bits: float) -> None:
    chunks = Chunks((("w", (1024, 512)),))
    a = draw("gaussian", chunks.total)
    size = len(Sparse(k).encode(Sparse(k).select(a, chunks))) * 8 / chunks.total
    assert size == pytest.approx(bits, rel=0.01)
    fixed = Sparse(k, indices="fixed")
    assert len(fixed.encode(fixed.select(a, chunks))) * 8 / chunks.total == pytest.approx(14 * k / 4096, rel=0.004)
    if k == 64:
        assert size <= 0.1490
        single = Sparse(k, values="1bit")
        assert len(single.encode(single.select(a, chunks))) * 8 / chunks.total == pytest.approx(0.133, rel=0.01)


def best_two_levels(values: np.ndarray) -> float:
    """Return the least relative squared error of any two levels of magnitude."""
    m = np.sort(np.abs(values).astype(np.float64))
    sums, i = np.cumsum(m), np.arange(1, m.size)
    explained = sums[:-1] ** 2 / i + (sums[-1] - sums[:-1]) ** 2 / (m.size - i)
    return 1 - float(explained.max() / (m**2).sum())


@pytest.mark.parametrize(
    ("kind", "side", "most"),
    [("gaussian", 1024, 0.0045), ("laplace", 1024, 0.014), ("t3", 256, 0.115), ("t3", 1024, 0.2)],
)
def test_topk_quantization_error_matches_design(kind: str, side: int, most: float) -> None:
    # For t3 the square of the largest value decides: with it both the error and the best possible one grow with the
    # sample, to .134.
    chunks, errors, ratios = Chunks((("w", (side, side)),)), [], []
    for seed in range(15 if side < 1024 else 2):
        a, out = draw(kind, chunks.total, seed), np.zeros(chunks.total, np.float32)
        Sparse().select(a, chunks).scatter(out)
        kept = out != 0
        assert np.count_nonzero(kept) == 64 * chunks.count
        errors.append(float(np.sum((a - out)[kept].astype(np.float64) ** 2) / np.sum(a[kept].astype(np.float64) ** 2)))
        ratios.append(errors[-1] / best_two_levels(a[kept]))
    assert most / 3 < np.median(errors) <= most
    assert 1 - 1e-3 <= min(ratios) and np.median(ratios) < 1.1


def test_topk_ties_take_lower_index_and_skip_padding() -> None:
    chunks = Chunks((("m", (70, 65)),))
    for a in (np.full(chunks.total, -2.0, np.float32), np.zeros(chunks.total, np.float32)):
        a[69 * 65 + 64] = 5.0
        (part,) = Sparse(64).select(a, chunks).parts
        # Chunks of 64×64, 64×1, 6×64 and 6×1 elements select 64, 1, 6 and 1.
        assert part.indices.tolist() == [*range(64), 0, *range(6), 5 * 64]


def test_topk_empty_payload_is_a_header() -> None:
    chunks = Chunks(SHAPES)
    codec = Sparse()
    a = np.zeros(chunks.total, np.float32)
    payload = codec.encode(codec.select(a, chunks))
    assert payload == struct.pack("<BBHHI", EMPTY, 0, 0, 0, 0) * 4
    out = draw("gaussian", chunks.total)
    before = out.copy()
    codec.decode(payload, chunks).scatter(out)
    assert out.tobytes() == before.tobytes()
    assert Sparse().encode(Sparse().select(np.zeros(0, np.float32), Chunks(()))) == b""
    assert Sparse().decode(b"", Chunks((("d", (0, 3)),))).parts == ()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_topk_refuses_non_finite_values_anywhere(bad: float) -> None:
    chunks = Chunks(SHAPES)
    for at, name in ((0, "a"), (130 * 70 - 1, "a"), (9103, VECTORS), (9106, "e"), (chunks.total - 1, VECTORS)):
        a = draw("gaussian", chunks.total)
        a[at] = bad
        with pytest.raises(CodecError, match=f"^{name.replace('(', '.').replace(')', '.')}: ") as caught:
            Sparse().select(a, chunks)
        assert caught.value.reason == "not finite"


def test_topk_refuses_invalid_parameters_and_misshaped_arrays() -> None:
    for wrong in ({"k": 0}, {"k": 300, "chunk": 256}, {"chunk": 100}, {"values": "3bit"}, {"indices": "gap"}):
        with pytest.raises(ValueError, match="topk"):
            Sparse(**wrong)
    chunks = Chunks(SHAPES)
    a = draw("gaussian", chunks.total)
    for call in (
        lambda: Sparse().select(a[:-1], chunks),
        lambda: Sparse().select(a.astype(np.float64), chunks),
        lambda: Sparse(8, 256).select(a, chunks),
        lambda: Sparse(8, 256).decode(b"", chunks),
        lambda: Sparse(8, 256).bound(chunks),
        lambda: Sparse().select(a, chunks).scatter(a[1:]),
    ):
        with pytest.raises(ValueError):
            call()


def header(payload: bytes, at: int = 0, **fields: int) -> bytes:
    names = ("mode", "rice", "lo", "hi", "unary_bits")
    values = dict(zip(names, struct.unpack_from("<BBHHI", payload, at), strict=True)) | fields
    return payload[:at] + struct.pack("<BBHHI", *values.values()) + payload[at + 10 :]


def flipped(payload: bytes, at: int, bits: int) -> bytes:
    return payload[:at] + bytes([payload[at] ^ bits]) + payload[at + 1 :]


@pytest.mark.parametrize(("values", "indices"), [("2bit", "rice"), ("1bit", "fixed")])
def test_topk_refuses_invalid_payloads(values: str, indices: str) -> None:
    chunks = Chunks((("m", (70, 65)),))
    codec = Sparse(61, 4096, values, indices)
    payload = codec.encode(codec.select(draw("gaussian", chunks.total), chunks))
    codec.decode(payload, chunks)
    wrong = {
        "length": [payload[:-1], payload + b"\0", payload[:9], b"", payload[:30]],
        "not finite": [header(payload, hi=0x7C00, lo=0x7C00), header(payload, hi=0xBC00), header(payload, lo=0x8000)],
        "encoding": [
            header(payload, lo=0x7BFF),
            header(payload, lo=0, hi=0),
            header(payload, mode=2),
            header(payload, mode=3),
            header(payload, mode=4),
            header(payload, mode=1 - payload[0]),
            header(payload, rice=2),
            header(payload, rice=9),
            flipped(payload, len(payload) - 1, 0x80),
        ],
    }
    if indices == "fixed":
        wrong["encoding"] += [header(payload, rice=5), header(payload, unary_bits=1), header(payload, lo=0)]
        # The first index of the first chunk beyond the second; and one in the padding of the second, which is 64×1.
        wrong["encoding"] += [flipped(payload, 11, 0x0F), flipped(payload, 10 + 61 * 3 // 2, 0x10)]
    else:
        wrong["encoding"] += [header(payload, unary_bits=b) for b in (0, 68)]
    for reason, payloads in wrong.items():
        for i, each in enumerate(payloads):
            with pytest.raises(CodecError) as caught:
                codec.decode(each, chunks)
            assert caught.value.reason == reason, (reason, i)
            assert "payload of" in str(caught.value) or str(caught.value).startswith("m: ")
    with pytest.raises(CodecError) as caught:
        codec.decode(payload, chunks, cap=1e-3)
    assert caught.value.reason == "bound"


def test_topk_refuses_other_rice_parameter() -> None:
    chunks = Chunks((("m", (128, 128)),))
    codec = Sparse(64)
    selected = codec.select(draw("gaussian", chunks.total), chunks)
    (part,) = selected.parts
    gaps = reference.gaps(chunks.sections[0], part.indices, 64)
    for rice in range(3, 9):
        bits = gaps.size + int((gaps >> rice).sum())
        other = Selected(codec, chunks, (Part(RICE, rice, part.lo, part.hi, bits, part.indices, part.codes),))
        payload = codec.encode(other)
        if rice == part.rice:
            codec.decode(payload, chunks)
        else:
            with pytest.raises(CodecError, match="m: another Rice parameter"):
                codec.decode(payload, chunks)


def test_topk_dense_section_must_be_finite_and_not_all_zero() -> None:
    chunks = Chunks((("v", (1,)),))
    head = struct.pack("<BBHHI", DENSE, 0, 0, 0, 0)
    assert Sparse().encode(Sparse().decode(head + b"\x01\x80", chunks)) == head + b"\x01\x80"
    for half, reason in ((0x7C00, "not finite"), (0xFE00, "not finite"), (0, "encoding"), (0x8000, "encoding")):
        with pytest.raises(CodecError) as caught:
            Sparse().decode(head + struct.pack("<H", half), chunks)
        assert caught.value.reason == reason
    with pytest.raises(CodecError):
        Sparse().decode(struct.pack("<BBHHI", RICE, 3, 1, 1, 1) + bytes(3), chunks)


@settings(max_examples=400, deadline=None)
@given(codecs, st.sampled_from(["gaussian", "mostly zeros", "ties"]), st.data())
def test_topk_mutated_payload_is_refused_or_valid(codec: Sparse, kind: str, data: st.DataObject) -> None:
    chunks = Chunks((("m", (20, 70)), ("n", (1,)), ("o", (90,)), ("p", (40, 40))), codec.chunk)
    payload = bytearray(codec.encode(codec.select(draw(kind, chunks.total), chunks)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(payload) - 1) | st.integers(0, min(20, len(payload) - 1)))
        payload[at] = data.draw(st.integers(0, 255))
    try:
        decoded = codec.decode(payload, chunks)
    except CodecError:
        return
    assert codec.encode(decoded) == payload
    for section, part in zip(chunks.sections, decoded.parts, strict=True):
        if part.indices.size:
            where = reference.positions(section, part.indices, codec.k)
            assert np.unique(where).size == section.kept(codec.k) and where.max() < section.size


def test_topk_decoder_does_not_allocate_for_missing_data() -> None:
    chunks = Chunks((("big", (60_000, 60_000)), ("small", (64, 64))))
    codec = Sparse()
    head = struct.pack("<BBHHI", RICE, 5, 0x3C00, 0x4000, 0xFFFFFFFF)
    empty = struct.pack("<BBHHI", EMPTY, 0, 0, 0, 0)
    tracemalloc.start()
    try:
        for payload in (head, head + bytes(100_000), empty + head + bytes(1000)):
            with pytest.raises(CodecError):
                codec.decode(payload, chunks)
        assert codec.decode(empty * 2, chunks).parts[0].mode == EMPTY
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_topk_warm_up_compiles_every_kernel() -> None:
    compile_kernels.warm_up(Sparse().spec, Sparse(values="1bit", indices="fixed").spec)
    kernels = [
        value
        for module in (topk, bitstream, scatter)
        for value in vars(module).values()
        if hasattr(value, "nopython_signatures") and value.py_func.__module__ == module.__name__
    ]
    before = {kernel.py_func.__name__: len(kernel.nopython_signatures) for kernel in kernels}
    assert before["topk"] == before["read_rice"] == 1
    chunks = Chunks(SHAPES)
    for codec in (Sparse(), Sparse(values="1bit", indices="fixed"), Sparse(4096)):
        for writeable in (True, False):
            a = draw("t3", chunks.total)
            a.flags.writeable = writeable
            payload = codec.encode(codec.select(a, chunks, threads=2), threads=2)
            for buffer in (payload, bytearray(payload), memoryview(payload)):
                selected = codec.decode(buffer, chunks)
            selected.scatter(draw("t3", chunks.total), threads=2)
            mean.mean([selected, selected], [1, 2], chunks)
    assert {kernel.py_func.__name__: len(kernel.nopython_signatures) for kernel in kernels} == before
