"""Swarms whose grace is computed, in virtual time: who is a little late is in, and nobody is waited for in vain."""

import pytest
from thinwire.sims.regions import REGIONS
from thinwire.sims.scenario import PeerSpec, Scenario
from thinwire.sims.world import SimWorld, _identity, simulate
from thinwire.swarm.preset import LAN

STEPS = 20
FAST, LATE, SLOW = 0.25, 0.36, 1.0
"""Seconds of a step: a quorum trains for 5 s, one comes 2.2 s later, one 15 s later."""


def commits(monkeypatch, grace, *, seed=1, speeds=(FAST, FAST, FAST, LATE, SLOW), duration=60.0):
    """Of every round that committed: when peers learned it first, and whose contributions are in it."""
    seen, committed = {}, SimWorld.committed

    def note(self, machine, outcome):
        opened = outcome.commit.opened
        seen.setdefault(opened.round, (self.loop.time(), {entry.peer for entry in opened.contributors}))
        committed(self, machine, outcome)

    with monkeypatch.context() as patch:
        patch.setattr(SimWorld, "committed", note)
        toml = f'[outer]\nsteps = {STEPS}\n[exchange]\ncodec = "int8(block=256)"\ngrace = {grace}\n'
        region = next(iter(REGIONS))
        specs = tuple(PeerSpec(i, f"p{i}", region, step_seconds=one, up=2e6, down=8e6) for i, one in enumerate(speeds))
        run = simulate(Scenario("grace", seed, duration, toml, specs, parameters=9_000), preset=LAN)
    assert not run.violations
    return seen


def part(seen, index):
    """Of the rounds after the first three, the part that has this peer's contribution."""
    rounds = [peers for round, (_, peers) in seen.items() if round > 3]
    return sum(_identity(index).peer_id in peers for peers in rounds) / len(rounds)


def pace(seen):
    """Seconds from one commit to the next, after the first three."""
    times = [at for round, (at, _) in sorted(seen.items()) if round > 3]
    return (times[-1] - times[0]) / (len(times) - 1)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))])
def test_who_is_a_little_late_is_waited_for_and_who_is_much_later_is_not(monkeypatch, seed):
    seen = commits(monkeypatch, '"auto"', seed=seed)
    assert part(seen, 3) == 1.0 and part(seen, 4) == 0.0
    assert STEPS * LATE <= pace(seen) < STEPS * LATE + 1.0


@pytest.mark.trial
def test_a_constant_loses_the_one_or_waits_for_the_other(monkeypatch):
    assert part(commits(monkeypatch, "1.0"), 3) == 0.0
    assert pace(commits(monkeypatch, "10.0", duration=100.0)) > STEPS * LATE + 2.0


@pytest.mark.trial
def test_the_same_seed_gives_the_same_rounds(monkeypatch):
    assert commits(monkeypatch, '"auto"', seed=7) == commits(monkeypatch, '"auto"', seed=7)
