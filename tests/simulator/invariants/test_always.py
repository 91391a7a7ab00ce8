"""Invariants that notice a single faulty peer among many healthy ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from thinwire.node.membership.join import DuplicateKey
from thinwire.node.membership.presence import Presence
from thinwire.node.outer.outer_loop import OuterLoop
from thinwire.node.peer.lifecycle import PeerLifecycle
from thinwire.sims.engine.virtual_loop import HOST
from thinwire.sims.invariants.always import BAN_SECONDS, TWICE, AlwaysInvariants
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
        if HOST.get() == ONE and self.session.replica.round >= 2:
            await asyncio.Event().wait()
        return await sync(self, **given)

    monkeypatch.setattr(OuterLoop, "sync", stuck)
    for seed in (0, 1):
        found = simulate(trial.trial(seed, 12), preset=trial.PACE, stall=trial.STALL, first=True).violations
        assert found and (found[0].oracle, found[0].peer) == ("lockstep", ONE)


def test_peer_that_gives_up_again_and_again_does_not_hide_a_standstill_of_the_others(monkeypatch):
    lifecycle = PeerLifecycle.run

    async def run(self):
        if HOST.get() == ONE:
            raise HintedError("I give up", "do not")
        return await lifecycle(self)

    async def stuck(self, **given):
        await asyncio.Event().wait()

    monkeypatch.setattr(PeerLifecycle, "run", run)

    monkeypatch.setattr(OuterLoop, "sync", stuck)
    run = simulate(trial.trial(3, 6).with_(faults=()), preset=trial.PACE, stall=8.0)
    assert {violation.oracle for violation in run.violations} == {"crash", "progress"}


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


def machine(index, process):
    """Return a machine that is up, with the clock of the others."""
    return SimpleNamespace(
        index=index,
        lie="",
        process=process,
        clocks=SimpleNamespace(jump=0.0),
        up=True,
        frozen=False,
        holds=True,
        gone=False,
        address=f"10.0.0.{index}:7000",
        identity=SimpleNamespace(peer_id=bytes([index])),
    )


def test_peer_that_restarts_with_its_old_round_makes_no_progress():
    """Restarts are no progress, nor is a fetched state."""
    swarm = _Swarm(2, frontier=6, together=False, pause=14.0)
    one, other = swarm.machines

    def restarted(round):
        process = swarm.process()
        process.peer.replica.round = round
        return process

    one.process, other.process = restarted(5), None
    for second in range(30):
        other.process = restarted(6) if second % 10 == 0 else other.process if second % 10 < 5 else None
        swarm.invariants.look(float(second))
    assert [oracle for oracle, _ in swarm.told] == ["progress"]
    one.process.peer.replica.round = 6
    swarm.invariants.look(30.0)
    swarm.invariants.look(43.0)
    assert [oracle for oracle, _ in swarm.told] == ["progress"], (
        "a round of those who stayed is progress, although others made it before"
    )
    swarm.invariants.look(45.0)
    assert [oracle for oracle, _ in swarm.told] == ["progress"] * 2


class _Swarm:
    """Machines without processes' contents, their invariants, and the violations: (oracle, peer)."""

    def __init__(self, peers, frontier=0, settle=1e9, honest=None, pause=1e9, together=True, **more):
        self.told = []
        self.others = SimpleNamespace(frontier=frontier, together=together, turns=1)
        self.machines = [machine(index, self.process()) for index in range(peers)]
        self.invariants = AlwaysInvariants(
            self.machines,
            range(peers) if honest is None else honest,
            self.others,
            lambda oracle, peer, detail: self.told.append((oracle, peer)),
            preset=trial.PACE,
            settle=settle,
            pause=pause,
            window=0,
            **more,
        )

    class Process:
        ready, transport, invite, lifecycle = True, None, None, None

        def __init__(self, peer):
            self.peer = peer

    def process(self):
        presence = SimpleNamespace(send_queue=SimpleNamespace(sizes=dict))
        roster = SimpleNamespace(peers=SimpleNamespace(banned={}), left=False, queued=0)
        session = SimpleNamespace(roster=roster, sizes=dict, presence=presence)
        replica = SimpleNamespace(round=0, lineage=b"first")
        replica.each = lambda layout: [(0, replica, layout)]
        peer = SimpleNamespace(session=session, replica=replica, layout=None)
        return self.Process(peer)

    def set(self, *rounds):
        """Set the round of each peer."""
        for machine, number in zip(self.machines, rounds, strict=True):
            machine.process.peer.replica.round = number
        self.others.frontier = max(rounds)


