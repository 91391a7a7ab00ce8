"""The chunk layout of sparse codecs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.compression.core import parameter_chunks
from thinwire.compression.core.parameter_chunks import VECTORS, Chunks

SHAPES = (("a", (130, 70)), ("b", (5,)), ("c", ()), ("d", (0, 3)), ("e", (3, 5, 7)), ("f", (300,)), ("g", (64, 128)))
sizes = st.lists(st.lists(st.integers(0, 90), max_size=3).map(tuple), max_size=5)


def shaped(shapes: list[tuple[int, ...]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((f"t{i}", shape) for i, shape in enumerate(shapes))


def test_chunks_order_matrix_blocks_by_row_and_vectors_last() -> None:
    chunks = Chunks(SHAPES)
    assert [(s.name, s.count) for s in chunks.sections] == [("a", 6), ("e", 1), ("g", 2), (VECTORS, 1)]
    assert chunks.total == 130 * 70 + 5 + 1 + 105 + 300 + 64 * 128 and chunks.count == 10
    flat = np.arange(chunks.total, dtype=np.float32)
    rows = chunks.cut(flat)
    a = flat[: 130 * 70].reshape(130, 70)
    assert np.array_equal(rows[0].reshape(64, 64), a[:64, :64])
    assert np.array_equal(rows[3].reshape(64, 64)[:, :6], a[64:128, 64:])
    assert not rows[3].reshape(64, 64)[:, 6:].any()
    assert np.array_equal(rows[5].reshape(64, 64)[:2, :6], a[128:, 64:])
    assert np.array_equal(rows[6].reshape(64, 64)[:3, :35], flat[9106 : 9106 + 105].reshape(3, 35))
    vector = np.concatenate([flat[9100:9106], flat[9211:9511]])
    assert np.array_equal(rows[9][:306], vector) and not rows[9][306:].any()


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from([256, 1024, 4096]), st.integers(1, 4096))
def test_chunks_round_trip_and_count_kept_entries(shapes: list[tuple[int, ...]], chunk: int, k: int) -> None:
    chunks, k = Chunks(shaped(shapes), chunk), min(k, chunk)
    flat = np.random.default_rng(len(shapes)).standard_normal(chunks.total).astype(np.float32)
    rows = chunks.cut(flat)
    assert rows.shape == (chunks.count, chunk)
    back = np.full(chunks.total, np.nan, np.float32)
    chunks.join(rows, back)
    assert back.tobytes() == flat.tobytes()
    real = [int(x) for section in chunks.sections for x in section.real]
    assert real == [int(x) for x in np.count_nonzero(chunks.cut(np.ones(chunks.total, np.float32)), axis=1)]
    keep = [int(x) for section in chunks.sections for x in section.keep(k)]
    assert keep == [max(1, round(k * m / chunk)) for m in real]
    for section in chunks.sections:
        geometry = section.geometry(k)
        assert list(geometry[:6]) == [
            section.rows,
            section.cols,
            section.tail,
            section.side,
            section.down,
            section.across,
        ]
        keep = section.keep(k).reshape(section.down, section.across)
        right, bottom = section.across > 1, section.down > 1
        if right and bottom:
            assert geometry[6] == keep[0, 0]
        assert not bottom or geometry[7] == keep[0, -1]
        assert not right or geometry[8] == keep[-1, 0]
        assert geometry[9] == keep[-1, -1] and section.kept(k) == keep.sum()


def test_chunks_digest_depends_on_names_shapes_and_chunk_size() -> None:
    layouts = [
        Chunks(SHAPES),
        Chunks(SHAPES, 1024),
        Chunks(SHAPES[:-1]),
        Chunks((*SHAPES[:-1], ("g", (128, 64)))),
        Chunks((*SHAPES[:-1], ("h", (64, 128)))),
    ]
    assert len({layout.digest for layout in layouts}) == len(set(layouts)) == 5
    assert Chunks(SHAPES) == layouts[0] and len(layouts[0].digest) == 32
    # Another layout, or none, would part swarms: frozen.
    assert layouts[0].digest.hex()[:16] == "4b4280f3a1b2a435"


def test_invalid_layouts_are_refused() -> None:
    for shapes, chunk in (
        ((("b", (3,)), ("a", (3,))), 4096),
        ((("a", (3,)), ("a", (3,))), 4096),
        ((("a", (-3, 3)),), 4096),
        (SHAPES, 4095),
        (SHAPES, 64),
        (SHAPES, -1),
        ((("a", (1 << 20, 1 << 12)),), 4096),
    ):
        with pytest.raises(ValueError):
            Chunks(shapes, chunk)
    chunks = Chunks(SHAPES)
    for bad in (np.zeros(3, np.float32), np.zeros(chunks.total), np.zeros(2 * chunks.total, np.float32)[::2]):
        with pytest.raises(ValueError):
            chunks.cut(bad)
    with pytest.raises(ValueError):
        chunks.join(np.zeros((1, 4096), np.float32), np.zeros(chunks.total, np.float32))


@pytest.mark.parametrize("strip", [1, 3000, 9000])
@pytest.mark.parametrize("chunk", [256, 4096])
def test_strips_have_the_chunks_and_elements_of_their_section(
    strip: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_chunks, "STRIP", strip)
    chunks = Chunks((*SHAPES, ("h", (700,))), chunk)
    flat = np.arange(chunks.total, dtype=np.float32)
    for section in chunks.sections:
        strips = section.strips()
        assert sum(one.down for one in strips) == section.down and {one.across for one in strips} == {section.across}
        assert np.concatenate([one.gather(flat) for one in strips]).tolist() == section.gather(flat).tolist()
        for k in (1, 30, chunk):
            assert np.concatenate([one.keep(k) for one in strips]).tolist() == section.keep(k).tolist()
            assert sum(one.kept(k) for one in strips) == section.kept(k)
        most = max(strip, section.side * section.cols)
        assert all(one.size <= most for one in strips)
    assert chunk == 4096 or len(chunks.sections[0].strips()) > 1
