"""Strangers at a running swarm: peers without an invite, revoked peers, and many made-up identities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kit.outer.strangers import Act, knocks, made_up
from kit.scenarios import events_of, identity_of, manifest_of, swarm_of
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.simulation.world import SimulatedRun, SimWorld, simulate
from thinwire.sims.trials.trial import PACE, STALL
from thinwire.swarm.identity.admission_token import AdmissionPolicy, Inviter, revoke
from thinwire.swarm.identity.invite import Invite
from thinwire.swarm.membership import eviction, gossip_items


def admission(mode: str, trial: int = 0) -> str:
    tables = f"[admission]\nmode = '{mode}'\ntrial_rounds = {trial}"
    return manifest_of("sync_every = 4", codec="fp32", tables=tables)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimulatedRun]:
    """Return a function that plays a swarm, with actions of an attacker or an author at given seconds."""

    def play(
        peers: int,
        mode: str,
        acts: dict[float, Act] | None = None,
        *,
        seconds: float = 40.0,
        trial: int = 0,
        **more: Any,
    ) -> SimulatedRun:
        original = SimWorld.play

        async def play_with_acts(self: SimWorld) -> None:
            for at, act in (acts or {}).items():
                self.net.at(at, act, self)
            await original(self)

        with monkeypatch.context() as patch:
            patch.setattr(SimWorld, "play", play_with_acts)
            toml = admission(mode, trial)
            return simulate(swarm_of(peers, toml, seconds=seconds, parameters=2_000, **more), preset=PACE, stall=STALL)

    return play


def rounds_of(run: SimulatedRun, peer: int) -> dict[int, Any]:
    return {event.fields["round"]: event.fields for event in events_of(run, "round", peer)}


def memberships(run: SimulatedRun, peer: int, other: int) -> list[int]:
    """Return the rounds of `peer` that have decided that another peer is a member."""
    return [number for number, fields in rounds_of(run, peer).items() if name_of(other)[:8] in fields["members"]]


def name_of(peer: int) -> str:
    return identity_of(peer).peer_id.hex()


@pytest.mark.parametrize("mode", ["closed", "invited"])
def test_peer_without_a_token_is_refused_by_every_member(played, monkeypatch, mode):
    real = SimWorld.contacts

    def bare(self: SimWorld, me: int) -> Invite:
        invite = real(self, me)
        return Invite(invite.run_id, invite.seeds) if me == 4 else invite

    monkeypatch.setattr(SimWorld, "contacts", bare)
    run = played(5, mode, joins={4: 8.0})
    reasons = [event.fields["reason"] for event in events_of(run, "down", 4)]
    assert len(reasons) > 1, "it tries again and again"
    assert all("refused us (token)" in reason and "with an invite" in reason for reason in reasons)
    # The simulator reports the refusals of an honest peer.
    assert {(violation.oracle, violation.peer) for violation in run.violations} <= {("crash", 4)}
    assert len(rounds_of(run, 0)) > 8 and not memberships(run, 0, 4)


@pytest.fixture
def ending(monkeypatch):
    """All invites end in the tenth second."""
    real = SimWorld.contacts

    def ending(self: SimWorld, me: int) -> Invite:
        """Return an invite that ends in the tenth second."""
        invite = real(self, me)
        now = self.machines[0].clocks
        policy = AdmissionPolicy(self.run_id, identity_of(0).public_key, 2)
        base = Invite(invite.run_id, invite.seeds)
        return Inviter(identity_of(0), b"", policy).invite(base, expires=int(now.wall() - now.now()) + 10)

    monkeypatch.setattr(SimWorld, "contacts", ending)


@pytest.mark.parametrize("down", [(2,), (0, 1, 2, 3)])
def test_members_come_back_after_their_invite_has_expired(played, ending, down):
    faults = tuple(Fault(20.0, "restart", (peer,), 4.0) for peer in down)
    run = played(4, "closed", faults=faults, seconds=60.0)
    assert not run.violations
    last = rounds_of(run, 0)[max(rounds_of(run, 0))]
    assert last["contributors"] == 4 and max(event.at for event in events_of(run, "round", 0)) > 50.0


def test_expired_invite_brings_no_peer_in_and_keeps_those_that_came(played, ending):
    run = played(5, "closed", joins={4: 14.0})
    reasons = [event.fields["reason"] for event in events_of(run, "down", 4)]
    assert reasons and all("the invite has expired" in reason for reason in reasons)
    assert {violation.peer for violation in run.violations} == {4}
    last = rounds_of(run, 0)[max(rounds_of(run, 0))]
    assert last["contributors"] == 4 and not memberships(run, 0, 4)


@pytest.mark.parametrize("trial", [0, 5])
def test_expired_invite_for_a_key_does_not_keep_it_out_of_an_open_run(played, monkeypatch, trial):
    """Where a newcomer is on trial, it is so without the invite, which would have spared it the trial."""
    real = SimWorld.contacts

    def contacts(self: SimWorld, me: int) -> Invite:
        invite, clocks = real(self, me), self.machines[0].clocks
        inviter = Inviter(identity_of(0), b"", AdmissionPolicy(self.run_id, identity_of(0).public_key, trial=1))
        ends = int(clocks.wall() - clocks.now()) + (10 if me == 4 else 1000)
        return inviter.invite(Invite(invite.run_id, invite.seeds), identity_of(me).peer_id, expires=ends)

    monkeypatch.setattr(SimWorld, "contacts", contacts)
    run = played(5, "open", joins={4: 14.0}, trial=trial, seconds=60.0)
    assert not run.violations
    assert any("expired" in event.fields["detail"] for event in events_of(run, "alarm", 4))
    assert rounds_of(run, 4) and bool(events_of(run, "trial", 0)) == bool(trial)
    joined = min(memberships(run, 0, 4)) - min(rounds_of(run, 4))
    assert joined > 5 if trial else joined <= 2


def test_revoked_member_is_out_of_the_next_round_and_learns_why(played):
    def revokes(world: SimWorld) -> None:
        item = gossip_items.revocation_item(revoke(identity_of(0), world.run_id, identity_of(3).peer_id))
        process = world.machines[0].process
        assert process is not None
        process.peer.presence.roster.apply_ban_items((item,), world.machines[0].clocks.now())

    run = played(5, "invited", {15.0: revokes})
    at = {number: event.at for event in events_of(run, "round", 0) if (number := event.fields["round"])}
    last = max(memberships(run, 0, 3))
    # Rounds take two seconds: the one in progress may still have it, the next one has not.
    assert last >= 3 and 13.0 < at[last] < 18.0 and max(at) > last + 4
    reason = events_of(run, "down", 3)[0].fields["reason"]
    assert "banned" in reason and "author" in reason
    for peer in (0, 1, 2, 4):
        assert [event for event in events_of(run, "banned", peer) if event.fields["peer"] == name_of(3)], peer
    # The simulator knows no reason to ban an honest peer.
    assert {violation.oracle for violation in run.violations if violation.peer != 3} == {"banned"}


def floods(count: int) -> Act:
    """Return an act that tells one member of many made-up identities; it passes them on."""

    def flood(world: SimWorld) -> None:
        machine = world.machines[1]
        assert machine.process is not None
        for record in made_up(world, count):
            machine.process.peer.presence.roster.learn(record, machine.clocks.now())

    return flood


@pytest.mark.parametrize("mode", ["invited", "open"])
def test_full_table_of_made_up_identities_keeps_no_peer_out(played, monkeypatch, mode):
    """Scale model: the table holds 24 peers here, and 4096 in life."""
    monkeypatch.setattr(eviction, "MAX_PEERS", 24)
    run = played(5, mode, {6.0: floods(48)}, seconds=60.0, joins={4: 12.0})
    # Made-up peers in a roster are ghosts until they are found dead.
    assert not [violation for violation in run.violations if mode == "invited" or violation.oracle != "roster"]
    joined = memberships(run, 0, 4)
    at = {event.fields["round"]: event.at for event in events_of(run, "round", 0)}
    assert joined and at[joined[0]] < 25.0, joined
    members = {name_of(number) for number in range(4)}
    for peer in range(4):
        # Dead by a failed probe, or forgotten: none of the members is.
        gone = {event.fields["peer"] for event in events_of(run, "dead", peer)}
        assert not gone & members
        assert rounds_of(run, peer)[max(rounds_of(run, peer))]["contributors"] == 5


@pytest.mark.trial
def test_a_thousand_free_identities_change_no_result(played, monkeypatch):
    """A thousand records told to a member, and three hundred identities that knock at all, in a swarm of six."""
    monkeypatch.setattr(SimWorld, "tasks", [], raising=False)
    answers: list[str] = []
    clean = played(6, "invited")
    run = played(6, "invited", {8.0: floods(1000), 9.0: knocks(300, answers)})
    assert answers == ["token"] * (300 * 6 * 3)
    assert run.violations == () and not events_of(run, "dead", 0)
    for peer in range(6):
        expected, found = rounds_of(clean, peer), rounds_of(run, peer)
        assert abs(len(expected) - len(found)) <= 1 and len(found) > 8
        for number in expected.keys() & found.keys():
            # Digests contain random values of the peers, which depend on the number of timers.
            assert found[number]["loss"] == pytest.approx(expected[number]["loss"], rel=1e-9), number
            assert found[number]["contributors"] == expected[number]["contributors"], number
