"""Partitioning of a model into fragments."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thinwire.node.state.fragments import parts_of, shares, stages_of
from thinwire.node.state.layout import Layout, Piece, layout_of
from thinwire.node.training.models.transformer import ModelConfig, Transformer
from thinwire.swarm.manifest.manifest import ManifestError


def layout(*pieces):
    made, at = [], 0
    for name, size in sorted(pieces):
        made.append(Piece(name, (size,), "float32", at, at + size))
        at += size
    return Layout(tuple(made), at, bytes(32))


def names(found, part):
    return {p.name for p in found.pieces if any(a <= p.start and p.stop <= b for a, b in part.spans)}


def test_layers_are_assigned_to_fragments_in_turn():
    found = layout_of(Transformer(ModelConfig(256, layers=5, width=16, heads=2, context=8), 0))
    parts = parts_of(found, 3)
    layers = [{name.split(".")[1] for name in names(found, part) if name.startswith("blocks.")} for part in parts]
    assert layers == [{"0", "3"}, {"1", "4"}, {"2"}]
    rest = [{name for name in names(found, part) if not name.startswith("blocks.")} for part in parts]
    assert rest[0] == rest[1] == set() and "embedding.weight" in rest[2]
    assert sum(part.size for part in parts) == found.total


def test_layers_are_ordered_numerically_and_by_tower():
    found = layout(*[(f"a.{i}.w", 2) for i in range(11)], ("b.x.0.w", 3), ("b.x.1.w", 3))
    parts = parts_of(found, 13)
    assert [names(found, part) for part in parts] == [
        *[{f"a.{i}.w"} for i in range(11)],
        {"b.x.0.w"},
        {"b.x.1.w"},
    ]
    assert len(parts_of(found, 1)[0].spans) == 1


def test_model_with_few_layers_is_cut_evenly():
    parts = parts_of(layout(("net.0.w", 100), ("head", 3)), 4)
    assert [part.spans for part in parts] == [((0, 25),), ((25, 51),), ((51, 77),), ((77, 103),)]
    with pytest.raises(ManifestError, match="outer.fragments is 4, the model has 3 parameters"):
        parts_of(layout(("w", 3)), 4)


@given(
    st.lists(st.tuples(st.sampled_from(["l.0", "l.1", "l.2", "l.3", "x"]), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.data(),
)
def test_each_element_is_in_one_fragment(pieces, count, data):
    found = layout(*((f"{name}.{index}w", size) for index, (name, size) in enumerate(pieces)))
    if found.total < count:
        return
    parts, vector = parts_of(found, count), np.arange(found.total, dtype=np.float32)
    assert sorted(np.concatenate([part.take(vector) for part in parts])) == list(vector)
    for part in parts:
        own = part.take(vector)
        start = data.draw(st.integers(0, part.size))
        stop = data.draw(st.integers(start, part.size))
        spans = list(part.within(start, stop))
        assert all(low < high for low, high in spans)
        assert [x for low, high in spans for x in vector[low:high]] == list(own[start:stop])
        copy = np.zeros_like(vector)
        part.put(copy, own)
        assert np.array_equal(part.take(copy), own) and np.count_nonzero(copy) == np.count_nonzero(own)


def test_fragment_write_can_mix_with_current_values():
    for dtype in (torch.float32, torch.bfloat16):
        module = torch.nn.Linear(3, 2).to(dtype)
        found, before = layout_of(module), np.empty(8, np.float32)
        found.read(module, before)
        found.write(module, np.full(5, 2.0, np.float32), 2, keep=0.25)
        after = np.empty(8, np.float32)
        found.read(module, after)
        assert np.array_equal(after[:2], before[:2]) and after[7] == before[7]
        tolerance = 1e-6 if dtype == torch.float32 else 0.02
        np.testing.assert_allclose(after[2:7], 0.25 * before[2:7] + 1.5, rtol=0, atol=tolerance)


def test_stages_are_runs_of_layers_and_first_has_both_ends():
    found = layout_of(Transformer(ModelConfig(256, layers=11, width=16, heads=2, context=8), 0))
    parts = stages_of(found, 3)
    layers = [{int(name.split(".")[1]) for name in names(found, p) if name.startswith("blocks.")} for p in parts]
    assert layers == [{0, 1, 2}, {3, 4, 5, 6}, {7, 8, 9, 10}] and shares(11, 3) == (3, 4, 4)
    ends = [{name for name in names(found, p) if not name.startswith("blocks.")} for p in parts]
    assert "embedding.weight" in ends[0] and not ends[1] | ends[2]
    assert sum(part.size for part in parts) == found.total
    assert [part.size for part in stages_of(layout(("w", 9)), 3)] == [3, 3, 3]
