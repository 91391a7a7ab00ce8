"""Persistent buffers of a module as float32 values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from thinwire.node.state.layout import layout_of
from thinwire.node.state.model_buffers import buffers_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


class Odd(nn.Module):
    """Module with persistent and other buffers of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.full((4,), float("nan")), persistent=False)
        self.register_buffer("short", torch.tensor([[0.5, -2.0]]).bfloat16())
        self.register_buffer("wide", torch.tensor([2**62 + 12345, -(2**63), 2**63 - 1, -1, 0]))
        self.register_buffer("narrow", torch.tensor([-128, 127], dtype=torch.int8))
        self.register_buffer("medium", torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("scalar", torch.tensor(3.0))


@pytest.mark.parametrize(("rule", "averaged"), [("average", 3 + 3 + 2 + 1), ("heaviest", 0)])
def test_buffers_survive_the_way_through_float32(rule, averaged):
    source, target = Odd(), Odd()
    source.norm.running_var.uniform_()
    for buffer in target.buffers():
        buffer.zero_()
    layout = layout_of(source, buffers=rule)
    values = layout.first(source)[layout.total :]
    assert layout.buffers.block.averaged == averaged and values.size == layout.buffers.size == 9 + 3 + 15 + 2 + 4 + 2
    assert np.isfinite(values).all()
    layout.write(target, values, layout.total)
    for name, buffer in source.state_dict().items():
        if name not in dict(source.named_parameters()):
            assert torch.equal(target.get_buffer(name), buffer), name
    assert torch.equal(target.table, torch.zeros(4)), "buffers that are not persistent are no state"


def test_layout_digest_depends_on_buffers_only_if_they_are_state():
    plain = layout_of(nn.Linear(2, 2)).digest
    assert layout_of(nn.Linear(2, 2), buffers="average").digest == plain
    found = {rule: layout_of(nn.BatchNorm1d(2), buffers=rule).digest for rule in ("local", "average", "heaviest")}
    assert found["average"] != found["local"]


def test_buffers_without_real_finite_values_are_refused():
    module = nn.Module()
    module.register_buffer("one", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="only real buffers"):
        buffers_of(module, "average")
    module.one = torch.full((2,), float("inf"))
    with pytest.raises(ValueError, match="not finite; .*persistent=False"):
        buffers_of(module, "average")
    assert buffers_of(module, "local").size == 0
    with pytest.raises(ValueError, match="no values yet"):
        buffers_of(nn.LazyBatchNorm1d(), "average")


def test_buffers_are_found_whatever_the_names_of_the_state_dict():
    module = nn.Sequential(checkpoint_wrapper(Odd()))
    plain, wrapped = buffers_of(Odd(), "average"), buffers_of(module, "average")
    assert wrapped.size == plain.size and wrapped.block == plain.block
    wrapped.write(module, np.ones(wrapped.size, np.float32))
    assert torch.equal(module.get_buffer("0.norm.running_mean"), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_finite_values_are_finite_in_narrow_types(dtype):
    module = nn.Module()
    module.register_buffer("one", torch.zeros(4, dtype=dtype))
    values = np.array([1e30, -1e30, np.finfo(np.float32).max, 0.5], np.float32)
    buffers = buffers_of(module, "average")
    buffers.write(module, values)
    assert torch.isfinite(module.one).all() and module.one[3] == 0.5 and module.one[0] == -module.one[1] > 6e4
    assert np.isfinite(buffers.read(module)).all(), "the peer can contribute again"


def test_any_finite_words_are_valid_integers():
    buffers = buffers_of(Odd(), "average")
    wild = np.resize(np.array([3e38, -3e38, 0.4, 1e9], np.float32), buffers.size)
    assert buffers.split(wild)["wide"].shape == (5,)
