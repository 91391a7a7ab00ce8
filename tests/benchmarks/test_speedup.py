"""Tests of the speed-up benchmark: trainings in lockstep make the same rounds as one after the other."""

from __future__ import annotations

import asyncio
import math
import re
import time

import numpy as np
import pytest
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.state.layout import layout_of
from thinwire.node.training.inner_loop import Trainer
from thinwire.node.training.inner_optimizer import InnerConfig
from thinwire.swarm.manifest.parser import parse

PACE, ROUNDS = 6, 3
CONFIG = InnerConfig(lr=4e-3, warmup=4)


@pytest.fixture(scope="module")
def modules(load):
    return [load(f"benchmarks.training.{name}") for name in ("speedup", "lockstep", "stacked", "toy")]


@pytest.fixture(scope="module")
def toys(load, tmp_path_factory):
    toy, cache = load("benchmarks.training.toy"), tmp_path_factory.mktemp("text")
    return [
        toy.Toy(toy.text(cache, 5), 5, ROUNDS, PACE, CONFIG, toy.PEERS[:count], layers=3, width=32, batch=2)
        for count in (2, 3)
    ]


def manifest(modules, name):
    return parse(f"[outer]\n{modules[0].METHODS[name]}\nsync_every = {PACE}\n")


def in_lockstep(modules, trainings, rounds, tail=0):
    """Train; return the clock, after `rounds` of all and `tail` more inner steps."""
    _, lockstep, stacked, _ = modules
    lanes = [stacked.Lane(training.toy, peer) for training in trainings for peer in training.toy.peers]
    clock = lockstep.Clock([stacked.StackedTrainers(lanes, CONFIG)])
    each = math.gcd(PACE * rounds + tail, PACE)
    asyncio.run(lockstep.play(clock, trainings, lambda: clock.step < PACE * rounds + tail, each, at_once))
    return clock


