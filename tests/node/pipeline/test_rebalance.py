"""Who moves, and what moving is worth under churn."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.node.pipeline.rebalance import HURRY, PERIOD, Balance, Move, move, newcomer


def test_the_least_busy_of_the_least_loaded_stage_moves():
    assert move([{1: 3, 2: 1}, {3: 9, 4: 9}, {5: 2, 6: 5}]) == Move(2, 0, 1)


def test_even_stages_are_left_alone():
    assert move([{1: 5, 2: 5}, {3: 6, 4: 6}]) is None
    assert move([{1: 5, 2: 5}, {3: 6, 4: 7}]) == Move(1, 0, 1)
    assert move([{1: 0, 2: 0}, {3: 0}]) is None


def test_nobody_empties_a_stage():
    assert move([{1: 0}, {2: 9}]) is None
    assert move([{1: 0}, {2: 9, 3: 9}, {4: 2, 5: 1}]) == Move(5, 2, 1)


def test_an_empty_stage_comes_first():
    assert move([{1: 5, 2: 5}, {}, {3: 5}]) == Move(1, 0, 1)
    assert newcomer([{1: 50, 2: 50}, {}, {3: 5}]) == 1
    assert newcomer([{1: 5, 2: 5}, {3: 12}]) == 1
    assert newcomer([{1: 5, 2: 5}, {3: 10}]) == 1


def test_who_cannot_go_there_is_not_asked():
    queues = [{1: 3, 2: 1}, {3: 9, 4: 9}, {5: 4, 6: 5}]
    assert move(queues, lambda peer, stage: peer != 2) == Move(1, 0, 1)
    assert move(queues, lambda peer, stage: peer > 2) == Move(5, 2, 1)
    assert move(queues, lambda peer, stage: False) is None


class Waits:
    """Says what it is told of who was waited for."""

    def __init__(self):
        self.seconds = {}

    def waited(self):
        return self.seconds


def test_one_move_in_a_period_and_nobody_is_asked_twice_for_what_it_did_not_do():
    now, waits = 0.0, Waits()
    balance = Balance(waits, lambda: now, period=100.0)
    waits.seconds = {b"a": 90.0, b"b": 1.0, b"c": 2.0}
    holders = {1: [b"a"], 2: [b"b", b"c"]}
    assert balance.due(holders) is None, "the period is not over"
    now = 100.0
    assert balance.due(holders) == Move(b"b", 2, 1)
    now = 150.0
    assert balance.due(holders) is None
    now = 200.0
    assert balance.due(holders) == Move(b"c", 2, 1), "the other one has stayed"
    now = 300.0
    assert balance.due(holders) is None
    now = 400.0
    assert balance.due({1: [b"a"], 2: [b"c", b"d"]}) == Move(b"d", 2, 1)


def test_an_empty_stage_does_not_wait_for_the_end_of_the_period():
    now = 0.0
    balance = Balance(Waits(), lambda: now, period=100.0)
    holders = {1: [], 2: [b"b", b"c"]}
    assert balance.due(holders) is None
    now = 100.0 * HURRY - 0.1
    assert balance.due(holders) is None
    now = 100.0 * HURRY
    assert balance.due(holders) == Move(b"b", 2, 1)
    now = 50.0
    assert balance.due(holders) is None, "somebody is on its way"
    assert balance.due({1: [], 2: [b"c"]}) is None
    balance = Balance(Waits(), lambda: now, period=100.0)
    assert balance.due(holders) is None
    now = 55.0
    assert balance.due({1: [b"a"], 2: [b"b", b"c"]}) is None
    now = 62.0
    assert balance.due(holders) is None, "empty again, and not for long"


@given(st.lists(st.dictionaries(st.integers(0, 99), st.integers(0, 50), max_size=5), min_size=1, max_size=6))
def test_a_move_is_from_a_stage_that_keeps_a_member(queues):
    names = [{stage * 100 + name: waiting for name, waiting in members.items()} for stage, members in enumerate(queues)]
    made = move(names)
    if made is not None:
        assert made.peer in names[made.source] and len(names[made.source]) > 1 and made.source != made.target
        assert not names[made.target] or sum(names[made.target].values()) > sum(names[made.source].values())


def throughput(seed, period, stages=4, peers=32, hours=12, tick=10.0):
    """Part of the best throughput, by a fluid model: peers fail (mean 4 h) and come back (mean 0.5 h) as newcomers.

    A member does one micro-batch a tick; what a stage has done waits at the next.
    """
    rng = random.Random(seed)
    members = [set(range(s, peers, stages)) for s in range(stages)]
    until = [rng.expovariate(1 / 14400) for _ in range(peers)]
    waiting = [2.0 * peers / stages] * stages
    done = best = 0.0
    for turn in range(int(hours * 3600 / tick)):
        now = turn * tick
        queues = [
            {peer: round(8 * full / max(len(here), 1)) for peer in here}
            for here, full in zip(members, waiting, strict=True)
        ]
        for peer in [peer for peer in range(peers) if now >= until[peer]]:
            home = next((here for here in members if peer in here), None)
            if home is None:
                members[newcomer(queues) if period else rng.randrange(stages)].add(peer)
                until[peer] = now + rng.expovariate(1 / 14400)
            elif len(home) > 1:
                home.remove(peer)
                until[peer] = now + rng.expovariate(1 / 1800)
        if period and turn % int(period / tick) == 0:
            made = move([{p: q for p, q in qs.items() if p in here} for here, qs in zip(members, queues, strict=True)])
            if made is not None:
                members[made.source].remove(made.peer)
                members[made.target].add(made.peer)
        flows = [min(len(here), full) for here, full in zip(members, waiting, strict=True)]
        for stage, flow in enumerate(flows):
            waiting[stage] -= flow
            waiting[(stage + 1) % stages] += flow
        done += flows[-1]
        best += sum(len(here) for here in members) // stages
    return done / best


def test_moving_is_worth_it():
    for seed in range(3):
        still, moving = throughput(seed, None), throughput(seed, PERIOD)
        assert still < 0.9 < 0.93 < moving


@pytest.mark.parametrize("queues", [[{}], [{1: 3}]])
def test_one_stage_has_nobody_to_move(queues):
    assert move(queues) is None and newcomer(queues) == 0
