"""Moves of hosts between stages, and their gain under churn."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.node.pipeline.groups.rebalance import HURRY, PERIOD, HostMove, Rebalancer, move, stage_for_joiner


def test_least_busy_host_of_least_loaded_stage_moves():
    assert move([{1: 3, 2: 1}, {3: 9, 4: 9}, {5: 2, 6: 5}]) == HostMove(2, 0, 1)


def test_balanced_stages_do_not_move_hosts():
    assert move([{1: 5, 2: 5}, {3: 6, 4: 6}]) is None
    assert move([{1: 5, 2: 5}, {3: 6, 4: 7}]) == HostMove(1, 0, 1)
    assert move([{1: 0, 2: 0}, {3: 0}]) is None


def test_rebalance_never_empties_a_stage():
    assert move([{1: 0}, {2: 9}]) is None
    assert move([{1: 0}, {2: 9, 3: 9}, {4: 2, 5: 1}]) == HostMove(5, 2, 1)


def test_empty_stage_is_filled_first():
    assert move([{1: 5, 2: 5}, {}, {3: 5}]) == HostMove(1, 0, 1)
    assert stage_for_joiner([{1: 50, 2: 50}, {}, {3: 5}]) == 1
    assert stage_for_joiner([{1: 5, 2: 5}, {3: 12}]) == 1
    assert stage_for_joiner([{1: 5, 2: 5}, {3: 10}]) == 1


def test_host_that_does_not_fit_is_not_asked():
    queues = [{1: 3, 2: 1}, {3: 9, 4: 9}, {5: 4, 6: 5}]
    assert move(queues, lambda peer, stage: peer != 2) == HostMove(1, 0, 1)
    assert move(queues, lambda peer, stage: peer > 2) == HostMove(5, 2, 1)
    assert move(queues, lambda peer, stage: False) is None


class Waits:
    """Reports waiting peers as it is told."""

    def __init__(self):
        self.seconds = {}

    def waited(self):
        return self.seconds


def test_rebalance_asks_once_per_period_and_never_repeats_refused_move():
    now, waits = 0.0, Waits()
    balance = Rebalancer(waits, lambda: now, period=100.0)
    waits.seconds = {b"a": 90.0, b"b": 1.0, b"c": 2.0}
    holders = {1: [b"a"], 2: [b"b", b"c"]}
    assert balance.due(holders) is None, "the period is not over"
    now = 100.0
    assert balance.due(holders) == HostMove(b"b", 2, 1)
    now = 150.0
    assert balance.due(holders) is None
    now = 200.0
    assert balance.due(holders) == HostMove(b"c", 2, 1), "the other one has stayed"
    now = 300.0
    assert balance.due(holders) is None
    now = 400.0
    assert balance.due({1: [b"a"], 2: [b"c", b"d"]}) == HostMove(b"d", 2, 1)


def test_empty_stage_does_not_wait_for_the_period():
    now = 0.0
    balance = Rebalancer(Waits(), lambda: now, period=100.0)
    holders = {1: [], 2: [b"b", b"c"]}
    assert balance.due(holders) is None
    now = 100.0 * HURRY - 0.1
    assert balance.due(holders) is None
    now = 100.0 * HURRY
    assert balance.due(holders) == HostMove(b"b", 2, 1)
    now = 50.0
    assert balance.due(holders) is None, "somebody is on its way"
    assert balance.due({1: [], 2: [b"c"]}) is None
    balance = Rebalancer(Waits(), lambda: now, period=100.0)
    assert balance.due(holders) is None
    now = 55.0
    assert balance.due({1: [b"a"], 2: [b"b", b"c"]}) is None
    now = 62.0
    assert balance.due(holders) is None, "empty again, and not for long"


@given(st.lists(st.dictionaries(st.integers(0, 99), st.integers(0, 50), max_size=5), min_size=1, max_size=6))
def test_move_leaves_a_member_in_the_old_stage(queues):
    names = [{stage * 100 + name: waiting for name, waiting in members.items()} for stage, members in enumerate(queues)]
    made = move(names)
    if made is not None:
        assert made.peer in names[made.source] and len(names[made.source]) > 1 and made.source != made.target
        assert not names[made.target] or sum(names[made.target].values()) > sum(names[made.source].values())


def throughput(seed, period, stages=4, peers=32, hours=12, tick=10.0):
    """Return the share of the best throughput in a fluid model with churn.

    Peers fail (mean 4 h) and return (mean 0.5 h) as newcomers. A member does one micro-batch a tick; the output of a
    stage waits at the next.
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
                members[stage_for_joiner(queues) if period else rng.randrange(stages)].add(peer)
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


def test_rebalancing_under_churn_is_worth_its_cost():
    for seed in range(3):
        still, moving = throughput(seed, None), throughput(seed, PERIOD)
        assert still < 0.9 < 0.93 < moving


@pytest.mark.parametrize("queues", [[{}], [{1: 3}]])
def test_single_stage_moves_nobody(queues):
    assert move(queues) is None and stage_for_joiner(queues) == 0
