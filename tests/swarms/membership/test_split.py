"""Peers of a lineage that gives way contribute what they trained since the split."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit.histories import digests_of, forks, played, short_rounds
from kit.scenarios import manifest_of
from thinwire.sims.scenario.faults import Fault

SPLIT, SECONDS = 6.0, 30.0


@pytest.mark.parametrize("on_split", ["merge", "discard"])
def test_minority_contributes_its_training_since_the_split_if_the_manifest_wants_it(on_split):
    """Two of five are cut off for half a minute and continue as a lineage; the honest weights are checked."""
    scenario = short_rounds(5, Fault(SPLIT, "partition", (3, 4), SECONDS), seconds=70.0)
    lines = f'on_split = "{on_split}"\n'
    scenario = replace(scenario, manifest=manifest_of("sync_every = 4\n", codec="fp32", exchange=lines))
    run = played(scenario)
    assert run.violations == () and not forks(run)
    merged = [event for event in run.journal.of("merged")]
    assert {event.peer for event in merged} == ({3, 4} if on_split == "merge" else set())
    assert all(event.fields["tokens"] > 0 for event in merged)
    assert digests_of(run, since=SPLIT + SECONDS + 25.0)
