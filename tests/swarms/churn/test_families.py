"""Every outer method and collective with churn violates no invariant (sims/trials/families.py).

The invariant "agreement" compares all digests of a round, for all methods except noloco, whose replicas differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from thinwire.node.methods.powersgd.replica import PowerSGDReplica
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.simulation.world import simulate
from thinwire.sims.trials import families, trial
from thinwire.sims.trials.families import CHURN, FAMILIES
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.method_specs import registry

TRIAL, SOAK = 1, 120
"""Seeds of each family with `make trial` and with `make soak`, including the first ones."""

TOGETHER = 20
"""Seeds in one test of the soak."""

WAITS = {("delayed-nesterov", 112)}
"""Seeds in which the results of a vote are lost.

The members wait for `exchange.orphan` ("Lost results" in the limits of docs/design/agreement.md), and the round after it is
a moment later than `Family.stall` allows.
"""

OFTEN = ("merge", "powersgd", "translators")
"""Families with a seed in the default suite, because no other test there has as many faults, or address translators."""


def _portions(name: str) -> list[Any]:
    first = () if name in OFTEN else (pytest.mark.trial,)
    return [
        pytest.param(name, range(TRIAL), id=f"{name}-0", marks=first),
        *(
            pytest.param(name, range(max(at, TRIAL), at + TOGETHER), id=f"{name}-soak-{at}", marks=pytest.mark.soak)
            for at in range(0, SOAK, TOGETHER)
        ),
    ]


@pytest.mark.timeout(900)  # a failing seed is shrunk
@pytest.mark.parametrize(("name", "numbers"), [one for name in FAMILIES for one in _portions(name)])
def test_every_family_under_random_churn_violates_no_invariant(name: str, numbers: range) -> None:
    failed = {seed: found.text for seed in numbers if (found := trial.check_family(seed, name)) is not None}
    assert failed.keys() == {seed for family, seed in WAITS if family == name and seed in numbers}, failed
    assert all(": progress at " in text for text in failed.values()), failed


def test_adopted_result_with_coarse_rounding_is_no_violation() -> None:
    """Ring with 4 bits in which a ballot adopts another's results: rounding errors are larger than usual."""
    assert trial.check_family(58, "diloco") is None


@pytest.mark.trial
def test_survivors_may_repeat_a_round_that_only_dead_peers_knew() -> None:
    """They continue from their own state. This is progress, although dead peers were further."""
    assert trial.check_family(417, "sparse-fragments", shrink=False) is None


@pytest.mark.trial
def test_peers_do_not_wait_for_each_other_in_different_fragments() -> None:
    """After an outage, the peers stand in the turns of three fragments, and each lacks announcements of the others."""
    assert trial.check_family(20, "streaming", shrink=False) is None


def test_member_without_state_does_not_block_catch_up() -> None:
    """A member restarts without a state, while the other has continued alone.

    A peer in between waited for the claim of the first forever, and the first found no two peers that agree.
    """
    assert trial.check_family(17, "delayed-nesterov") is None


@pytest.mark.trial
def test_joiner_with_wrong_clock_is_admitted_after_correction() -> None:
    assert trial.check_family(35, "hierarchy") is None


@pytest.mark.trial
def test_founder_with_damaged_disk_does_not_restart_run_beside_the_others() -> None:
    assert trial.check_family(126, "sparse-butterfly") is None


def test_families_cover_every_method_collective_and_topology() -> None:
    """Checked with the manifests of the first seeds; each has all kinds of churn and a late peer."""
    seen: dict[str, set[object]] = {"method": set(), "collective": set(), "topology": set(), "fragmented": set()}
    for name in FAMILIES:
        for seed in range(20):
            scenario = families.scenario(name, seed)
            manifest = parse(scenario.manifest)
            seen["method"].add(manifest.outer.method)
            seen["collective"].add(manifest.exchange.collective)
            seen["topology"].add(manifest.exchange.topology)
            seen["fragmented"].add((manifest.fragmented, manifest.sparse))
            kinds = [fault.kind for fault in scenario.faults]
            assert set(CHURN) <= set(kinds) and max(peer.join for peer in scenario.peers) >= 3.0
    assert seen["method"] == set(registry.METHODS)
    assert seen["collective"] == {"butterfly", "all-gather", "sparse-butterfly"}
    assert seen["topology"] == {"butterfly", "ring", "hierarchy"}
    assert {(True, False), (True, True)} <= seen["fragmented"]


def test_agreement_invariant_finds_diverging_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the peers leaks a little in each step."""
    commit, replicas = PowerSGDReplica.commit, list[PowerSGDReplica]()

    def leaking(self: PowerSGDReplica, *given: Any, **rest: Any) -> Any:
        done = commit(self, *given, **rest)
        replays = not given[1]  # the replica of an invariant, which is no peer's
        if not replays and not any(self is one for one in replicas):
            replicas.append(self)
        if not replays and replicas.index(self) == 1:
            self.theta[0] += np.float32(1e-3)
            self.seal()
        return done

    monkeypatch.setattr(PowerSGDReplica, "commit", leaking)
    found = simulate(families.scenario("powersgd", 0), preset=trial.PACE).violations
    assert "agreement" in {violation.oracle for violation in found}


@pytest.mark.parametrize(
    ("name", "at", "away", "until", "ready"),
    [
        ("diloco", 0.25, 3.0, 12.0, range(1)),  # no present peer has the state yet: the founder founds the run again
        ("diloco", 1.5, 19.0, 29.0, range(2, 20)),  # they continued without it
        pytest.param(
            "merge", 8.0, 3.0, 64.0, range(1, 2), marks=pytest.mark.trial
        ),  # the founder has had a round alone
    ],
)
def test_founder_restart_before_first_shared_round_keeps_one_run(
    name: str, at: float, away: float, until: float, ready: range
) -> None:
    """All peers that joined meanwhile are in the one run, with or without the founder's state."""
    scenario = families.scenario(name, 0)
    peers = tuple(replace(peer, join=0.05 * bool(peer.index)) for peer in scenario.peers)
    scenario = replace(scenario, peers=peers, faults=(Fault(at, "restart", (0,), away),), duration=until)
    run = simulate(scenario, preset=trial.PACE, stall=FAMILIES[name].stall)
    assert run.violations == ()
    digests: dict[int, set[str]] = {}
    for event in run.journal.events:
        if event.name == "round":
            digests.setdefault(event.fields["round"], set()).add(event.fields["digest"])
    assert len(digests) >= 2 and all(len(found) == 1 for found in digests.values())
    first, then = [event.fields["round"] for event in run.journal.events if event.name == "ready" and not event.peer]
    assert first == 0 and then in ready
