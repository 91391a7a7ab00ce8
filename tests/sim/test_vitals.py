"""What the simulation must notice of a single peer among many that are well."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from thinwire.node.duties import DuplicateKey
from thinwire.node.life import Life
from thinwire.node.presence import Presence
from thinwire.node.rounds import Rounds
from thinwire.sims import seeds
from thinwire.sims.clock import HOST
from thinwire.sims.faults import Fault
from thinwire.sims.network import EPOCH
from thinwire.sims.vitals import Vitals
from thinwire.sims.world import simulate
from thinwire.swarm.errors import HintedError

ONE = 3
"""The peer that something is wrong with."""


def _play(peers, **changes):
    return simulate(seeds.trial(3, peers).with_(**changes), preset=seeds.PACE, stall=seeds.STALL, first=True).violations


def _ends_with(monkeypatch, error):
    run = Life.run

    async def short(self):
        if HOST.get() != ONE:
            return await run(self)
        task = asyncio.create_task(run(self))
        await asyncio.sleep(2.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise error

    monkeypatch.setattr(Life, "run", short)


@pytest.mark.parametrize("error", [HintedError("I give up", "do not"), DuplicateKey("somebody has my key", "nobody")])
def test_a_peer_that_gives_up_without_a_reason_is_a_failure(monkeypatch, error):
    _ends_with(monkeypatch, error)
    (found,) = _play(8, faults=())
    assert (found.oracle, found.peer) == ("crash", ONE) and str(error) in found.detail


@pytest.mark.trial
def test_a_peer_that_makes_no_rounds_any_more_is_noticed_in_every_trial(monkeypatch):
    sync = Rounds.sync

    async def stuck(self, **given):
        if HOST.get() == ONE and self._session.replica.round >= 2:
            await asyncio.Event().wait()
        return await sync(self, **given)

    monkeypatch.setattr(Rounds, "sync", stuck)
    for seed in (0, 1):
        found = simulate(seeds.trial(seed), preset=seeds.PACE, stall=seeds.STALL, first=True).violations
        assert found and (found[0].oracle, found[0].peer) == ("lockstep", ONE)


def test_who_has_said_goodbye_is_missed_by_nobody(monkeypatch):
    leave = Presence.leave

    async def slowly(self):
        await leave(self)
        await asyncio.sleep(2.0)

    monkeypatch.setattr(Presence, "leave", slowly)
    scenario = seeds.trial(3, 4)
    manifest = scenario.manifest.replace('name = "trial"', 'name = "trial"\nrounds = 14')
    scenario = replace(scenario, manifest=manifest, faults=(), duration=40.0)
    run = simulate(scenario, preset=seeds.PACE, stall=seeds.STALL)
    assert run.violations == () and len([event for event in run.journal.events if event.name == "down"]) == 4


def test_the_error_of_a_helper_that_nobody_awaits_is_noticed_among_many_tasks(monkeypatch):
    run, kept = Life.run, []

    async def helper():
        raise RuntimeError("a bug in the background")

    async def helped(self):
        kept.append(asyncio.create_task(helper()))
        return await run(self)

    monkeypatch.setattr(Life, "run", helped)
    (found,) = _play(12, duration=6.0)
    assert found.oracle == "crash" and "a bug in the background" in found.detail


def test_who_cannot_get_in_because_of_a_fault_may_give_up():
    """It says why, and tries again; the others go on."""
    away = seeds.trial(3, 6).with_(faults=(), duration=100.0)
    isolated = simulate(
        away.with_(faults=(Fault(0.2, "isolate", (5,), 75.0),)), preset=seeds.PACE, stall=seeds.STALL, first=True
    )
    reasons = [event.fields["reason"] for event in isolated.journal.events if event.name == "down" and event.peer == 5]
    assert reasons[0] != "the end" and not isolated.violations


def test_who_is_down_when_it_should_leave_does_not_come_back():
    scenario = seeds.trial(3, 6).with_(faults=(Fault(6.0, "restart", (2,), 4.0),))
    peers = tuple(replace(peer, leave=8.0 if peer.index == 2 else None) for peer in scenario.peers)
    run = simulate(replace(scenario, peers=peers), preset=seeds.PACE, stall=seeds.STALL, first=True)
    assert [event.at for event in run.journal.events if event.peer == 2 and event.name == "up"] == [0.05]
    assert not run.violations


def test_who_dies_and_comes_back_with_its_round_makes_no_progress():
    """However often: as little as who fetches a state."""
    told, others = [], SimpleNamespace(frontier=6, together=False, turns=1)
    clocks = SimpleNamespace(wall=lambda: EPOCH, now=lambda: 0.0)
    machines = [
        SimpleNamespace(
            index=index, process=None, clocks=clocks, up=True, identity=SimpleNamespace(peer_id=bytes([index]))
        )
        for index in (0, 1)
    ]
    vitals = Vitals(
        machines,
        (),
        others,
        lambda *said: told.append(said),
        preset=seeds.PACE,
        settle=1e9,
        pause=14.0,
        window=0,
    )
    vitals._honest, vitals._bans, vitals._caps = machines, lambda *given: None, lambda *given: None

    class Life:
        ready = True

        def __init__(self, round):
            self.peer = SimpleNamespace(replica=SimpleNamespace(round=round))

    machines[0].process = Life(5)
    for second in range(30):
        machines[1].process = Life(6) if second % 10 == 0 else machines[1].process if second % 10 < 5 else None
        vitals.look(float(second))
    assert [said[0] for said in told] == ["progress"]
    machines[0].process.peer.replica.round = 6
    vitals.look(30.0)
    assert vitals._moved_at == 30.0, "a round of those who stayed is progress, though others had made it before"