def one_after_the_other(load, toy, how):
    """Return the outer parameters of a table with a Trainer for each replica."""
    table_of = load("benchmarks.training.round_table").RoundTable
    trainers = [Trainer(toy.model(), CONFIG, toy.batches(peer), clock=time.perf_counter) for peer in toy.peers]
    layout = layout_of(trainers[0].model)

    def learner(trainer):
        return (
            layout.first(trainer.model),
            lambda start, stop, out: layout.read(trainer.model, out, start),
            lambda theta, start=0, keep=0.0: layout.write(trainer.model, theta, start, keep),
        )

    table = table_of(how, layout, [learner(trainer) for trainer in trainers])
    train = table.play(ROUNDS * PACE // how.pace, lambda index, steps: trainers[index].run_steps(steps).tokens)
    asyncio.run(train)
    return table.slots[0].replica.theta, layout.first(toy.model())


@pytest.mark.parametrize("name", ["diloco", "sparseloco", "streaming", "streaming overlap 1"])
def test_two_trainings_in_lockstep_end_like_each_alone(modules, load, toys, name):
    how, lockstep = manifest(modules, name), modules[1]
    trainings = [lockstep.Rounds(name, toy, 0, first, how) for toy, first in zip(toys, (0, 2), strict=True)]
    # A step overlaps the last exchange.
    clock = in_lockstep(modules, trainings, ROUNDS, how.overlap)
    assert clock.step == ROUNDS * PACE + how.overlap
    for training, toy in zip(trainings, toys, strict=True):
        assert training.failure == ""
        (theta, first), (step, found) = one_after_the_other(load, toy, how), training.snapshot
        assert step == ROUNDS * PACE + how.overlap
        assert np.linalg.norm(found - theta) < 2e-2 * np.linalg.norm(theta - first) > 0


def test_pairs_in_lockstep_end_like_one_after_the_other(modules, load, toys):
    how, lockstep = manifest(modules, "noloco"), modules[1]
    training = lockstep.Pairs("noloco", toys[1], 0, 0, how)
    clock = in_lockstep(modules, [training], ROUNDS)
    stack = clock.stacks[0]
    sample = [next(iter(toys[1].split.evaluation(64 * 32, 1)))] * 3
    loss = np.mean(stack.evaluate(stack.vectors(range(3)), sample))
    expected = load("benchmarks.training.unlike").paired(0.7, codec=how.exchange.codec)(toys[1])
    assert training.failure == "" and loss == pytest.approx(expected, abs=2e-3)


def test_an_error_ends_one_training_only(modules, toys):
    lockstep = modules[1]

    class Faulty(lockstep.Training):
        async def run(self, clock, work):
            await asyncio.gather(*(clock.train(place, 2) for place in self.places))
            raise FloatingPointError("too large")

    whole = lockstep.Rounds("diloco", toys[0], 0, 3, manifest(modules, "diloco"))
    faulty = Faulty("faulty", toys[1], 0, 0)
    clock = in_lockstep(modules, [faulty, whole], 2)
    assert faulty.failure == "FloatingPointError: too large"
    assert clock.step == 2 * PACE == whole.snapshot[0] and whole.failure == ""


def test_sparse_payloads_with_fewer_pieces_than_slots_are_put_together(load):
    """Largest payload: two pieces. Contributions of a few values: one."""
    table_of, toml = (
        load("benchmarks.training.round_table").RoundTable,
        '[outer]\nmethod = "sparseloco"\nsync_every = 1\n',
    )
    toy = load("benchmarks.training.toy")
    model = toy.Transformer(toy.ModelConfig(256, 4, 128, 8, 16), 0)
    layout = layout_of(model)
    models = [layout.first(model) for _ in range(2)]

    def learner(vector):
        def read(start, stop, out):
            out[:] = vector[start:stop]

        def write(theta, start=0, keep=0.0):
            vector[start : start + theta.size] = theta

        return layout.first(model), read, write

    def train(index, steps):
        models[index][:1000] -= np.float32(0.01)
        return steps

    table = table_of(parse(toml), layout, [learner(vector) for vector in models])
    asyncio.run(table.play(1, train))
    assert len(table.slots[0].replica.grid) == 2
    assert table.slots[0].replica.digest == table.slots[1].replica.digest
    assert (models[0] != layout.first(model)).sum() > 10


def test_speed_up_is_the_ratio_of_steps_to_the_same_loss(load):
    curves = load("benchmarks.training.curves")
    alone = [(10, 4.0), (20, 3.0), (30, 3.5), (40, 2.0)]
    assert (
        curves.reached(alone, 3.0) == 20 and curves.reached(alone, 2.5) == 35 and curves.reached(alone, 1.9) == math.inf
    )
    assert curves.targets(alone) == [3.0, 3.0, 2.0]
    assert curves.speedups(alone, alone) == [1.0, 1.0, 1.0]
    assert curves.speedups(alone, [(10, 3.0), (20, 2.0), (30, 1.5)]) == [2.0, 2.0, 2.0]
    assert curves.speedups(alone, [(10, 4.0), (40, 3.0)]) == [0.5, 0.5, 0.0]


def test_the_table_names_methods_that_end_worse_and_those_that_failed(load):
    curves = load("benchmarks.training.curves")
    results = [
        curves.Result(name, count, seed, [(10, 4.0), (20, last + seed)], failure)
        for name, count, last, failure in [
            (curves.ALONE, 1, 2.0, ""),
            ("diloco", 4, 1.5, ""),
            ("noloco", 4, 2.5, ""),
            ("sparseloco", 4, 1.0, "an error"),
        ]
        for seed in range(2)
    ]
    lines = curves.table(results, 1000).splitlines()
    assert [("WORSE" in line, "failed: an error" in line) for line in lines[1:]] == [
        (False, False),
        (False, False),
        (True, False),
        (False, True),
    ]
    assert "2.0000 (1.5000–2.5000)" in lines[2] and "not reached" in lines[3]
    cut = curves.cut([*results, curves.Result(curves.ALONE, 1, 2, [(10, 4.0)])])
    assert {one.curve[-1][0] for one in cut} == {10}


def test_smallest_run_prints_a_line_for_each_method_and_number_of_peers(modules, capsys, tmp_path):
    options = (
        "--device cpu --layers 3 --width 32 --context 8 --batch 2 --steps 6 --H 3 --seeds 1 --peers 2 --tune-steps 3"
    )
    file = tmp_path / "curves.json"
    assert modules[0].main([*options.split(), "--megabytes", "1", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any("failed" in line for line in lines)
    for name in ("synchronous", *modules[0].METHODS):
        assert any(re.match(rf"{re.escape(name)} +2 ", line) for line in lines), name
    assert file.read_text().count('"curve"') == 10
