"""A lost stage is reconstructed from its neighbours."""

import numpy as np
import pytest
import torch
from thinwire.node.pipeline.model.section import ModelSection
from thinwire.node.pipeline.recovery.checkfree import average, between
from thinwire.node.state.layout import layout_of
from thinwire.node.training.models.transformer import ModelConfig, Transformer


def test_neighbour_with_larger_gradient_weighs_more():
    one, two = np.ones(5, np.float32), np.full(5, 4.0, np.float32)
    assert average(one, two, 1.0, 1.0) == pytest.approx(np.full(5, 2.5))
    assert average(one, two, 2.0, 1.0) == pytest.approx(np.full(5, 2.0), abs=1e-3)
    assert average(one, two, 0.0, 0.0) == pytest.approx(np.full(5, 2.5))
    assert average(one, two, 0.0, 1.0) == pytest.approx(two, abs=1e-3)
    assert average(one, two, 1.0, 1.0).dtype == np.float32


@pytest.mark.parametrize(("size", "norm"), [(4, 1.0), (5, -1.0), (5, float("nan")), (5, float("inf"))])
def test_averaging_incompatible_stages_is_an_error(size, norm):
    with pytest.raises(ValueError):
        average(np.ones(5, np.float32), np.ones(size, np.float32), norm, 1.0)


def stages_of(model, *stages):
    """Layouts of runs of layers, and their parameters."""
    found = []
    for layers in stages:
        held = [layer for layer in layers if layer is not None]
        section = ModelSection(model, range(min(held, default=0), max(held, default=-1) + 1), ends=None in layers)
        layout = layout_of(section.module)
        theta = np.empty(layout.total, np.float32)
        with torch.no_grad():
            layout.read(model, theta)
        found.append((layout, theta))
    return found


def test_middle_stage_is_averaged_layer_by_layer():
    """The origin has an embedding that the others lack, and stages differ in their number of layers."""
    model = Transformer(ModelConfig(20, 6, 8, 2, 8), 3)
    (before, low), (lost, _), (after, high) = stages_of(model, (0, None), (1, 2), (3, 4, 5))
    made = between(lost, (before, low), (after, high), 1.0, 1.0)
    weights = dict(model.named_parameters())
    for piece in lost.pieces:
        first, name = int(piece.name.split(".")[1]) == 1, piece.name.split(".", 2)[2]
        pair = (f"blocks.0.{name}", f"blocks.{3 if first else 4}.{name}")
        mean = sum(weights[one].detach().numpy() for one in pair) / 2
        np.testing.assert_allclose(made[piece.start : piece.stop], mean.reshape(-1), atol=1e-6)
    tilted = between(lost, (before, low), (after, high), 3.0, 1.0)
    assert not np.array_equal(tilted, made) and np.array_equal(
        tilted, between(lost, (before, low), (after, high), 3.0, 1.0)
    )


def test_averaging_neighbours_without_layers_is_an_error():
    model = Transformer(ModelConfig(20, 2, 8, 2, 8), 3)
    ends, lost, after = stages_of(model, (None,), (0,), (1,))
    with pytest.raises(ValueError, match="no layers"):
        between(lost[0], ends, after, 1.0, 1.0)
