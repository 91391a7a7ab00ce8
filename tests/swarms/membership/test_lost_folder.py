"""A peer that comes back with its key but without its run folder has forgotten its votes: it is no member any more."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from kit.histories import digests_of, forks
from kit.scenarios import events_of, manifest_of, play, swarm_of
from thinwire.node.peer import admission
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.simulation.world import SimWorld, simulate
from thinwire.sims.trials.trial import PACE

ROUND = 5
"""The round that is decided twice if a peer without its folder votes again."""


class _TwoQuorums:
    """Arranges faults in a swarm of three peers, so that two quorums of round ROUND have one peer in common.

    One peer, `away`, is cut off before the round. The others commit it. Then the first that did is cut off, and the peer
    that voted with it is killed, loses its folder, and meets `away`, which knows nothing of the round.
    """

    def __init__(self, away: int, *, wiped: bool = True) -> None:
        self.away, self._wiped = away, wiped
        self._applied: set[int] = set()
        self._decided = False

    def event(self, world: Any, index: int, kind: str, fields: Any) -> None:
        """Observe an event of the peer `index`."""
        if kind == "round" and fields["round"] == ROUND - 1 and len(self._applied) < 3:
            self._applied.add(index)
            if len(self._applied) == 3:
                self._part(world, self.away)
        if kind == "phase" and fields == {"round": ROUND, "phase": "commit"} and not self._decided:
            self._decided = True
            (voter,) = {0, 1, 2} - {index, self.away}
            self._part(world, index)
            world.net.at(world.loop.time() + 0.001, lambda: self._lose_folder(world, voter))
            world.net.at(world.loop.time() + 0.8, lambda: self._part(world, self.away, end=True))
            world.net.at(world.loop.time() + 16.0, lambda: self._part(world, index, end=True))

    def _part(self, world: Any, index: int, *, end: bool = False) -> None:
        ids = [machine.identity.peer_id for machine in world.machines]
        world.net.partition([[ids.pop(index)], ids], end=end)

    def _lose_folder(self, world: Any, index: int) -> None:
        machine = world.machines[index]
        machine.kill()
        if self._wiped:
            machine.lose_disk()
        world.net.at(world.loop.time() + 0.3, machine.boot)


@pytest.mark.parametrize("disk", ["whole", "full"])
@pytest.mark.parametrize("away", range(3))
def test_member_without_its_folder_does_not_vote_twice(monkeypatch, away, disk):
    """With a full disk the folder was never written, so the peer that restarts has lost it as well."""
    event, plot = SimWorld.event, _TwoQuorums(away)

    def observe(self, machine, kind, fields):
        event(self, machine, kind, fields)
        plot.event(self, machine.index, kind, fields)

    monkeypatch.setattr(SimWorld, "event", observe)
    faults = [Fault(0.0, "no-space", (index,), 200.0) for index in range(1, 3) if disk == "full"]
    scenario = swarm_of(3, manifest_of("sync_every = 4\n", codec="fp32"), seconds=50.0, seed=4, faults=faults)
    run = simulate(scenario, preset=PACE)
    # The cuts are not in the list of faults, so the invariants of membership do not know them.
    assert not {"agreement", "aggregate"} & {violation.oracle for violation in run.violations}
    assert max(slot.round for slot in digests_of(run)) > ROUND + 4 and not forks(run)


@pytest.mark.parametrize("away", range(3))
def test_member_without_its_manifest_file_does_not_vote_twice(monkeypatch, away):
    """The disk was full only while the manifest was written. The life is there: an earlier process may have voted."""
    event, plot = SimWorld.event, _TwoQuorums(away, wiped=False)

    def observe(self, machine, kind, fields):
        event(self, machine, kind, fields)
        plot.event(self, machine.index, kind, fields)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SimWorld, "event", observe)
    monkeypatch.setattr(admission, "replace_file", refuse)
    run = simulate(swarm_of(3, manifest_of("sync_every = 4\n", codec="fp32"), seconds=50.0, seed=4), preset=PACE)
    assert not {"agreement", "aggregate"} & {violation.oracle for violation in run.violations}


def test_peer_that_lost_its_folder_is_a_member_again_after_a_round():
    faults = [Fault(8.0, "lost-folder", (2,), 3.0)]
    run = play(swarm_of(4, manifest_of("sync_every = 4\n"), seconds=40.0, faults=faults))
    late = [one for one in events_of(run, "round", 0) if one.at > 20.0]
    assert late and all(len(one.fields["members"]) == 4 for one in late)