@pytest.mark.parametrize("rounds", [4, 5])
@pytest.mark.parametrize("at", [9.0, 11.0])
@pytest.mark.parametrize("lineages", [{}, {0: b"first", 1: b"first"}, {0: b"new", 1: b"new", 2: b"new"}, {1: b"new"}])
def test_two_lineages_are_a_violation_five_rounds_and_ten_seconds_after_the_last_fault(rounds, at, lineages):
    swarm = _Swarm(3)
    swarm.invariants.disturb(0.0)
    for index, name in lineages.items():
        swarm.machines[index].process.peer.replica.lineage = name
    swarm.set(rounds, rounds, rounds)
    swarm.invariants.look(at)
    late = rounds == 5 and at == 11.0
    assert swarm.told == ([("lineage", -1)] if late and lineages == {1: b"new"} else [])


@pytest.mark.parametrize("held", [True, False])
def test_swarm_stands_still_without_a_violation_if_no_running_peer_has_the_state(held):
    swarm = _Swarm(3, pause=14.0)
    swarm.machines[0].up, swarm.machines[0].process = False, None
    for machine in swarm.machines:
        machine.holds = held and machine.index == 1
    for machine in swarm.machines[1:]:
        machine.process.ready = False
    for second in range(30):
        swarm.invariants.look(float(second))
    assert bool(swarm.told) == held
    if held:
        assert {"progress"} == {oracle for oracle, _ in swarm.told} and {peer for _, peer in swarm.told} == {-1, 1, 2}


@pytest.mark.parametrize(("seed", "told"), [("10.0.0.0:7000", True), ("10.0.0.2:7000", False)])
def test_newcomer_need_not_get_in_if_all_peers_of_its_invite_are_gone(seed, told):
    swarm = _Swarm(3, pause=14.0)
    swarm.machines[2].up, swarm.machines[2].process = False, None
    newcomer = swarm.machines[1]
    newcomer.process.ready = newcomer.holds = False
    newcomer.process.invite = SimpleNamespace(seeds=(SimpleNamespace(address=seed),))
    for second in range(30):
        swarm.invariants.look(float(second))
    assert (("progress", 1) in swarm.told) == told


def test_newcomer_whose_invite_names_gone_peers_only_has_the_usual_time_after_its_restart():
    """Although its process was ready before it gave up: that was without a state."""
    swarm = _Swarm(3, pause=14.0)
    swarm.machines[2].up, swarm.machines[2].process = False, None
    newcomer = swarm.machines[1]
    newcomer.holds = False
    newcomer.process.invite = SimpleNamespace(seeds=(SimpleNamespace(address=swarm.machines[2].address),))
    for second in range(30):
        swarm.invariants.look(float(second))
    newcomer.process = swarm.process()
    newcomer.process.ready = False
    swarm.invariants.look(30.0)
    assert ("progress", 1) not in swarm.told
    swarm.invariants.look(45.0)
    assert ("progress", 1) in swarm.told


@pytest.mark.parametrize("gone", [True, False])
def test_peer_that_leaves_need_not_keep_up(gone):
    swarm = _Swarm(3)
    swarm.invariants.disturb(0.0)
    swarm.machines[1].gone = gone
    swarm.machines[1].process.peer.replica.lineage = b"new"
    swarm.set(60, 1, 60)
    swarm.invariants.look(100.0)
    assert set(swarm.told) == (set() if gone else {("lockstep", 1), ("lineage", -1)})


def test_lineage_that_is_founded_long_after_the_last_fault_is_a_violation():
    swarm = _Swarm(3, settle=1.0)
    swarm.invariants.touch((), 5.0)
    swarm.invariants.founded(swarm.machines[0], "3f9a", 14.0)
    assert swarm.told == []
    swarm.invariants.founded(swarm.machines[2], "77aa", 26.0)
    swarm.invariants.founded(swarm.machines[1], "77aa", 26.0)
    assert swarm.told == [("lineage", 2), ("lineage", 1)]


