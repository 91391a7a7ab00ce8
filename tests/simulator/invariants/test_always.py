"""Invariants that notice a single faulty peer among many healthy ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from thinwire.node.membership.presence import Presence
from thinwire.node.outer.outer_loop import OuterLoop
from thinwire.node.peer.lifecycle import PeerLifecycle
from thinwire.node.peer.peer_services import DuplicateKey
from thinwire.sims.engine.virtual_loop import HOST
from thinwire.sims.invariants.always import AlwaysInvariants
from thinwire.sims.network.network import EPOCH
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.simulation.world import simulate
from thinwire.sims.trials import trial
from thinwire.swarm.identity.errors import HintedError

ONE = 3
"""Index of the faulty peer."""


def _play(peers, **changes):
    return simulate(trial.trial(3, peers).with_(**changes), preset=trial.PACE, stall=trial.STALL, first=True).violations


def _ends_with(monkeypatch, error):
    run = PeerLifecycle.run

    async def short(self):
        if HOST.get() != ONE:
            return await run(self)
        task = asyncio.create_task(run(self))
        await asyncio.sleep(2.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise error

    monkeypatch.setattr(PeerLifecycle, "run", short)


@pytest.mark.parametrize("error", [HintedError("I give up", "do not"), DuplicateKey("somebody has my key", "nobody")])
def test_peer_that_gives_up_without_reason_is_a_violation(monkeypatch, error):
    _ends_with(monkeypatch, error)
    (found,) = _play(8, faults=())
    assert (found.oracle, found.peer) == ("crash", ONE) and str(error) in found.detail


@pytest.mark.trial
def test_peer_without_rounds_is_noticed_in_every_trial(monkeypatch):
    sync = OuterLoop.sync

    async def stuck(self, **given):
        if HOST.get() == ONE and self._session.replica.round >= 2:
            await asyncio.Event().wait()
        return await sync(self, **given)

    monkeypatch.setattr(OuterLoop, "sync", stuck)
    for seed in (0, 1):
        found = simulate(trial.trial(seed), preset=trial.PACE, stall=trial.STALL, first=True).violations
        assert found and (found[0].oracle, found[0].peer) == ("lockstep", ONE)


def test_peer_that_left_is_no_violation(monkeypatch):
    leave = Presence.leave

    async def slowly(self):
        await leave(self)
        await asyncio.sleep(2.0)

    monkeypatch.setattr(Presence, "leave", slowly)
    scenario = trial.trial(3, 4)
    manifest = scenario.manifest.replace('name = "trial"', 'name = "trial"\nrounds = 14')
    scenario = replace(scenario, manifest=manifest, faults=(), duration=40.0)
    run = simulate(scenario, preset=trial.PACE, stall=trial.STALL)
    assert run.violations == () and len([event for event in run.journal.events if event.name == "down"]) == 4


def test_error_of_unawaited_task_is_a_violation(monkeypatch):
    run, kept = PeerLifecycle.run, []

    async def helper():
        raise RuntimeError("a bug in the background")

    async def helped(self):
        kept.append(asyncio.create_task(helper()))
        return await run(self)

    monkeypatch.setattr(PeerLifecycle, "run", helped)
    (found,) = _play(12, duration=6.0)
    assert found.oracle == "crash" and "a bug in the background" in found.detail


def test_joiner_that_faults_keep_out_may_give_up():
    """It reports the reason and tries again; the others continue."""
    away = trial.trial(3, 6).with_(faults=(), duration=100.0)
    isolated = simulate(
        away.with_(faults=(Fault(0.2, "isolate", (5,), 75.0),)), preset=trial.PACE, stall=trial.STALL, first=True
    )
    reasons = [event.fields["reason"] for event in isolated.journal.events if event.name == "down" and event.peer == 5]
    assert reasons[0] != "the end" and not isolated.violations


def test_peer_that_is_down_at_its_leave_time_stays_away():
    scenario = trial.trial(3, 6).with_(faults=(Fault(6.0, "restart", (2,), 4.0),))
    peers = tuple(replace(peer, leave=8.0 if peer.index == 2 else None) for peer in scenario.peers)
    run = simulate(replace(scenario, peers=peers), preset=trial.PACE, stall=trial.STALL, first=True)
    assert [event.at for event in run.journal.events if event.peer == 2 and event.name == "up"] == [0.05]
    assert not run.violations


def test_peer_that_restarts_with_its_old_round_makes_no_progress():
    """Restarts are no progress, nor is a fetched state."""
    told, others = [], SimpleNamespace(frontier=6, together=False, turns=1)
    clocks = SimpleNamespace(wall=lambda: EPOCH, now=lambda: 0.0)
    machines = [
        SimpleNamespace(
            index=index, process=None, clocks=clocks, up=True, identity=SimpleNamespace(peer_id=bytes([index]))
        )
        for index in (0, 1)
    ]
    always_invariants = AlwaysInvariants(
        machines,
        (),
        others,
        lambda *said: told.append(said),
        preset=trial.PACE,
        settle=1e9,
        pause=14.0,
        window=0,
    )
    always_invariants._honest, always_invariants._bans, always_invariants._caps = (
        machines,
        lambda *given: None,
        lambda *given: None,
    )

    class PeerLifecycle:
        ready = True

        def __init__(self, round):
            self.peer = SimpleNamespace(replica=SimpleNamespace(round=round))

    machines[0].process = PeerLifecycle(5)
    for second in range(30):
        machines[1].process = PeerLifecycle(6) if second % 10 == 0 else machines[1].process if second % 10 < 5 else None
        always_invariants.look(float(second))
    assert [said[0] for said in told] == ["progress"]
    machines[0].process.peer.replica.round = 6
    always_invariants.look(30.0)
    assert always_invariants._moved_at == 30.0, (
        "a round of those who stayed is progress, though others had made it before"
    )
