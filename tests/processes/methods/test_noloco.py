"""Two daemons of a NoLoCo run, whose peers average in pairs."""

from __future__ import annotations


def test_noloco_run_of_two_daemons_finishes(machine):
    here = machine(rounds=6, steps=20, method="noloco")
    founder = here.found("founder", "--wait-for", 2)
    other = here.join("other", founder.invite())
    assert (founder.exit(), other.exit()) == (0, 0)
    for daemon in (founder, other):
        rounds = daemon.of("round")
        assert rounds[-1]["round"] == 6 and any(event["contributors"] == 2 for event in rounds)
        assert rounds[-1]["loss"] < 4.0  # from 5.5
    for one, two in zip(founder.of("round"), other.of("round"), strict=True):
        if not one["contributors"] == two["contributors"] == 2:
            break  # a step alone makes them differ
        assert one["digest"] == two["digest"]  # with two peers, each pair has all of them, so they stay equal
    assert not founder.alarms() and not other.of("alarm")
