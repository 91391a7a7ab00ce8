"""Seeds with more faults at once than those of the families: kills, restarts, partitions, lossy and slow links, bad disks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from thinwire.sims.scenario.faults import HARSH, SEVERE, WIRE, Fault
from thinwire.sims.simulation.world import simulate
from thinwire.sims.trials import families, trial
from thinwire.sims.trials.trial import PACE

KINDS = (
    *("restart", "restart", "restart", "pause", "partition", "partition", "isolate", "one-way", "clog", "half-open"),
    *("reset", "slow-close", "swizzle-clog", "loss", "clock-jump", "slow-disk", "no-space", "bit-rot"),
)

LAST, SECONDS, STALL = 22.0, 50.0, 24.0
"""Second after which no fault is active, duration, and the longest time without a round."""


def _scenario(seed):
    """Return a scenario of a family with sixteen faults of KINDS and two kills."""
    names = [name for name in families.FAMILIES if name != "merge"]
    scenario, rng = families.scenario(names[seed % len(names)], seed), random.Random(f"harsh/{seed}")
    peers, faults = len(scenario.peers), []
    for _ in range(16):
        kind, at = rng.choice(KINDS), rng.uniform(3.0, 20.0)
        count = {
            "partition": rng.randint(1, peers // 2),
            **dict.fromkeys(("one-way", "clog", "half-open", "reset", "slow-close"), 2),
            "swizzle-clog": rng.randint(2, peers // 2),
            "loss": rng.randint(1, peers // 2),
        }.get(kind, 1)
        chosen = tuple(rng.sample(range(peers), count))
        amounts = {
            "loss": rng.uniform(0.05, 0.3),
            "clock-jump": rng.uniform(-3600, 3600),
            "slow-disk": rng.uniform(0.01, 1.0),
        }
        seconds = min(LAST - at, rng.uniform(0.3, 9.0))
        faults.append(Fault(at, kind, chosen, seconds, amounts.get(kind, 0.0)))
    faults += [Fault(rng.uniform(4, 18), "kill", (peer,)) for peer in rng.sample(range(2, peers), 2)]
    ordered = tuple(sorted(faults, key=lambda fault: (fault.at, fault.kind, fault.peers)))
    return replace(scenario, duration=SECONDS, interval=SECONDS, faults=ordered)


DEFAULT, TRIAL, SOAK = range(100, 103), range(103, 111), range(111, 1_111)
"""Seeds of the harsh mix in the default suite, with `make trial`, and with `make soak` (docs/scenarios.md)."""

DEPARTURES = (range(2), range(2, 10), range(10, 410))
"""Seeds of the mix with departures, in the same suites."""

TOGETHER = 20
"""Seeds in one test of the soak."""

MENDED = (31, 32, 175, 231, 235, 270, 348, 350, 394, 416, 459, 596, 671, 8174, 6000063, 6000193)
"""Seeds that failed before a rule.

31: a fragment whose members wait for another one delays no peer. 32: a member is banned after its disk has lost a
synced proposal and it has made another one. 175: a peer asks at once for a proof that the others are ahead if no
source has the results of its round any more. 231: fragments that have lost their results wait for a quorum at the
same time. 235: only requests without an answer lengthen the pauses between requests. 270: members without a quorum
give way to a lineage of strangers. 348: a returning peer whose lineage prevails over that of others does not search
for a newer state. 350: a restarted peer continues to dial the peers that it knew. 394: a suspicion that begins just
after a stall is not moved into the future. 416: a peer joins a lineage at once if only its founders can have the
results of the round. 459: a peer exceeds its own record from a time with a wrong clock. 596: a peer that begins a
round again gets the contributions again. 671: one round that lasts long because of an outage at most doubles the
patience. 8174: a peer follows all rounds of a fragment that it has missed in one turn. 6000063, 6000193: no round
is due once the only checkpoint that is left is damaged.
"""

MENDED_DEPARTURES = (132, 246, 356, 489, 512, 630, 842, 1213, 1298)
"""Seeds of the mix with departures that failed before a rule.

132: a returning peer with a checkpoint continues without others. 246: peers that are sought are dialled several at a time.
356: so do peers that all return without their founder. 489: forfeited training of the turn in progress counts in no later one.
512: peers found a lineage if no peer has the claims to the results that their round is bound to.
630: a peer that follows asks the first source that can be reached at once. 842: an accused peer gets an accusation that it
can check. 1213: a peer asks for the newer state soon if no voter of its round can be reached.
1298: no round is due once the only checkpoint that is left is damaged.
"""

MENDED_USUAL = (900132, 900269, 900958, 930165)
"""Seeds of the usual mix that failed before a rule.

