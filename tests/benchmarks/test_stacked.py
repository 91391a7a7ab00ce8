"""Tests of benchmarks/training/stacked.py: a lane makes the same training as the product's Trainer."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from thinwire.node.training.inner_loop import Trainer
from thinwire.node.training.inner_optimizer import InnerConfig

STEPS = 20
DECAYED = InnerConfig(lr=5e-3, warmup=8, weight_decay=0.5, clip=0.3)
MUON = InnerConfig(optimizer="muon", lr=5e-3, adam_lr=2e-3, warmup=8, weight_decay=0.5, clip=0.3)


@pytest.fixture(scope="module")
def stacked(load):
    return load("benchmarks.training.stacked")


@pytest.fixture(scope="module")
def toys(load, tmp_path_factory):
    """Return small models of two seeds, with three peers each."""
    toy, cache = load("benchmarks.training.toy"), tmp_path_factory.mktemp("text")
    return [toy.Toy(toy.text(cache, seed), seed, peers=toy.PEERS[:3], width=32, batch=4) for seed in (3, 4)]


def vector(layout, model):
    out = np.empty(layout.total, np.float32)
    layout.read(model, out)
    return out


def trained(toy, config, batches):
    trainer = Trainer(toy.model(), config, batches, clock=time.perf_counter)
    trainer.run_steps(STEPS)
    return trainer


@pytest.mark.parametrize(("config", "tolerance"), [(DECAYED, 1e-4), (MUON, 1e-2)], ids=["adamw", "muon"])
def test_each_lane_trains_like_a_trainer_on_its_data(stacked, toys, config, tolerance):
    """With warm-up, decay and clipping that acts in every step; `tolerance` is a part of the way from the first model.

    Muon computes in bfloat16, so its sums differ more.
    """
    places = [(toys[0], toys[0].peers[0]), (toys[0], toys[0].peers[2]), (toys[1], toys[1].peers[1])]
    stack = stacked.StackedTrainers([stacked.Lane(toy, peer) for toy, peer in places], config)
    stack.run_steps(7)
    stack.run_steps(STEPS - 7)
    trainers = [trained(toy, config, toy.batches(peer)) for toy, peer in places]
    samples = [next(iter(toy.split.evaluation(8, 1))) for toy, _ in places]
    losses = stack.evaluate(stack.vectors([0, 1, 2]), samples)
    for index, ((toy, _), trainer) in enumerate(zip(places, trainers, strict=True)):
        found, expected = stack.vectors([index])[0].numpy(), vector(stack.layout, trainer.model)
        way = np.linalg.norm(expected - vector(stack.layout, toy.model()))
        assert np.linalg.norm(found - expected) < tolerance * way
        assert losses[index] == pytest.approx(trainer.evaluate([samples[index]]), abs=tolerance)


@pytest.mark.parametrize(
    "change",
    [{"clip": 0.0}, {"weight_decay": 0.0}, {"warmup": 9}, {"betas": (0.9, 0.99)}],
    ids=lambda change: next(iter(change)),
)
def test_the_comparison_with_a_trainer_sees_a_wrong_setting(stacked, toys, change):
    toy = toys[0]
    stack = stacked.StackedTrainers([stacked.Lane(toy, toy.peers[0])], replace(DECAYED, **change))
    stack.run_steps(STEPS)
    expected = vector(stack.layout, trained(toy, DECAYED, toy.batches(toy.peers[0])).model)
    way = np.linalg.norm(expected - vector(stack.layout, toy.model()))
    assert np.linalg.norm(stack.vectors([0])[0].numpy() - expected) > 2e-2 * way


def test_lanes_that_step_together_are_data_parallel(stacked, load, toys):
    """They are one trainer that accumulates the gradients of all, beside a lane that trains alone."""
    toy, mixed = toys[0], load("benchmarks.training.toy").Mixed
    lanes = [stacked.Lane(toy, toy.peers[0]), *(stacked.Lane(toy, peer, "all") for peer in toy.peers)]
    stack = stacked.StackedTrainers(lanes, DECAYED)
    stack.run_steps(STEPS)
    alone, *together = stack.vectors(range(4)).numpy()
    assert all(np.array_equal(one, together[0]) for one in together)
    config = replace(DECAYED, accumulate=3)
    whole = vector(stack.layout, trained(toy, config, mixed([toy.batches(peer) for peer in toy.peers])).model)
    single = vector(stack.layout, trained(toy, DECAYED, toy.batches(toy.peers[0])).model)
    way = np.linalg.norm(whole - vector(stack.layout, toy.model()))
    assert np.linalg.norm(together[0] - whole) < 1e-4 * way and np.linalg.norm(alone - single) < 1e-4 * way


def test_replicas_read_and_write_lanes_in_host_memory(stacked, toys):
    toy = toys[0]
    stack = stacked.StackedTrainers([stacked.Lane(toy, peer) for peer in toy.peers], DECAYED)
    stack.run_steps(2)
    before, size = stack.vectors(range(3)).numpy().copy(), stack.layout.total
    with pytest.raises(RuntimeError, match="lane 1 is not in host memory"):
        stack.reader(1)(0, 1, np.empty(1, np.float32))
    stack.download([1, 2])
    read = np.empty(size - 5, np.float32)
    stack.reader(1)(5, size, read)
    assert np.array_equal(read, before[1, 5:])
    stack.writer(1)(np.ones(size - 5, np.float32), 5, keep=0.25)
    stack.upload()
    after = stack.vectors(range(3)).numpy()
    assert np.array_equal(after[[0, 2]], before[[0, 2]]) and np.array_equal(after[1, :5], before[1, :5])
    assert after[1, 5:] == pytest.approx(0.25 * before[1, 5:] + 0.75)
    assert torch.equal(stack.vectors([1])[0], torch.from_numpy(after[1]))
