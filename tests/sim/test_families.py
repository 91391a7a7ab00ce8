"""Every outer method and every collective with churn from seeds: no oracle may have anything to say. See sims/families.py.

The oracle "agreement" holds all digests of a round against each other, of all methods but noloco, whose replicas differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from thinwire.node.lowrank import LowRankReplica
from thinwire.sims import families, seeds
from thinwire.sims.families import CHURN, FAMILIES
from thinwire.sims.faults import Fault
from thinwire.sims.world import simulate
from thinwire.swarm import manifest as manifests
from thinwire.swarm.methods import OUTER

TRIAL, SOAK = 2, 200
"""Seeds of each family with `make trial` and with `make soak`, the first ones included."""

TOGETHER = 20
"""Seeds in one test of the soak."""

OFTEN = ("merge", "powersgd")
"""Families with a seed in the default suite: those that no other test there plays with so much at once."""


def _portions(name: str) -> list[Any]:
    first = () if name in OFTEN else (pytest.mark.trial,)
    return [
        pytest.param(name, range(1), id=f"{name}-0", marks=first),
        pytest.param(name, range(1, TRIAL), id=f"{name}-1", marks=pytest.mark.trial),
        *(
            pytest.param(name, range(max(at, TRIAL), at + TOGETHER), id=f"{name}-soak-{at}", marks=pytest.mark.soak)
            for at in range(0, SOAK, TOGETHER)
        ),
    ]


@pytest.mark.timeout(900)  # a seed that fails is shrunk
@pytest.mark.parametrize(("name", "numbers"), [one for name in FAMILIES for one in _portions(name)])
def test_families(name: str, numbers: range) -> None:
    failed = [found.text for seed in numbers if (found := seeds.check_family(seed, name)) is not None]
    assert not failed, "\n".join(failed)


def test_coarse_roundings_are_no_lies() -> None:
    """Of a ring with 4 bits whose ballot adopts another's results: what each rounding takes is more than of other codecs."""
    assert seeds.check_family(58, "diloco") is None


@pytest.mark.trial
@pytest.mark.parametrize(("name", "seed"), [("streaming", 20), ("sparse-chains", 417)])
def test_a_round_that_only_the_dead_knew_is_no_mark_for_the_others(name: str, seed: int) -> None:
    """They go on from what they have, and that is progress, though they are not yet where the dead were."""
    assert seeds.check_family(seed, name) is None


def test_who_has_lost_its_state_keeps_nobody_from_following_those_who_have_one() -> None:
    """Of two members one comes back without a state, from a damaged disk; the other has gone on alone, and who is between
    waited for the first one's word for ever, while that one found no two that agreed.
    """
    assert seeds.check_family(17, "delayed-nesterov") is None


@pytest.mark.trial
def test_who_knocks_with_a_wrong_clock_gets_in_when_it_is_put_right() -> None:
    assert seeds.check_family(35, "hierarchy") is None


@pytest.mark.trial
def test_a_founder_whose_disk_has_flipped_a_bit_does_not_begin_its_run_anew_beside_the_others() -> None:
    assert seeds.check_family(126, "sieve") is None


def test_every_method_and_every_way_of_the_data_is_played() -> None:
    """By the manifests of the first seeds, and all of them have each kind of churn and somebody who comes late."""
    seen: dict[str, set[object]] = {"method": set(), "collective": set(), "topology": set(), "chained": set()}
    for name in FAMILIES:
        for seed in range(20):
            scenario = families.scenario(name, seed)
            manifest = manifests.parse(scenario.manifest)
            seen["method"].add(manifest.outer.method)
            seen["collective"].add(manifest.exchange.collective)
            seen["topology"].add(manifest.exchange.topology)
            seen["chained"].add((manifest.chained, manifest.sparse))
            kinds = [fault.kind for fault in scenario.faults]
            assert set(CHURN) <= set(kinds) and max(peer.join for peer in scenario.peers) >= 3.0
    assert seen["method"] == set(OUTER)
    assert seen["collective"] == {"butterfly", "gather", "sparse-butterfly"}
    assert seen["topology"] == {"butterfly", "ring", "hierarchy"}
    assert {(True, False), (True, True)} <= seen["chained"]


def test_a_replica_that_adds_something_of_its_own_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds are not deaf: the family whose steps the oracles cannot compute has its digests held against each other."""
    commit, replicas = LowRankReplica.commit, list[LowRankReplica]()

    def leaking(self: LowRankReplica, *given: Any, **rest: Any) -> Any:
        done = commit(self, *given, **rest)
        if not any(self is one for one in replicas):
            replicas.append(self)
        if replicas.index(self) == 1:
            self.theta[0] += np.float32(1e-3)
            self.seal()
        return done

    monkeypatch.setattr(LowRankReplica, "commit", leaking)
    found = simulate(families.scenario("powersgd", 0), preset=seeds.PACE, first=True).violations
    assert found and found[0].oracle == "agreement"


@pytest.mark.parametrize(
    ("name", "at", "away", "until", "ready"),
    [
        ("diloco", 0.25, 3.0, 12.0, range(1)),  # nobody that has come has got its state: it founds the run once more
        ("diloco", 1.5, 16.0, 26.0, range(2, 20)),  # they have gone on without it
        pytest.param("merge", 8.0, 3.0, 64.0, range(1, 2), marks=pytest.mark.trial),  # it has had a round alone
    ],
)
def test_a_founder_that_comes_back_before_its_first_round_with_others(
    name: str, at: float, away: float, until: float, ready: range
) -> None:
    """There is one run: whoever came meanwhile is in it, whether it had the founder's state or not."""
    scenario = families.scenario(name, 0)
    peers = tuple(replace(peer, join=0.05 * bool(peer.index)) for peer in scenario.peers)
    scenario = replace(scenario, peers=peers, faults=(Fault(at, "restart", (0,), away),), duration=until)
    run = simulate(scenario, preset=seeds.PACE, stall=FAMILIES[name].stall)
    assert run.violations == ()
    digests: dict[int, set[str]] = {}
    for event in run.journal.events:
        if event.name == "round":
            digests.setdefault(event.fields["round"], set()).add(event.fields["digest"])
    assert len(digests) >= 2 and all(len(found) == 1 for found in digests.values())
    first, then = [event.fields["round"] for event in run.journal.events if event.name == "ready" and not event.peer]
    assert first == 0 and then in ready
