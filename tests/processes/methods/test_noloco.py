"""Two daemons of a NoLoCo run, whose peers average in pairs."""

from __future__ import annotations

import pytest

SPARSE = 'codec = "topk(k=64,chunk=4096)|2bit|rice"'


@pytest.mark.parametrize(
    "outer, exchange, loss",
    [
        ("", "", 4.0),
        ("slow_weight_parts = 2", SPARSE, 5.0),  # six rounds send a tenth of the values at most
        ("slow_weight_parts = 2", f"{SPARSE}\ngossip_group_size = 9", 5.0),
    ],
    ids=["dense", "sparse", "sparse owners"],
)
def test_noloco_run_of_two_daemons_finishes(machine, outer, exchange, loss):
    here = machine(rounds=6, steps=20, method="noloco", outer=outer, exchange=exchange)
    founder = here.found("founder", "--wait-for", 2)
    other = here.join("other", founder.invite())
    assert (founder.exit(), other.exit()) == (0, 0)
    for daemon in (founder, other):
        rounds = daemon.of("round")
        assert rounds[-1]["round"] == 6 and any(event["contributors"] == 2 for event in rounds)
        assert rounds[-1]["loss"] < loss  # from 5.5
    for one, two in zip(founder.of("round"), other.of("round"), strict=True):
        if not one["contributors"] == two["contributors"] == 2:
            break  # a step alone makes them differ
        assert one["digest"] == two["digest"]  # with two peers, each pair has all of them, so they stay equal
    assert not founder.alarms() and not other.of("alarm")
