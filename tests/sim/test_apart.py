"""Rounds that average direction and length apart, in virtual time; the oracles compute the same rule and compare bits."""

from __future__ import annotations

import pytest
from thinwire.collectives.aggregate import RULES, mean
from thinwire.sims.faults import Fault
from thinwire.sims.scenario import PeerSpec, Scenario
from thinwire.sims.seeds import PACE, STALL
from thinwire.sims.world import simulate


def world(codec):
    peers = tuple(
        PeerSpec(i, f"peer-{i}", "Oregon", step_seconds=0.5, up=2.5e6, down=37.5e6, join=0.05 * bool(i))
        for i in range(4)
    )
    exchange = f'codec = "{codec}"\naggregation = "rda"\ngrace = 1.0\nmax_weight = 100000\n'
    faults = (Fault(5.0, "kill", (2,)),)
    return Scenario(
        "apart",
        1,
        16.0,
        f"[outer]\nsteps = 4\n[exchange]\n{exchange}",
        peers,
        parameters=5_000,
        faults=faults,
        interval=16.0,
    )


@pytest.mark.parametrize("codec", ["fp32", "int8(block=256)"])
def test_all_apply_the_same(codec):
    run = simulate(world(codec), preset=PACE, stall=STALL)
    assert run.violations == ()
    rounds = [event.fields for event in run.journal.events if event.name == "round"]
    assert max(one["round"] for one in rounds) >= 4 and {one["contributors"] for one in rounds} >= {3, 4}


def test_an_owner_that_takes_the_plain_mean_is_seen(monkeypatch):
    rule, calls = RULES["rda"], []

    def sometimes(codec, payloads, weights, out):
        calls.append(True)
        (mean if len(calls) == 3 else rule)(codec, payloads, weights, out)

    monkeypatch.setitem(RULES, "rda", sometimes)
    run = simulate(world("fp32"), preset=PACE, stall=STALL)
    assert len(calls) > 3 and "aggregate" in {violation.oracle for violation in run.violations}
