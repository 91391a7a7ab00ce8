"""Constraints of a plan: each violation is named, and the search kernel agrees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinwire.node.pipeline.planner.anneal_kernel import keeps_rules
from thinwire.node.pipeline.planner.constraints import violations
from thinwire.node.pipeline.planner.initial_plan import build
from thinwire.node.pipeline.planner.makespan import makespan
from thinwire.node.pipeline.planner.path_search import improve
from thinwire.node.pipeline.planner.problem import Problem


def instance(sizes=(2, 2, 2, 2, 2, 2, 2, 2), length=5, memory=3, per_start=3, seed=0):
    """Return an instance with peers in stage order: stage s begins at sum(sizes[:s])."""
    count = sum(sizes)
    delays = np.random.default_rng(seed).uniform(0.1, 3.0, (count, count))
    ends = np.cumsum([0, *sizes]).tolist()
    stages = tuple(tuple(range(a, b)) for a, b in zip(ends, ends[1:], strict=False))
    kinds = np.random.default_rng(seed + 1).uniform(0.2, 0.8, count)
    return Problem("", delays, stages, kinds, np.broadcast_to(memory, count).astype(np.int64), length, per_start)


# Peers 2s and 2s + 1 are in stage s.
SOUND = ((0, 2, 4, 6, 8), (0, 4, 2, 8, 6), (1, 3, 9, 11, 13), (1, 8, 10, 12, 14))
MUTANTS = {
    "stage 0 in the middle": (0, 2, 1, 6, 8),
    "stage twice": (0, 2, 4, 5, 8),
    "swap distance": (0, 2, 6, 8, 4),
    "swaps": (0, 4, 2, 8, 6, 12, 10),
    "length": (0, 2, 4, 6),
    "gap": (0, 2, 12, 10, 14),
    "origin": (2, 4, 6, 8, 10),
    "no stage": (0, 2, 4, 6, 99),
}


def names(found):
    return {violation.name for violation in found}


def test_valid_plan_violates_no_constraint():
    assert violations(instance(), SOUND) == []


@pytest.mark.parametrize("name", MUTANTS)
def test_mutated_path_violation_is_named(name):
    made = instance(length=7 if name == "swaps" else 5)
    found = violations(made, [MUTANTS[name]])
    assert names(found) == {name} and found[0].path == 0


def test_overload_violation_is_named():
    made = instance(memory=2, per_start=9)
    assert names(violations(made, [(0, 2, 4, 6, 8)] * 2)) == set()
    assert names(violations(made, [(0, 2, 4, 6, 8)] * 3)) == {"peer load"}
    spread = [(0, 2, 4, 6, 8), (0, 2, 4, 6, 8), (0, 3, 5, 7, 9), (0, 3, 5, 7, 9)]
    assert names(violations(made, spread)) == set()
    assert names(violations(made, [*spread, (0, 3, 5, 7, 9)])) == {"peer load", "stage load"}
    assert names(violations(instance(per_start=1), SOUND)) == {"starts"}


@given(st.lists(st.integers(0, 11), min_size=4, max_size=4), st.integers(0, 5))
@settings(max_examples=300, deadline=None)
def test_search_kernel_and_constraints_agree(path, off):
    made = instance(sizes=(2, 1, 2, 1, 1, 2, 2, 1), length=4)
    stage = made.stage.copy()
    stage[off] = -1
    made = Problem(
        "",
        made.delays,
        tuple(tuple(p for p in members if p != off) for members in made.stages),
        made.work,
        made.memory,
        4,
        3,
    )
    assert keeps_rules(np.array([path]), 0, stage, made.swaps) is (not violations(made, [path]))


def random_instance(seed):
    """Any shape in which the stages have room for all visits."""
    rng = np.random.default_rng(seed)
    stages = int(rng.integers(2, 10))
    sizes = tuple(int(size) for size in rng.integers(1, 5, stages))
    length = int(rng.integers(2, stages + 1))
    memory = rng.integers(1, 5, sum(sizes))
    count = sizes[0]
    room = [int(part.sum()) for part in np.split(memory, np.cumsum(sizes[:-1]))[1:]]
    most = max(n for n in range(64) if sum(min(n, r) for r in room) >= n * (length - 1))
    per_start = min(int(rng.integers(1, 4)), most // count)
    return instance(sizes, length, memory, per_start, seed) if per_start else None


@pytest.mark.trial
@pytest.mark.parametrize("count", [50, pytest.param(1200, marks=pytest.mark.soak)])
def test_random_plans_violate_no_constraint(count):
    made = plans = 0
    for seed in range(count):
        asked = random_instance(seed)
        if asked is None:
            continue
        made += 1
        paths = build(asked)
        if paths is None:
            continue
        plans += 1
        better = improve(asked, paths, seed=seed, tries=300)
        assert better.makespan <= makespan(asked, paths)
        assert violations(asked, better.paths) == [] and len(better.paths) == len(asked.stages[0]) * asked.per_start
    # The other instances have far stages that no path reaches: a hop spans at most four stages.
    assert plans >= 0.98 * made > 0.6 * count