@pytest.mark.parametrize(("at", "started", "told"), [(14.9, 0.0, True), (15.1, 0.0, False), (14.9, 12.5, False)])
def test_lineage_that_is_founded_soon_after_its_round_is_a_violation_for_peers_that_have_not_restarted(
    at, started, told
):
    swarm = _Swarm(3, settle=1e6, orphan=10.0)
    for index, second in ((1, 10.0), (0, 12.0)):
        swarm.invariants.committed(swarm.machines[index], (0, 7), second)
    swarm.invariants.change([0], started)
    swarm.invariants.founded(swarm.machines[0], "3f9a", at, (0, 7))
    swarm.invariants.founded(swarm.machines[0], "3f9a", at, (1, 7))
    assert swarm.told == [("lineage", 0)] * told


def test_peer_that_stays_in_its_round_is_a_violation_also_during_a_fault():
    """A stopped process is excused, and so is a new one."""
    swarm = _Swarm(4, still=29.0)
    swarm.invariants.disturb(1e6)
    for second in range(100):
        swarm.set(second, 7, 7, 7)
        swarm.machines[2].frozen = second % 20 == 10
        if second % 20 == 10:
            swarm.machines[3].process = swarm.process()
        swarm.invariants.look(float(second))
    assert set(swarm.told) == {("standstill", 1)}


def test_peer_that_stays_in_its_round_is_a_violation_only_for_long_enough_after_a_fault_that_affected_it():
    """Its wait for a quorum may have begun again at the end of the fault."""
    swarm, told = _Swarm(3, still=29.0), []
    swarm.invariants.disturb(1e6)
    swarm.invariants.touch([0, 1], 20.0)
    swarm.invariants.touch([0], 25.0)
    for second in range(60):
        swarm.set(7, 7, second)
        swarm.invariants.look(float(second))
        told += [(second, peer) for _, peer in swarm.told[len(told) :]]
    assert told == [(50, 1), (55, 0)]


def test_standstill_is_not_checked_without_a_limit():
    swarm = _Swarm(1)
    for second in range(100):
        swarm.invariants.look(float(second))
    assert swarm.told == []


def test_only_peers_that_have_not_banned_a_double_voter_in_time_violate():
    swarm = _Swarm(3, honest=(1, 2))
    liar, _, well = swarm.machines
    liar.lie = TWICE
    well.process.peer.session.roster.peers.banned = {liar.identity.peer_id: None}
    for now in (1.0, 1.0 + BAN_SECONDS):
        swarm.invariants.look(now)
    assert swarm.told == []
    liar.up = False  # the time begins again with its next process
    swarm.invariants.look(2.0 + BAN_SECONDS)
    liar.up = True
    for now in (20.0, 20.0 + BAN_SECONDS):
        swarm.invariants.look(now)
    assert swarm.told == []
    swarm.invariants.look(21.0 + BAN_SECONDS)
    assert swarm.told == [("double-vote", 1)]


def test_rosters_are_compared_without_the_peers_that_each_has_banned():
    swarm = _Swarm(4, settle=1.0, honest=(0, 1, 2))
    peers = tuple(machine.identity.peer_id for machine in swarm.machines)
    views = [peers, peers[:3], peers[:3]]  # the third misses the last peer, which only the second has banned
    for machine, banned, view in zip(swarm.machines[:3], [{}, {peers[3]: None}, {}], views, strict=True):
        roster = machine.process.peer.session.roster
        roster.peers.banned, roster.peers.view = banned, SimpleNamespace(peers=view)
    swarm.invariants.look(100.0)
    assert swarm.told == [("roster", 2)]


@pytest.mark.parametrize("left", [True, False])
def test_peer_that_leaves_is_missing_from_rosters_before_its_process_ends_also_if_it_lies(left):
    swarm = _Swarm(3, settle=1.0, honest=(0, 1))
    peers = tuple(machine.identity.peer_id for machine in swarm.machines)
    for machine in swarm.machines:
        machine.process.peer.session.roster.peers.view = SimpleNamespace(peers=peers[:2])
    swarm.machines[2].process.peer.session.roster.left = left
    swarm.invariants.look(100.0)
    assert swarm.told == ([] if left else [("roster", 0), ("roster", 1)])
