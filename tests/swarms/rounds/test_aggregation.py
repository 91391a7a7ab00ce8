"""Rounds that average direction and length separately (rda); the invariants compare the bits."""

from __future__ import annotations

import pytest
from kit.scenarios import events_of, manifest_of, play, swarm_of, violated
from thinwire.collectives.aggregation.means import mean
from thinwire.collectives.aggregation.rule_factory import RULES
from thinwire.sims.scenario.faults import Fault


def scenario(codec):
    toml = manifest_of("sync_every = 4", codec=codec, exchange='aggregation = "rda"')
    return swarm_of(4, toml, seed=1, seconds=16.0, parameters=5_000, faults=(Fault(5.0, "kill", (2,)),))


@pytest.mark.parametrize("codec", ["fp32", "int8(block=256)"])
def test_rda_rounds_apply_the_same_result_on_all_peers(codec):
    run = play(scenario(codec))
    rounds = [event.fields for event in events_of(run, "round")]
    assert max(one["round"] for one in rounds) >= 4 and {one["contributors"] for one in rounds} >= {3, 4}


def test_aggregate_invariant_finds_owner_that_takes_plain_mean(monkeypatch):
    rule, calls = RULES["rda"], []

    def sometimes(codec, payloads, weights, out):
        calls.append(True)
        (mean if len(calls) == 3 else rule)(codec, payloads, weights, out)

    monkeypatch.setitem(RULES, "rda", sometimes)
    found = violated(scenario("fp32"))
    assert len(calls) > 3 and "aggregate" in found
