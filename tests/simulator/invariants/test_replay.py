"""Replay of rounds: a wrong aggregate is found though all peers apply the same one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from thinwire.collectives.rounds.data_planes.owner_results import Reducer
from thinwire.collectives.rounds.round import Round
from thinwire.sims.simulation.world import SimWorld, simulate
from thinwire.sims.trials import families
from thinwire.sims.trials.families import FAMILIES
from thinwire.sims.trials.trial import PACE
from thinwire.swarm.manifest.parser import parse


def _first_counts_as_last(patch):
    """Owners average the last contribution twice, and the first one not at all."""
    result = Reducer.result

    def wrong(self, payloads, weights, size):
        return result(self, [payloads[-1], *payloads[1:]], weights, size)

    patch.setattr(Reducer, "result", wrong)


def _first_payload_is_the_last(patch):
    """All peers take the payload of the last contributor for that of the first one, too."""
    wait = Round.wait

    async def wrong(self):
        outcome = await wait(self)
        if outcome.commit is None:
            return outcome
        each = len(outcome.results) // len(outcome.commit.proposal.contributors)
        return replace(outcome, results=(*outcome.results[-each:], *outcome.results[each:]))

    patch.setattr(Round, "wait", wrong)


DENSE = ("diloco", "muloco", "powersgd", "eager", "co2", "buffered-async", "delayed-nesterov", "fragments")
SECONDS = {"fragments": 14.0, "sparse-fragments": 14.0}
"""Longer runs: rounds that overlap with much training are applied late."""

GATHERED = ("sparseloco", "demo", "sparse-fragments")


def _play(name, manifest=lambda text: text):
    scenario = families.scenario(name, 0)
    peers = tuple(replace(peer, join=0.05 * bool(peer.index)) for peer in scenario.peers)
    scenario = replace(
        scenario, peers=peers, faults=(), duration=SECONDS.get(name, 8.0), manifest=manifest(scenario.manifest)
    )
    return simulate(scenario, preset=PACE, first=True)


def _butterfly(text):
    """Let rounds be those in which the mistake is planted."""
    return re.sub(r'topology = "\w+"', 'topology = "butterfly"', text)


@pytest.mark.parametrize(
    ("name", "plant"),
    [*((name, _first_counts_as_last) for name in DENSE), *((name, _first_payload_is_the_last) for name in GATHERED)],
)
def test_wrong_aggregate_that_all_apply_is_found(monkeypatch, name, plant):
    plant(monkeypatch)
    assert {violation.oracle for violation in _play(name, _butterfly).violations} == {"aggregate"}


@pytest.mark.trial
def test_every_method_but_pairs_and_owner_residuals_is_replayed(monkeypatch):
    worlds, made = [], SimWorld.__init__

    def noting(self, *given, **named):
        made(self, *given, **named)
        worlds.append(self)

    monkeypatch.setattr(SimWorld, "__init__", noting)
    for name in FAMILIES:
        run = _play(name)
        assert run.violations == ()
        replays = sum(replay.replays for replay in worlds.pop().invariants.replays.values())
        manifest = parse(families.scenario(name, 0).manifest)
        if manifest.outer.gossip or manifest.exchange.collective == "sparse-butterfly":
            assert not replays
        else:
            assert replays >= len({event.fields["round"] for event in run.journal.of("round")}) > 0, name
