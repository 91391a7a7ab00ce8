"""Swarms whose weak peers train a projection of the model, beside peers that train all of it."""

from __future__ import annotations

import pytest
from kit.groups import host, projected
from kit.scenarios import INT8, TOPK, events_of, play
from thinwire.sims.scenario.faults import Fault

WEAK = {2: 0, 3: 1, 4: 2}
"""Peer -> the stage that it holds."""


def by_round(run):
    """Return turn -> {peer: event}; each fragment has one state on all of its holders."""
    found = {}
    for event in events_of(run, "round"):
        found.setdefault(event.fields["round"], {})[event.peer] = event.fields
    for told in found.values():
        assert len({fields["digest"] for fields in told.values()}) == 1
    return found


@pytest.mark.parametrize("codec", [INT8, pytest.param(TOPK, marks=pytest.mark.trial)])
def test_projected_group_contributes_beside_full_replicas(codec):
    """Without the frozen rows of the newest outer step no host would be ready, nor the group in a round."""
    run = play(projected(seconds=11.0, codec=codec))
    found = by_round(run)
    assert max(found) >= 9
    for turn in range(4, max(found)):
        weak = next(one for one, stage in WEAK.items() if stage == (turn - 1) % 3)
        assert {0, 1, weak} == set(found[turn])
        assert found[turn][0]["contributors"] == 3
    losses = [found[turn][2]["loss"] for turn in sorted(found) if turn > 3 and 2 in found[turn]]
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.trial
def test_late_host_receives_frozen_rows():
    """A host is killed, another takes its stage, and the origin continues with it."""
    run = play(projected(host(5, 2, join=14.0), seconds=20.0, faults=(Fault(9.0, "kill", (4,)),)))
    found = by_round(run)
    last = [turn for turn in found if 5 in found[turn]]
    assert len(last) >= 2 and all(found[turn][0]["contributors"] == 3 for turn in last[1:])
