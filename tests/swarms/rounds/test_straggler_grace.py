"""Swarms with computed grace: slightly late peers contribute, and no wait is in vain."""

from dataclasses import replace

import pytest
from kit.scenarios import identity_of, play, swarm_of
from thinwire.sims.network.regions import REGIONS
from thinwire.sims.simulation.world import SimWorld
from thinwire.swarm.membership.presets import LAN

REGION = next(iter(REGIONS))
STEPS = 20
FAST, LATE, SLOW = 0.25, 0.36, 1.0
"""Seconds of a step: a quorum trains for 5 s, one peer is 2.2 s later, one 15 s."""


def commits(monkeypatch, grace, *, seed=1, speeds=(FAST, FAST, FAST, LATE, SLOW), duration=60.0):
    """Return for each committed round the first time at which peers learned it, and its contributors."""
    seen, committed = {}, SimWorld.committed

    def note(self, machine, outcome):
        proposal = outcome.commit.proposal
        seen.setdefault(proposal.round, (self.loop.time(), {entry.peer for entry in proposal.contributors}))
        committed(self, machine, outcome)

    with monkeypatch.context() as patch:
        patch.setattr(SimWorld, "committed", note)
        toml = f'[outer]\nsync_every = {STEPS}\n[exchange]\ncodec = "int8(block=256)"\nstraggler_timeout = {grace}\n'
        joins = dict.fromkeys(range(len(speeds)), 0.0)
        scenario = swarm_of(
            len(speeds), toml, step=speeds, joins=joins, seed=seed, seconds=duration, region=REGION, up=2e6, down=8e6
        )
        play(replace(scenario, interval=5.0), preset=LAN, stall=None)
    return seen


def part(seen, index):
    """Return the share of rounds after the first three with a contribution of this peer."""
    rounds = [peers for round, (_, peers) in seen.items() if round > 3]
    return sum(identity_of(index).peer_id in peers for peers in rounds) / len(rounds)


def pace(seen):
    """Return the seconds from one commit to the next, after the first three."""
    times = [at for round, (at, _) in sorted(seen.items()) if round > 3]
    return (times[-1] - times[0]) / (len(times) - 1)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))])
def test_computed_grace_waits_for_slightly_late_peer_only(monkeypatch, seed):
    seen = commits(monkeypatch, '"auto"', seed=seed)
    assert part(seen, 3) == 1.0 and part(seen, 4) == 0.0
    assert STEPS * LATE <= pace(seen) < STEPS * LATE + 1.0


@pytest.mark.trial
def test_constant_grace_is_too_short_or_waits_only_twice_for_a_very_late_peer(monkeypatch):
    assert part(commits(monkeypatch, "1.0"), 3) == 0.0
    seen = commits(monkeypatch, "10.0", duration=100.0)
    assert STEPS * LATE <= pace(seen) < STEPS * LATE + 1.0


@pytest.mark.trial
def test_computed_grace_is_equal_for_equal_seeds(monkeypatch):
    assert commits(monkeypatch, '"auto"', seed=7) == commits(monkeypatch, '"auto"', seed=7)
