"""Start of rounds: terms and graces by the manifest, and votes of an earlier state or another lineage."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from kit.outer.session_scene import ALL, ANN, BEN, CAT, FIRST, ME, RUN, Scene, lone_fork
from thinwire.collectives.blocking_work import at_once
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore, VoteRecord
from thinwire.collectives.rounds.data_planes.allgather.payload_pieces import max_contributors
from thinwire.collectives.topology.shards import Grid
from thinwire.swarm.evidence import is_valid, signer
from thinwire.swarm.messages.registry import (
    MAX_GROUP,
    Ballot,
    Prepare,
    Ready,
)


def test_peer_that_returns_with_an_older_state_has_no_vote_until_a_later_round():
    async def main():
        store = MemoryVoteStore(random.Random(2))
        store.save(VoteRecord(FIRST, 2, Ballot(2, ANN), None, None))
        scene, witness = Scene(votes=lambda fragment: store), []
        for _ in range(3):
            witness.append(scene.announce().voter)
            await scene.finish_round()
        assert witness == [False, True, True]

    asyncio.run(main())


@pytest.mark.parametrize(("founder", "same"), [(ME, True), (ANN, False)])
def test_votes_of_another_lineage_are_forgotten_with_the_life_unless_we_founded_this_one(founder, same):
    """Otherwise the peer could come back to the other lineage, and vote there again."""
    store = MemoryVoteStore(random.Random(3))
    scene = Scene(votes=lambda fragment: store)
    scene.on_message(BEN, Prepare(1, 0, Ballot(5, BEN), FIRST))
    first = store.life
    scene.replica.found(lone_fork(scene, founder, first if founder == ME else bytes([9]) * 16))
    scene.session.advance()
    assert (store.life == first) == same
    assert scene.session.current.agreement.terms.lineage == scene.replica.lineage


@pytest.mark.parametrize(("setting", "asked"), [("no-ownership", True), ("report", False)])
def test_slow_peers_lose_their_chunks_only_if_the_manifest_wants_it(setting, asked):
    calls = []
    watch = SimpleNamespace(slow=lambda: calls.append(1) or ())
    Scene(exchange=f'slow_peers = "{setting}"', watch=watch)
    assert bool(calls) == asked


@pytest.mark.parametrize(("setting", "measured"), [("bandwidth", True), ("equal", False)])
def test_chunks_are_assigned_by_bandwidth_only_if_configured(setting, measured):
    scene = Scene(exchange=f'chunk_assignment = "{setting}"')
    assert (scene.session.current.agreement.terms.chunks > 0) == measured


def test_butterfly_round_of_many_chunks_has_room_for_a_whole_group():
    scene = Scene()
    scene.replica.plan_grid = Grid(100_000, 100)
    assert max_contributors(scene.replica.grid) < MAX_GROUP
    scene.session.advance()
    assert scene.session.current.agreement.terms.max_contributors == MAX_GROUP


def test_grace_is_the_configured_one():
    session = Scene(exchange="straggler_timeout = 7.0").session
    assert session.grace == 7.0 and session.current.agreement.terms.graces == dict.fromkeys(ALL, 7.0)


def test_all_gather_has_room_for_as_many_payloads_as_a_round_has_pieces():
    scene = Scene(
        codec='"topk(k=64,chunk=4096)|2bit|rice"', exchange='[outer]\nmethod = "sparseloco"\n', method="sparseloco"
    )
    scene.replica.plan_grid = Grid(100_000, 100)
    scene.session.advance()
    assert scene.session.current.agreement.terms.max_contributors == max_contributors(scene.replica.grid) < MAX_GROUP


def test_peer_has_been_further_until_a_state_with_rounds_replaces_the_older_one():
    """Its life in another lineage is over after the first look at its votes, so these do not show it again."""
    store = MemoryVoteStore(random.Random(3))
    assert not Scene(votes=lambda fragment: store).session.starter.ahead
    store.save(VoteRecord(bytes([9]) * 16, 4, Ballot(1, ANN), None, None))
    scene = Scene(votes=lambda fragment: store)
    assert scene.session.starter.ahead and store.record is None
    scene.session.advance()
    assert scene.session.starter.ahead
    scene.replica.round = 3  # as a fetched state
    scene.session.advance()
    assert not scene.session.starter.ahead


@pytest.mark.parametrize(("step", "whole", "audited"), [(1, True, [1]), (0, True, []), (2, True, []), (1, False, [])])
def test_round_is_audited_only_if_our_state_has_its_results(monkeypatch, step, whole, audited):
    begun = []
    monkeypatch.setattr(
        "thinwire.node.outer.verification.owner_audits.Audits.begin", lambda self, done: begun.append(done.round)
    )
    scene = Scene()
    scene.announce()
    if whole:
        scene.deliver_round()
    scene.replica.round += step
    scene.session.advance()
    assert begun == audited


@pytest.mark.parametrize(("timeout", "waits"), [("7.0", False), ('"auto"', True)])
def test_asynchronous_round_waits_for_nobody_unless_the_grace_is_computed(timeout, waits):
    scene = Scene(exchange=f"straggler_timeout = {timeout}")
    scene.replica.asynchronous = True
    scene.session.advance()
    assert set(scene.session.current.agreement.terms.graces) == (set(ALL) if waits else set())


@pytest.mark.parametrize(("asynchronous", "absent"), [(True, {CAT: 0.0}), (False, {})])
def test_asynchronous_round_does_not_wait_for_a_member_that_was_absent_from_the_last_one(asynchronous, absent):
    """Such a member stays one with quorums above two thirds; a stopped one cost a patience in each round."""

    async def main():
        scene = Scene(exchange="straggler_timeout = 7.0")
        scene.replica.asynchronous = asynchronous
        scene.announce()
        scene.deliver_round()
        outcome = await scene.session.outcome(give_up=1.0)
        await scene.session.change(at_once, lambda: scene.replica.commit(outcome, ME))
        scene.replica.members = (*scene.replica.members, CAT)
        scene.session.advance()
        graces = scene.session.current.agreement.terms.graces
        assert {peer: grace for peer, grace in graces.items() if not grace} == absent

    asyncio.run(main())


def test_round_waits_for_this_peer_and_the_members_with_a_link():
    scene = Scene((ME, ANN, BEN, CAT))
    assert BEN < ME < CAT, "whatever their order"
    scene.session.live.difference_update((BEN, CAT))
    scene.replica.round += 1
    scene.session.advance()
    assert set(scene.session.current.agreement.terms.graces) == {ME, ANN}


def late(scene, peer, round=1):
    """Deliver the announcement of a contribution that no proposal names."""
    terms = scene.session.current.agreement.terms
    said = Ready(round, 0, 1, terms.base, terms.plan, 5, bytes(32), True, 1.0, 1.0, life=peer[:16])
    scene.on_message(peer, said)


@pytest.mark.parametrize(("on_trial", "waits"), [(False, True), (True, False)])
def test_round_waits_for_newcomers_that_announced_too_late_for_the_last_one(on_trial, waits):
    async def main():
        scene = Scene()
        scene.newcomers.update([CAT] * on_trial)
        late(scene, CAT)
        await scene.finish_round()
        assert set(scene.session.current.agreement.terms.graces) == {*ALL, *[CAT] * waits}

    asyncio.run(main())


@pytest.mark.parametrize("fetched", [2, 9])
def test_round_after_a_fetched_state_waits_for_no_newcomer_of_the_last_one(fetched):
    """The state may be an older one of a lineage that prevails."""
    scene = Scene()
    scene.replica.round = 5
    scene.session.advance()
    late(scene, CAT, round=6)
    assert CAT in scene.session.ready
    scene.replica.round = fetched
    scene.session.advance()
    assert set(scene.session.current.agreement.terms.graces) == set(ALL)


class Watch:
    """Stores what a watch of slow peers is told: (round, fragment), and (attendances, fragment)."""

    def __init__(self):
        self.rounds, self.attendances = [], []

    def contributed(self, ratios, round, fragment):
        self.rounds.append((round, fragment))

    def attended(self, found, fragment):
        self.attendances.append(({one.peer for one in found}, fragment))


def test_watch_of_slow_peers_learns_of_each_round_and_of_the_lateness_of_the_other_members():
    async def main():
        watch = Watch()
        scene = Scene((ME, ANN, BEN, CAT), watch=watch)
        assert BEN < ME < CAT, "whatever their order"
        for peer in (ANN, BEN, CAT):
            late(scene, peer)
        await scene.session.average([bytes(400)], weight=1, loss=1.0, speed=1.0, give_up=0.0)
        assert watch.rounds == watch.attendances == []
        scene.replica.round += 1
        scene.session.advance()
        assert (watch.rounds, watch.attendances) == ([(1, 0)], [({ANN, BEN, CAT}, 0)])
        scene.session.advance()
        assert watch.rounds == [(1, 0), (2, 0)] and len(watch.attendances) == 1, "nobody was late in the same round"

    asyncio.run(main())


def test_lateness_of_a_newcomer_is_no_matter_of_the_watch():
    async def main():
        watch = Watch()
        scene = Scene(watch=watch)
        late(scene, CAT)
        await scene.finish_round()
        for peer in (ANN, BEN):
            late(scene, peer, round=2)
        scene.replica.round += 1
        scene.session.advance()
        assert watch.attendances[-1] == ({ANN, BEN}, 0)

    asyncio.run(main())


@pytest.mark.parametrize("unknown", [(), (ANN,)])
def test_peer_that_signs_two_announcements_with_one_number_is_convicted_if_its_key_is_known(unknown):
    scene = Scene(unknown=unknown)
    terms = scene.session.current.agreement.terms
    for loss in (1.0, 2.0):
        said = Ready(1, 0, 1, terms.base, terms.plan, 5, bytes(32), True, loss, 1.0, life=ANN[:16])
        scene.on_message(ANN, said)
    assert [signer(one) for one in scene.convicted] == [ANN] * (not unknown)
    assert all(is_valid(one, RUN) for one in scene.convicted)
