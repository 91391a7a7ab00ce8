"""Groups whose origin plans the ways of micro-batches, or moves hosts to where they are waited for, in virtual time."""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from thinwire.sims.faults import Fault
from thinwire.sims.seeds import PACE, STALL
from thinwire.sims.world import simulate

FILE = Path(__file__).with_name("test_group.py")


@pytest.fixture(scope="module")
def groups():
    spec = importlib.util.spec_from_file_location("sim_test_group", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def of(run, name, *peers):
    return [event for event in run.journal.events if event.name == name and (not peers or event.peer in peers)]


def tokens(run, *peers):
    return sum(event.fields["tokens"] for event in of(run, "round", *peers))


PLANNED = 'micro = 4\npaths = "planned"\nskip = 0.34\n'


def test_a_group_that_plans_and_goes_past_a_third_of_its_stages(groups):
    """Five hosts in two stages, of which each micro-batch visits one; one is killed, and the plan mended."""
    hosts = [groups.peer(index, stage=1 + index % 2, origin=1, join=0.2, step=0.1) for index in range(2, 7)]
    peers = (groups.peer(0), groups.peer(1, stage=0, origin=1, join=0.2, step=0.1), *hosts)
    run = simulate(
        groups.world(peers, faults=(Fault(9.0, "kill", (3,)),), pipeline=PLANNED, seconds=16.0),
        preset=PACE,
        stall=STALL,
    )
    assert run.violations == ()
    found = groups.agreed(run)
    for index in range(1, 7):
        assert {(turn - 1) % 3 for turn in found[index]} == {0 if index == 1 else 1 + index % 2}
    plans = of(run, "plan", 1)
    print([(e.at, e.fields) for e in plans])
    print(found)
    print([tokens(run, *who) for who in ((0,), (1,), (2, 4, 6), (3, 5))])


def test_hosts_move(groups):
    weak = [replace(groups.peer(index, join=0.2, step=0.1), memory=groups.WEAK) for index in (2, 3, 4)]
    weak[0] = replace(weak[0], step_seconds=1.0)
    late = replace(groups.peer(1, join=10.0, step=0.1), memory=groups.WEAK)
    run = simulate(
        groups.world((groups.peer(0), late, *weak), pipeline="rebalance = 8.0\n", seconds=40.0),
        preset=PACE,
        stall=STALL,
    )
    print(run.violations)
    for event in run.journal.events:
        if event.name in (
            "move",
            "host",
            "host lost",
            "up",
            "down",
            "ready",
            "uncommitted",
            "checkpoint",
            "stage without holder",
        ) or (event.name == "round" and event.peer == 4):
            print(
                round(event.at, 2),
                event.peer,
                event.name,
                {
                    k: str(v)[:40]
                    for k, v in event.fields.items()
                    if k
                    in (
                        "detail",
                        "steps",
                        "tokens",
                        "round",
                        "contributors",
                        "reason",
                        "peer",
                        "stage",
                        "tokens_per_second",
                    )
                },
            )
    groups.agreed(run)
    assert 0
