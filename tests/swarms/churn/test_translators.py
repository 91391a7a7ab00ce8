"""Swarms in which some or most peers are behind address translators violate no invariant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from kit.scenarios import EARLY, identity_of, manifest_of, peer
from thinwire.collectives.transport.interface import RELAY_STUCK
from thinwire.sims.engine import virtual_loop
from thinwire.sims.network.circuits import RelayedLink
from thinwire.sims.network.link import Pipe
from thinwire.sims.network.translator import Nat
from thinwire.sims.scenario.faults import Fault
from thinwire.sims.scenario.scenario import Scenario
from thinwire.sims.simulation.world import SimulatedRun, SimWorld, simulate
from thinwire.sims.trials.trial import PACE, STALL
from thinwire.swarm.identity.invite import Invite, Seed
from thinwire.swarm.rendezvous_hash import rank

OPEN: Nat = "none"
HIDDEN: Nat = "symmetric"

REGIONS = ("Oregon", "London", "Japan")
"""Regions so far apart that a round takes half a second."""


def played(
    nats: Sequence[Nat], *, joins: Sequence[float] = (), faults: tuple[Fault, ...] = (), seconds: float = 16.0
) -> SimulatedRun:
    """Play a swarm with one peer for each translator. `joins`: arrivals of the last peers; the others come at the start."""
    starts = [0.0] + [EARLY] * (len(nats) - 1 - len(joins)) + list(joins)
    peers = tuple(
        peer(i, nat=nat, join=join, region=REGIONS[i % 3])
        for i, (nat, join) in enumerate(zip(nats, starts, strict=True))
    )
    scenario = Scenario("nat", 3, seconds, manifest_of("sync_every = 4"), peers, parameters=2000, faults=faults)
    return simulate(scenario, preset=PACE, stall=STALL, still=True)


def contributors(run: SimulatedRun) -> dict[int, int]:
    """Return the number of contributors of each round."""
    return {event.fields["round"]: event.fields["contributors"] for event in run.journal.of("round")}


@pytest.mark.parametrize("hidden", [2, 5])
def test_peers_that_cannot_reach_each_other_all_contribute(hidden: int) -> None:
    """Two of six, and all but one."""
    run = played([OPEN] * (6 - hidden) + [HIDDEN] * hidden)
    assert run.violations == ()
    counts = contributors(run)
    assert max(counts) >= 4 and all(counts[number] == 6 for number in counts if number >= 2)


def test_newcomers_behind_translators_get_in_and_contribute() -> None:
    run = played([OPEN, OPEN, HIDDEN, HIDDEN, "restricted"], joins=(4.0, 5.0, 6.0))
    assert run.violations == ()
    counts = contributors(run)
    assert counts[1] < 3 and counts[max(counts)] == 5


def test_relay_that_dies_in_the_middle_of_a_round_is_replaced() -> None:
    """The relay of two peers is killed after the training for round 3, before its commit."""
    nats: list[Nat] = [OPEN, OPEN, OPEN, HIDDEN, HIDDEN]
    ends = [identity_of(index).peer_id for index in (3, 4)]
    relay = rank(b"".join(sorted(ends)), "circuit", [identity_of(index).peer_id for index in range(3)])[0]
    victim = next(index for index in range(3) if identity_of(index).peer_id == relay)
    at = min(event.at for event in played(nats, seconds=8.0).journal.of("round") if event.fields["round"] == 2)
    run = played(nats, faults=(Fault(at + 2.25, "kill", (victim,)),))
    assert run.violations == ()
    lost = [event for event in run.journal.of("link_lost") if event.fields["peer"] == ends[0].hex() and event.peer == 4]
    assert [event.fields["reason"] for event in lost] == ["reset"] and 0.0 < lost[0].at - (at + 2.25) < 0.2
    assert lost[0].at < min(event.at for event in run.journal.of("round") if event.fields["round"] == 3)
    counts = contributors(run)
    assert max(counts) >= 4 and counts[max(counts)] == 4


def test_relay_that_swallows_bulk_data_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 5 s on, the relay of two peers passes on control messages only. Both leave it for another relay."""
    nats: list[Nat] = [OPEN, OPEN, OPEN, HIDDEN, HIDDEN]
    ends = [identity_of(index).peer_id for index in (3, 4)]
    stuck = rank(b"".join(sorted(ends)), "circuit", [identity_of(index).peer_id for index in range(3)])[0]
    usual = RelayedLink.pass_on
    swallowed = []

    def pass_on(link: RelayedLink, pipe: Pipe) -> None:
        now = virtual_loop.current().time()
        if pipe.bulk and link.relay == stuck and link.up and now > 5.0:
            swallowed.append(now)
            for packet in pipe.arrived:
                pipe.release(packet.size)  # the relay's machine has acknowledged it
            pipe.arrived = ()
        else:
            usual(link, pipe)

    monkeypatch.setattr(RelayedLink, "pass_on", pass_on)
    run = played(nats, seconds=24.0)
    assert run.violations == ()
    lost = [event for event in run.journal.of("link_lost") if event.fields.get("relay") == stuck.hex()]
    assert {(event.peer, event.fields["peer"]) for event in lost} == {(3, ends[1].hex()), (4, ends[0].hex())}
    assert {event.fields["reason"] for event in lost} == {RELAY_STUCK}
    assert max(event.at for event in lost) < swallowed[0] + 8.0
    assert swallowed[-1] <= max(event.at for event in lost), "no later link uses this relay"
    counts = contributors(run)
    assert counts[max(counts)] == 5


