"""Swarms with a peer that costs the others time: one that is always late, and one that takes data and never sends."""

from dataclasses import replace

import pytest
from kit.scenarios import events_of, identity_of, swarm_of
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.regions import REGIONS
from thinwire.sims.peers import learners
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.simulation.world import SimWorld, simulate
from thinwire.swarm.membership.presets import LAN

REGION = next(iter(REGIONS))
FAST, SLOW = 0.25, 0.875
STEPS = 20


def play(monkeypatch, speeds, *, outer="", exchange="", steps=STEPS, faults=(), duration=90.0, seed=1):
    """Return the run, and for each committed round the first time at which a peer learned it, and its Proposal."""
    seen, committed = {}, SimWorld.committed

    def note(self, machine, outcome):
        proposal = outcome.commit.proposal
        seen.setdefault(proposal.round, (self.loop.time(), proposal))
        committed(self, machine, outcome)

    toml = f"[outer]\n{outer}sync_every = {steps}\n[exchange]\n{exchange}"
    joins = dict.fromkeys(range(len(speeds)), 0.0)
    link = {"region": REGION, "up": 2e6, "down": 8e6}
    scenario = swarm_of(len(speeds), toml, step=speeds, joins=joins, seed=seed, seconds=duration, faults=faults, **link)
    with monkeypatch.context() as patch:
        patch.setattr(SimWorld, "committed", note)
        run = simulate(replace(scenario, interval=5.0), preset=LAN, stall=None)
    assert run.violations == ()
    return run, seen


def pace(seen, first):
    """Return the seconds from one commit to the next, from round `first` on."""
    times = [at for round, (at, _) in sorted(seen.items()) if round >= first]
    return (times[-1] - times[0]) / (len(times) - 1)


def contributes(proposal, index):
    return any(entry.peer == identity_of(index).peer_id for entry in proposal.contributors)


def reasons(proposal, index):
    return [entry.reason for entry in proposal.excluded if entry.peer == identity_of(index).peer_id]


UNHEALTHY = identity_of(5).peer_id.hex()
AUTO = 'straggler_timeout = "auto"\n'


@pytest.mark.trial
@pytest.mark.parametrize("exchange", ["", AUTO], ids=["fixed", "auto"])
def test_peer_that_is_always_late_costs_two_waits_and_is_named(monkeypatch, exchange):
    _, without = play(monkeypatch, (FAST,) * 5, exchange=exchange)
    run, seen = play(monkeypatch, (FAST,) * 5 + (SLOW,), exchange=exchange)
    late = [round for round, (_, proposal) in seen.items() if reasons(proposal, 5) == ["late"]]
    assert pace(seen, late[1]) < 1.1 * pace(without, late[1]), "after two late rounds nobody waits for it"
    told = [event for event in events_of(run, "unhealthy") if event.fields["peer"] == UNHEALTHY]
    assert {event.fields["cause"] for event in told} == {"slow"} and {event.peer for event in told} == set(range(5))
    assert all(event.at <= seen[10][0] for event in told)
    assert {event.fields["peer"] for event in events_of(run, "unhealthy")} == {UNHEALTHY}
    said = [event.fields["detail"] for event in events_of(run, "alarm", 5)]
    assert said[0].startswith("contributed to 0 of 6 rounds: this machine is 3.5 times slower than the others")
    assert 'outer.step_balancing = "by-speed"' in said[0] and not events_of(run, "alarm", *range(5))


def change_speed(monkeypatch, spells):
    """Set the seconds of a step of the slow peer: (first second, seconds of a step), in order of time."""
    steps = learners.Stopwatch.steps

    async def changing(self, n, stop):
        if self.step_seconds in (SLOW, *(step for _, step in spells)) and self.step_seconds != FAST:
            now = virtual_loop.current().time()
            self.step_seconds = [step for since, step in spells if since <= now][-1]
        return await steps(self, n, stop)

    monkeypatch.setattr(learners.Stopwatch, "steps", changing)


@pytest.mark.trial
@pytest.mark.parametrize("exchange", ["", AUTO], ids=["fixed", "auto"])
def test_peer_that_becomes_fast_again_contributes_within_three_rounds(monkeypatch, exchange):
    change_speed(monkeypatch, [(0.0, SLOW), (80.0, FAST + 1e-9)])
    _, seen = play(monkeypatch, (FAST,) * 5 + (SLOW,), exchange=exchange, duration=140.0)
    before = [round for round, (at, _) in seen.items() if at < 80.0]
    assert not any(contributes(seen[round][1], 5) for round in before)
    # The round in progress is lost: its steps began at the old speed.
    after = [round for round in sorted(seen) if round > before[-1] + 1]
    assert any(contributes(seen[round][1], 5) for round in after[:3])
    assert all(contributes(seen[round][1], 5) for round in after[3:])


@pytest.mark.trial
def test_peer_that_was_late_once_is_waited_for(monkeypatch):
    late_by_8 = FAST + 0.4
    change_speed(monkeypatch, [(0.0, late_by_8), (38.0, SLOW), (44.0, late_by_8)])
    run, seen = play(monkeypatch, (FAST,) * 5 + (SLOW,), duration=200.0)
    late = [round for round, (at, proposal) in seen.items() if at > 38.0 and reasons(proposal, 5)]
    assert len(late) == 1, "its steps of one round began in the slow spell"
    after = [round for round in sorted(seen) if round > late[0] + 1]
    assert len(after) > 5 and all(contributes(seen[round][1], 5) for round in after)
    assert "slow" not in {event.fields["cause"] for event in events_of(run, "unhealthy")}


COLLECTIVES = {
    "butterfly": {},
    "ring": {"exchange": 'topology = "ring"\n'},
    "all-gather": {"outer": 'method = "sparseloco"\n'},
    "sparse-butterfly": {"outer": 'method = "sparseloco"\n', "exchange": 'collective = "sparse-butterfly"\n'},
}


@pytest.mark.trial
@pytest.mark.parametrize("count", [4, pytest.param(6, marks=pytest.mark.soak)])
@pytest.mark.parametrize("how", COLLECTIVES)
def test_peer_that_takes_data_and_never_sends_is_put_out_after_three_rounds(monkeypatch, how, count):
    silent = Fault(5.0, "liar", (count - 1,), 1000.0, 0.0, "silent")
    options = dict(steps=10, duration=48.0, **COLLECTIVES[how])
    _, without = play(monkeypatch, (FAST,) * (count - 1), **options)
    run, seen = play(monkeypatch, (FAST,) * count, faults=[silent], **options)
    first = min(round for round, (_, proposal) in seen.items() if not contributes(proposal, count - 1))
    assert pace(seen, first + 3) < 1.2 * pace(without, first + 3)
    assert all(reasons(seen[round][1], count - 1) == ["withheld"] for round in range(first + 3, first + 10))
    for _, proposal in seen.values():
        honest = range(count - 1)
        assert not any(reasons(proposal, index) for index in honest) and all(contributes(proposal, i) for i in honest)
    named = events_of(run, "round", *range(count - 1))
    assert any("withheld" in event.fields["missing"].values() for event in named)