900132: a joiner whose source is gone asks others after two patiences. 900269: a joiner is no healthy peer while it knows
only a contact that has died. 900958: a late peer that owes nothing does not count what it trains before its model follows
the round. 930165: one record of an earlier process, told by several peers, is no proof of another process.
"""


@pytest.mark.timeout(900)  # a failing seed is shrunk
@pytest.mark.parametrize(
    "seeds",
    [
        *(pytest.param([seed], id=str(seed)) for seed in DEFAULT),
        *(pytest.param([seed], id=str(seed), marks=pytest.mark.trial) for seed in TRIAL),
        *(
            pytest.param(range(first, first + TOGETHER), id=str(first), marks=pytest.mark.soak)
            for first in SOAK[::TOGETHER]
        ),
    ],
)
def test_family_under_the_harsh_mix_violates_no_invariant(seeds):
    failed = [found.text for seed in seeds if (found := trial.check_family(seed, "all", mix="harsh")) is not None]
    assert not failed, "\n".join(failed)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seeds",
    [
        *(pytest.param([seed], id=str(seed)) for seed in DEPARTURES[0]),
        *(pytest.param([seed], id=str(seed), marks=pytest.mark.trial) for seed in DEPARTURES[1]),
        *(
            pytest.param(range(first, first + TOGETHER), id=str(first), marks=pytest.mark.soak)
            for first in DEPARTURES[2][::TOGETHER]
        ),
    ],
)
def test_family_whose_peers_leave_for_good_violates_no_invariant(seeds):
    failed = [found.text for seed in seeds if (found := trial.check_family(seed, "all", mix="departures")) is not None]
    assert not failed, "\n".join(failed)


@pytest.mark.trial
@pytest.mark.parametrize("seed", MENDED_DEPARTURES)
def test_seed_that_once_failed_with_departures_violates_no_invariant(seed):
    assert trial.check_family(seed, "all", mix="departures", shrink=False) is None


@pytest.mark.parametrize("seed", MENDED)
def test_seed_that_once_failed_under_the_harsh_mix_violates_no_invariant(seed):
    assert trial.check_family(seed, "all", mix="harsh", shrink=False) is None


@pytest.mark.parametrize("seed", MENDED_USUAL)
def test_seed_that_once_failed_under_the_usual_mix_violates_no_invariant(seed):
    assert trial.check_family(seed, "all", shrink=False) is None


@pytest.mark.parametrize("seed", [910078, 910094, 910156])
def test_swarm_under_many_faults_at_once_violates_no_invariant(seed):
    run = simulate(_scenario(seed), preset=PACE, stall=STALL, first=True)
    assert run.violations == ()


def test_harsh_scenario_draws_severe_faults_that_end_before_the_quiet_part():
    scenarios = [families.harsh(name, seed) for seed in range(5) for name in ("diloco", "fragments")]
    faults = [fault for scenario in scenarios for fault in scenario.faults]
    assert all(0.0 < fault.at and fault.until <= families.HARSH_CALM + 1e-9 for fault in faults)
    kinds = {fault.kind for fault in faults}
    assert SEVERE.keys() <= kinds <= HARSH.keys() and len(faults) > 10 * len(scenarios)
    assert all(scenario.duration > families.HARSH_CALM + 25.0 for scenario in scenarios)


def test_departures_end_some_peers_the_founder_among_them_and_leave_two():
    scenarios = [families.departures("diloco", seed) for seed in range(40)]
    ends = []
    for scenario in scenarios:
        killed = {peer for fault in scenario.faults if fault.kind in ("kill", "majority-lost") for peer in fault.peers}
        left = {peer.index for peer in scenario.peers if peer.leave is not None}
        assert len(scenario.peers) - len(killed | left) >= 2 and not killed & left
        ends += ["left" if 0 in left else "killed" if 0 in killed else "stays"]
    assert set(ends) == {"left", "killed", "stays"}
    assert any(fault.kind == "lost-folder" and 0 in fault.peers for scenario in scenarios for fault in scenario.faults)
    kinds = {fault.kind for scenario in scenarios for fault in scenario.faults}
    assert kinds >= WIRE.keys()


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["0", "3", "--mix", "harsh"], ["diloco", "muloco", "noloco"]),
        (["7", "--mix", "harsh", "--family", "ring"], ["ring"]),
    ],
)
def test_trial_command_plays_the_harsh_mix(monkeypatch, words, names):
    seen = []

    def examine(scenario, *, command, **rest):
        seen.append((scenario, command(scenario.seed)))

    monkeypatch.setattr(trial, "examine", examine)
    assert trial.main(words) == 0
    first = int(words[0])
    assert [scenario for scenario, _ in seen] == [families.harsh(name, first + at) for at, name in enumerate(names)]
    text = "python -m thinwire.sims.trials.trial {} --family {} --mix harsh"
    assert [command for _, command in seen] == [text.format(first + at, name) for at, name in enumerate(names)]
