"""A peer that comes back with its key but without its run folder has forgotten its votes: it is no member any more."""

from __future__ import annotations

import errno

import pytest
from kit.histories import digests_of, forks
from kit.planted.two_quorums import ROUND, TwoQuorums, arrange
from kit.scenarios import events_of, manifest_of, play, swarm_of
from thinwire.node.peer import admission
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.simulation.world import simulate
from thinwire.sims.trials.trial import PACE


@pytest.mark.parametrize("disk", ["whole", "full"])
@pytest.mark.parametrize("away", range(3))
def test_member_without_its_folder_does_not_vote_twice(monkeypatch, away, disk):
    """With a full disk the folder was never written, so the peer that restarts has lost it as well."""
    arrange(monkeypatch, TwoQuorums(away, "loses its folder"))
    faults = [Fault(0.0, "no-space", (index,), 200.0) for index in range(1, 3) if disk == "full"]
    scenario = swarm_of(3, manifest_of("sync_every = 4\n", codec="fp32"), seconds=50.0, seed=4, faults=faults)
    run = simulate(scenario, preset=PACE)
    assert not {"agreement", "aggregate"} & {violation.oracle for violation in run.violations}
    assert max(slot.round for slot in digests_of(run)) > ROUND + 4 and not forks(run)


@pytest.mark.parametrize("away", range(3))
def test_member_without_its_manifest_file_does_not_vote_twice(monkeypatch, away):
    """The disk was full only while the manifest was written. The life is there: an earlier process may have voted."""

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    arrange(monkeypatch, TwoQuorums(away, "restarts"))
    monkeypatch.setattr(admission, "replace_file", refuse)
    run = simulate(swarm_of(3, manifest_of("sync_every = 4\n", codec="fp32"), seconds=50.0, seed=4), preset=PACE)
    assert not {"agreement", "aggregate"} & {violation.oracle for violation in run.violations}


def test_peer_that_lost_its_folder_is_a_member_again_after_a_round():
    faults = [Fault(8.0, "lost-folder", (2,), 3.0)]
    run = play(swarm_of(4, manifest_of("sync_every = 4\n"), seconds=40.0, faults=faults))
    late = [one for one in events_of(run, "round", 0) if one.at > 20.0]
    assert late and all(len(one.fields["members"]) == 4 for one in late)
