"""Accuracy of a small classifier that sixteen peers train, some of which lie: benchmarks/robustness.py."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def bench(load):
    return load("robustness")


@pytest.fixture(scope="module")
def task(bench):
    return bench.Task()


@pytest.fixture(scope="module")
def clean(bench, task):
    return {name: bench.run(task, make) for name, make in bench.rules(3).items()}


WORST = ("labels", "sign*1", "sign*1000", "constant*1", "reversed mean", "alie", "mimic", "rare index", "weight 1e30")
DEFAULTS = ("clip", "centered-clip", "sparse clip")


def test_clean_runs_learn_the_task(clean):
    assert min(clean.values()) > 95 or min(clean, key=clean.get) in ("krum", "median")
    assert clean["clip"] > clean["mean"] - 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("attack", WORST)
def test_default_rules_lose_less_than_four_points_to_three_liars(bench, task, clean, attack):
    for name in DEFAULTS:
        assert bench.run(task, bench.rules(3)[name], attack, 3) >= clean[name] - 4, name


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_default_rules_lose_less_than_four_points_to_every_attack(bench, task, clean):
    for attack in bench.ATTACKS:
        for name in DEFAULTS:
            assert bench.run(task, bench.rules(3)[name], attack, 3) >= clean[name] - 4, (name, attack)


def test_plain_mean_fails_on_every_strong_attack(bench, task):
    """So the attacks bite, and the other tests show a defence."""
    for attack in bench.STRONG:
        assert bench.run(task, bench.rules(3)["mean, unscreened"], attack, 3) < 50, attack


def test_every_robust_rule_withstands_the_strong_attacks(bench, task, clean):
    for name in ("trimmed-mean", "geometric-median", "flag", "multi-krum", "bulyan"):
        for attack in ("sign*10", "reversed mean"):
            assert bench.run(task, bench.rules(3)[name], attack, 3) >= clean[name] - 4, (name, attack)