@pytest.mark.parametrize("only", [0, 1])
def test_peer_that_restarts_joins_peers_that_cannot_be_dialled(only: int) -> None:
    """It is the only one that can be dialled, so its knocks fail, and the others come to its gate.

    `only`: the founder (0), or another one when the founder is gone for good.
    """
    gone = (Fault(3.0, "kill", (0,)),) if only else ()
    nats: list[Nat] = [OPEN] * (only + 1) + [HIDDEN] * 3
    run = played(nats, faults=(*gone, Fault(9.0, "restart", (only,), 2.0)), seconds=40.0)
    assert run.violations == ()
    ready = [event.at for event in run.journal.of("ready") if event.peer == only]
    assert len(ready) == 2 and ready[1] < 21.0
    assert not [event for event in run.journal.of("lineage") if event.peer == only]
    counts = contributors(run)
    assert counts[max(counts)] == 4


def test_founder_that_restarts_joins_peers_whose_addresses_refuse() -> None:
    """Its knocks are refused, as if no process listened there any more, but the others come to its gate."""
    run = played([OPEN] + ["refusing"] * 3, faults=(Fault(5.0, "restart", (0,), 2.0),), seconds=24.0)
    assert run.violations == ()
    ready = [event.at for event in run.journal.of("ready") if event.peer == 0]
    assert len(ready) == 2 and ready[1] < 15.0
    assert not [event for event in run.journal.of("lineage") if event.peer == 0]
    counts = contributors(run)
    assert counts[max(counts)] == 4


def test_two_members_that_search_and_admit_each_other_find_the_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """They restart behind one translator, each with an invite of the other, and no other peer can dial them.

    They dial the others soon, not only after a reconnect period, within which they would found a lineage.
    """
    usual = SimWorld.contacts

    def contacts(world: SimWorld, me: int) -> Invite:
        invite, other = usual(world, me), world.machines[3 - me]
        named = (Seed(other.address, other.identity.transport_public),)
        return replace(invite, seeds=named) if world.loop.time() > 5.0 else invite

    monkeypatch.setattr(SimWorld, "contacts", contacts)
    faults = tuple(Fault(9.0, "restart", (index,), 2.0) for index in (1, 2))
    peers = tuple(peer(i, site="lab" if i in (1, 2) else "", join=EARLY if i else 0.0) for i in range(6))
    scenario = Scenario(
        "nat", 3, 32.0, manifest_of("sync_every = 4"), peers, parameters=2000, faults=faults, nats={"lab": HIDDEN}
    )
    run = simulate(scenario, preset=replace(PACE, reconnect_period=30.0), stall=STALL, still=True)
    assert run.violations == () and not [*run.journal.of("lineage")]
    met = [event.fields["peer"] for event in run.journal.of("joined") if event.peer == 1 and event.at > 11.0]
    assert met[0] == identity_of(2).peer_id.hex()
    counts = contributors(run)
    assert counts[max(counts)] == 6
