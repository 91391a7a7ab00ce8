"""The flat layout of a module's parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.node.state.layout import Layout, layout_of
from torch import nn


class Odd(nn.Module):
    """Model with tied, frozen, transposed, strided, half, bfloat16, double, empty, scalar, nested parts, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.zebra = nn.Linear(3, 5)
        self.tied = nn.Linear(3, 5, bias=False)
        self.tied.weight = self.zebra.weight
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.strided = nn.Parameter(torch.randn(10)[::2])
        self.fp16 = nn.Parameter(torch.randn(9).half())
        self.bf16 = nn.Parameter(torch.randn(2, 3).bfloat16())
        self.fp64 = nn.Parameter(torch.randn(4).double())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.nested = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def whole(module: nn.Module, layout: Layout) -> np.ndarray:
    out = np.full(layout.total, np.nan, np.float32)
    layout.read(module, out)
    return out


def test_layout_names_are_sorted_and_ranges_adjacent() -> None:
    layout = layout_of(Odd())
    names = [piece.name for piece in layout.pieces]
    assert names == sorted(names)
    assert "frozen" not in names and not any("running" in name for name in names)
    # The shared weight has one of its two names.
    assert len({"tied.weight", "zebra.weight"} & set(names)) == 1
    assert [piece.start for piece in layout.pieces] == [0, *(piece.stop for piece in layout.pieces[:-1])]
    assert layout.total == layout.pieces[-1].stop == 15 + 5 + 24 + 5 + 9 + 6 + 4 + 0 + 1 + 6 + 4


def test_layout_read_gives_row_major_float32() -> None:
    module = Odd()
    layout = layout_of(module)
    values = layout.split(whole(module, layout))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert np.array_equal(values[name], parameter.detach().float().numpy())


def test_layout_write_then_read_rounds_to_each_type() -> None:
    module = Odd()
    layout = layout_of(module)
    frozen, addresses = module.frozen.clone(), {name: p.data_ptr() for name, p in module.named_parameters()}
    new = np.random.default_rng(0).standard_normal(layout.total).astype(np.float32)
    new.flags.writeable = False
    layout.write(module, new)
    back, wanted = layout.split(whole(module, layout)), layout.split(new)
    for piece in layout.pieces:
        rounded = torch.tensor(wanted[piece.name]).to(getattr(torch, piece.dtype)).float().numpy()
        assert np.array_equal(back[piece.name], rounded), piece.name
    assert module.tied.weight is module.zebra.weight
    assert torch.equal(module.frozen, frozen)
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == addresses
    assert all(p.requires_grad for name, p in module.named_parameters() if name != "frozen")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 79), max_size=6))
def test_layout_ranges_add_up_to_the_whole(cuts: list[int]) -> None:
    source, target = Odd(), Odd()
    layout = layout_of(source)
    assert layout.total == 79
    layout.write(target, np.zeros(79, np.float32))
    bounds = [0, *sorted(cuts), 79]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        part = np.full(stop - start, np.nan, np.float32)
        layout.read(source, part, start)
        assert np.array_equal(part, whole(source, layout)[start:stop])
        layout.write(target, part, start)
    assert np.array_equal(whole(target, layout), whole(source, layout))


def test_layout_write_changes_only_its_range() -> None:
    module = Odd()
    layout = layout_of(module)
    before = whole(module, layout)
    layout.write(module, np.full(20, 0.5, np.float32), 17)
    after = whole(module, layout)
    assert (after[17:37] == 0.5).all()
    assert np.array_equal(np.delete(after, slice(17, 37)), np.delete(before, slice(17, 37)))


def test_delta_is_reference_minus_parameters() -> None:
    module = Odd()
    layout = layout_of(module)
    reference = np.random.default_rng(1).standard_normal(79).astype(np.float32)
    out = np.zeros(30, np.float32)
    layout.delta(module, reference[10:40], out, 10)
    assert np.array_equal(out, reference[10:40] - whole(module, layout)[10:40])
    with pytest.raises(ValueError, match="reference"):
        layout.delta(module, reference, out)


def test_module_without_parameters_is_refused() -> None:
    layout = layout_of(nn.ReLU())
    assert layout.total == 0 and layout.pieces == ()
    layout.read(nn.ReLU(), np.zeros(0, np.float32))
    assert layout.split(np.zeros(0, np.float32)) == {}


def test_layout_digest_depends_on_layout_only() -> None:
    one = layout_of(nn.Linear(3, 5)).digest
    assert one == layout_of(nn.Linear(3, 5)).digest and len(one) == 32
    others = [nn.Linear(5, 3), nn.Linear(3, 5, bias=False), nn.Linear(3, 5).half(), nn.Sequential(nn.Linear(3, 5))]
    assert len({one, *(layout_of(module).digest for module in others)}) == 5


def test_layout_refuses_parameters_that_cannot_be_averaged() -> None:
    module = nn.Module()
    module.wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="wave"):
        layout_of(module)
    with pytest.raises(ValueError, match="no values"):
        layout_of(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="no values"):
        layout_of(nn.Linear(2, 2, device="meta"))
    module.wave = nn.Parameter(torch.zeros(1, 3).expand(2, 3))
    with pytest.raises(ValueError, match="wave is an expanded view"):
        layout_of(module)
    module.wave = nn.Parameter(torch.zeros(1, 3).expand(1, 3))
    assert layout_of(module).total == 3
    with torch.inference_mode():
        other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"bias was made in torch\.inference_mode"):
        layout_of(other)


def test_layout_refuses_wrong_arrays_and_ranges() -> None:
    module = nn.Linear(3, 5)
    layout = layout_of(module)
    with pytest.raises(ValueError, match="vector of 20"):
        layout.read(module, np.zeros(21, np.float32))
    with pytest.raises(ValueError, match="vector of 20"):
        layout.write(module, np.zeros(2, np.float32), 19)
    with pytest.raises(ValueError, match="float32"):
        layout.read(module, np.zeros(20))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it was"):
        layout.read(nn.Linear(5, 3), np.zeros(20, np.float32))
    with pytest.raises(ValueError, match=r"bias is float64 \(5,\) now, it was float32 \(5,\)"):
        layout.read(nn.Linear(3, 5).double(), np.zeros(20, np.float32))
    with pytest.raises(ValueError, match="no parameter bias any more"):
        layout.read(nn.Linear(3, 5, bias=False), np.zeros(20, np.float32))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_layout_supports_parameters_on_gpu() -> None:
    module = Odd()
    layout = layout_of(module)
    before = whole(module, layout)
    module.cuda()
    assert np.array_equal(whole(module, layout), before)
    layout.write(module, before[20:50] * 2, 20)
    assert np.allclose(whole(module, layout)[20:50], before[20:50] * 2, atol=1e-2)
