"""Start of rounds: terms and graces by the manifest, and votes of an earlier state or another lineage."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from kit.outer.session_scene import ALL, ANN, BEN, FIRST, ME, Scene, lone_fork
from thinwire.collectives.consensus.vote_store import MemoryVoteStore, VoteRecord
from thinwire.collectives.rounds.payload import room
from thinwire.collectives.topology.shards import Grid
from thinwire.swarm.messages.registry import (
    MAX_GROUP,
    Ballot,
    Prepare,
)


def test_peer_that_returns_with_an_older_state_has_no_vote_until_a_later_round():
    async def main():
        store = MemoryVoteStore(random.Random(2))
        store.save(VoteRecord(FIRST, 2, Ballot(2, ANN), None, None))
        scene, witness = Scene(votes=lambda fragment: store), []
        for _ in range(3):
            witness.append(scene.announce().witness)
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
    assert room(scene.replica.grid) < MAX_GROUP
    scene.session.advance()
    assert scene.session.current.agreement.terms.room == MAX_GROUP


def test_grace_is_the_configured_one():
    session = Scene(exchange="straggler_timeout = 7.0").session
    assert session.grace == 7.0 and session.current.agreement.terms.graces == dict.fromkeys(ALL, 7.0)
