"""The registry of outer methods: whether a model fits the manifest."""

from __future__ import annotations

import pytest
import torch
from thinwire.node.methods.registry import fitted
from thinwire.node.state.layout import Layout, Piece, layout_of
from thinwire.swarm.manifest.manifest import ManifestError
from thinwire.swarm.manifest.parser import parse
from torch import nn


def layout(*shapes):
    pieces, at = [], 0
    for number, (rows, cols) in enumerate(shapes):
        pieces.append(Piece(f"{number:03}", (rows, cols), "float32", at, at + rows * cols))
        at += rows * cols
    return Layout(tuple(pieces), at, b"l" * 32)


def manifest(method, codec):
    return parse(f'[outer]\nmethod = "{method}"\n[exchange]\ncodec = "{codec}"')


HALF_A_BILLION = layout((1 << 15, 1 << 14))


def test_powersgd_accepts_model_too_large_for_dense_rounds():
    _, cut = fitted(manifest("powersgd", "powersgd(rank=4)"), HALF_A_BILLION)
    assert cut.total == 4 << 15 and len(cut) <= 32


@pytest.mark.parametrize(
    ("method", "codec", "shapes", "reason", "hint"),
    [
        ("diloco", "fp32", [(1 << 15, 1 << 14)], "needs 2048 chunks, the limit is 1024", "fewer bits per value"),
        ("noloco", "fp32", [(1 << 15, 1 << 14)], "needs 2048 chunks, the limit is 1024", "fewer bits per value"),
        (
            "sparseloco",
            "topk(k=4096,chunk=4096)|2bit|rice",
            [(1 << 15, 1 << 14)],
            "too large for an all-gather",
            "lower k",
        ),
        ("demo", "demo(k=4096,chunk=4096)|2bit|rice", [(1 << 15, 1 << 14)], "too large for an all-gather", "lower k"),
        ("powersgd", "powersgd(rank=256)", [(511, 600_000)], "needs", "lower the rank"),
        ("powersgd", "powersgd(rank=200)", [(1 << 23, 512)], "more than a payload can hold", "lower the rank"),
    ],
)
def test_too_large_model_is_refused_with_hint(method, codec, shapes, reason, hint):
    with pytest.raises(ManifestError, match=reason) as error:
        fitted(manifest(method, codec), layout(*shapes))
    assert hint in error.value.hint and codec in str(error.value)


def test_large_buffers_are_refused_with_hint_about_buffers():
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.zeros(2_000_000, dtype=torch.bool))
    with pytest.raises(ManifestError, match="buffers of 2000000 values are too large") as error:
        fitted(manifest("diloco", "fp32"), layout_of(module, buffers="average"))
    assert "persistent=False" in error.value.hint and "model.buffers = 'local'" in error.value.hint


@pytest.mark.parametrize("factor", [(1 << 21, 600), (600, 1 << 21)])
def test_powersgd_checks_both_factors(factor):
    with pytest.raises(ManifestError, match="the limit is 1024"):
        fitted(manifest("powersgd", "powersgd(rank=256)"), layout(factor))
