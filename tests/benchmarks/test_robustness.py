"""Accuracy of a small classifier that sixteen peers train, some of which lie: benchmarks/training/robustness.py."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def bench(load):
    return load("benchmarks.training.robustness")


@pytest.fixture(scope="module")
def task(bench):
    return bench.Task()


@pytest.fixture(scope="module")
def clean(bench, task):
    return {name: bench.run(task, make) for name, make in bench.rules(3).items()}


WORST = ("labels", "sign*1", "sign*1000", "constant*1", "reversed mean", "alie", "mimic", "rare index", "weight 1e30")
DEFAULTS = ("clip", "centered-clip", "sparse clip")


@pytest.mark.trial
def test_clean_runs_learn_the_task(clean):
    assert min(clean.values()) > 95 or min(clean, key=clean.get) in ("krum", "median")
    assert clean["clip"] > clean["mean"] - 1


@pytest.mark.trial
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


@pytest.mark.trial
def test_every_robust_rule_withstands_the_strong_attacks(bench, task, clean):
    for name in ("trimmed-mean", "geometric-median", "flag", "multi-krum", "bulyan"):
        for attack in ("sign*10", "reversed mean"):
            assert bench.run(task, bench.rules(3)[name], attack, 3) >= clean[name] - 4, (name, attack)


@pytest.fixture(scope="module")
def gauntlet(load):
    return load("benchmarks.training.gauntlet")


HARMFUL = ("labels", "sign*1", "reversed mean", "inner .6")
"""Attacks of six liars that the norm clip alone withstands least, and one that it hardly notices."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("attack", HARMFUL)
def test_scores_leave_six_liars_of_sixteen_out_and_gain_accuracy(bench, task, gauntlet, attack):
    """The liars distrust all honest peers."""
    accuracy, scores = gauntlet.played(task, attack)
    assert accuracy >= max(85, bench.run(task, bench.rules(6)["clip"], attack, 6))
    assert all(out and out[0] < 60 for out in scores.out[-6:])
    assert sum(map(len, scores.out[:-6])) <= 15, "of 600 contributions"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("honest", [0, 10])
def test_scores_keep_the_accuracy_under_every_attack_of_six_liars(bench, task, gauntlet, honest):
    for attack in bench.ATTACKS:
        accuracy, scores = gauntlet.played(task, attack, honest=honest)
        assert accuracy >= 97, attack
        assert sum(map(len, scores.out[:-6])) <= 20, attack


@pytest.mark.trial
def test_scores_of_honest_peers_leave_none_out_when_the_model_has_converged(task, gauntlet):
    accuracy, scores = gauntlet.played(task, "", 0, rounds=150)
    assert accuracy >= 97 and not any(scores.out)
