"""Session of one peer without a network: ends rounds, begins the next ones."""

import asyncio
import random
from types import SimpleNamespace

import msgspec
import pytest
from kit.outer.chains import RESULTS, certificate
from kit.outer.session_scene import ALL, ANN, BEN, CAT, FIRST, KEYS, ME, RUN, Scene, lone_fork
from thinwire.collectives.consensus.chain import encode, founded
from thinwire.collectives.consensus.proposal import vote_for
from thinwire.collectives.consensus.vote_store import MemoryVoteStore, VoteRecord
from thinwire.collectives.rounds.sparse_butterfly import OwnerResiduals
from thinwire.node.peer.stalls import recover, stalls
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.swarm.frame import sign_message
from thinwire.swarm.identity.identity import short
from thinwire.swarm.lineage import lineage_of, name_of_fork
from thinwire.swarm.messages.registry import (
    Ballot,
    Era,
    Fork,
    Head,
    Justified,
    Leave,
    Prepare,
    Promise,
    Proof,
    Ready,
)


def test_session_applies_rounds_and_remembers_them():
    async def main():
        commits: list[int] = []
        scene = Scene(on_commit=lambda: commits.append(scene.replica.round))
        assert scene.session.strays == 0
        for number in (1, 2):
            assert scene.announce().witness, "it has a vote"
            await scene.finish_round()
            assert scene.session.history.get(number) is not None and scene.replica.round == number
            assert scene.session.current.round == number + 1 and scene.session.roster.progress == number
        assert commits == [0, 1], "before the commit is applied, and for no other phase"
        phases = [fields["phase"] for name, fields in scene.events if name == "phase"]
        assert {"vote", "commit"} <= set(phases)
        assert scene.session.announced[ANN].round == 2 and BEN not in scene.session.announced

    asyncio.run(main())


def test_restarted_peer_with_its_votes_has_a_vote_at_once_and_remembers_its_promise():
    store = MemoryVoteStore()
    before = Scene(votes=lambda fragment: store)
    before.on_message(BEN, Prepare(1, 0, Ballot(5, BEN), FIRST))
    assert len(before.sent(Promise, to=BEN)) == 1
    after = Scene(votes=lambda fragment: store)
    assert after.announce().witness
    after.on_message(ANN, Prepare(1, 0, Ballot(4, ANN), FIRST))
    assert not after.sent(Promise)
    after.on_message(ANN, Prepare(1, 0, Ballot(6, ANN), FIRST))
    assert [message.ballot for message in after.sent(Promise)] == [Ballot(6, ANN)]


def test_round_that_begins_again_has_its_promises_and_a_later_announcement():
    scene = Scene()
    first = scene.announce()
    scene.on_message(BEN, Prepare(1, 0, Ballot(5, BEN), FIRST))
    scene.session.advance()
    again = scene.announce()
    assert first.witness and again.witness and again.attempt > first.attempt
    assert scene.session.current.round == 1 and scene.session.history.get(1) is None
    scene.on_message(ANN, Prepare(1, 0, Ballot(4, ANN), FIRST))
    assert not scene.sent(Promise)


def test_departing_peer_says_farewell_with_its_promise():
    scene = Scene()
    scene.on_message(BEN, Prepare(1, 0, Ballot(5, BEN), FIRST))
    scene.session.leave()
    (leave,) = scene.sent(Leave)
    assert (leave.round, leave.farewell.peer, leave.farewell.promised) == (1, ME, Ballot(5, BEN))
    scene.on_message(ANN, Prepare(1, 0, Ballot(6, ANN), FIRST))
    assert not scene.sent(Promise)


def test_peer_without_a_quorum_takes_up_a_lineage_founded_with_its_state_and_fetches_nothing():
    """The other founder announces the lineage before our next tick; our training since the fork remains."""
    scene = Scene()
    for peer in (ANN, BEN, CAT):
        scene.session.live.discard(peer)
        scene.session.on_link_down(peer, gone=False)
    scene.session.on_tick()
    chain = founded(scene.replica.chain, lone_fork(scene, ANN, bytes([9]) * 16))
    scene.on_message(ANN, Head(scene.replica.round, 0, lineage_of(chain)), encode(chain))
    assert not scene.session.catch_up.behind.is_set()
    scene.session.on_tick()
    assert scene.replica.chain == chain
    assert [name for name, _ in scene.events if name in ("lineage", "alarm")] == ["lineage", "alarm"]


@pytest.mark.parametrize(("sequence", "attempt"), [(5_000, 6), (1000 * (2**30 + 7), 2**30 + 8), (1000 * 2**31, 1)])
def test_first_announcement_of_a_process_is_later_than_those_of_earlier_ones(sequence, attempt):
    assert Scene(sequence=sequence).announce().attempt == attempt


@pytest.mark.parametrize(
    ("members", "lives", "voted", "takes_part"),
    [
        (ALL, b"", 0, False),
        ((ANN, BEN), b"", 0, True),
        (ALL, b"", 5, True),  # returned with an older state
        (ALL, bytes([9]) * 48, 0, True),  # has lost its run folder
        ((ME,), b"", 0, False),
    ],
)
def test_peer_without_a_vote_of_its_round_takes_part_at_once(members, lives, voted, takes_part):
    store = MemoryVoteStore(random.Random(3))
    if voted:
        store.save(VoteRecord(FIRST, voted, Ballot(1, ANN), None, None))
    scene = Scene(members, votes=lambda fragment: store)
    scene.replica.round, scene.replica.lives = 1, lives  # as a fetched state
    scene.session.advance()
    assert [message.weight for message in scene.sent(Ready)] == [0] * takes_part


@pytest.mark.parametrize("signer", [BEN, CAT, None])
def test_later_ballot_is_followed_if_it_carries_the_keys_of_unknown_signers(signer):
    scene = Scene(unknown=(BEN,))
    scene.announce()
    scene.deliver_round(keys=() if signer is None else (KEYS[signer].public_key,))
    assert (scene.session.current.agreement.commit is not None) == (signer == BEN)


def test_leader_of_a_later_ballot_sends_the_keys_of_the_signers():
    scene = Scene((ME, ANN))
    ours = scene.announce()
    scene.on_message(ANN, msgspec.structs.replace(ours, weight=0, hashes=b"", life=ANN[:16]))
    asked = []
    while not asked and scene.now < 60.0:
        scene.now += 1.0
        scene.session.on_tick()
        asked = scene.sent(Prepare)
    asked, terms = asked[0], scene.session.current.agreement.terms
    scene.on_message(ANN, Promise(terms.round, 0, asked.ballot, None, None, terms.lineage))
    scene.now += 3.0  # BEN and CAT do not answer.
    scene.session.on_tick()
    [proposal, *_] = scene.sent(Justified)
    assert set(proposal.keys) == {KEYS[peer].public_key for peer in (ME, ANN)}


def test_digest_is_computed_after_a_change_unless_the_caller_does_it():
    scene, calls = Scene(), []
    scene.replica.compute_digest = lambda: calls.append("digest")

    async def main():
        await scene.session.change(at_once, lambda: calls.append("change"))
        await scene.session.change(at_once, lambda: calls.append("later"), settled=False)

    asyncio.run(main())
    assert calls == ["change", "digest", "later"]


def test_lost_owner_residuals_are_reported_once():
    kept = OwnerResiduals()
    kept.lost = 3, 4.0
    scene = Scene(kept=kept)
    scene.session.advance()
    scene.session.advance()
    reports = [fields["detail"] for name, fields in scene.events if name == "given up"]
    assert reports == ["residuals of 3 chunks, norm 2"] and kept.lost == (0, 0.0)


@pytest.mark.parametrize(
    ("exchange", "end"),
    [("", "a lineage continues in 8 s"), ("orphan = 0\n", "`thinwire recover` continues without them")],
)
def test_session_without_a_quorum_tells_for_whom_and_until_when_it_waits(exchange, end):
    scene = Scene(exchange=exchange)
    assert scene.session.stalled() == ""
    for peer in (ANN, BEN):
        scene.session.presence.live.discard(peer)
        scene.session.on_link_down(peer, gone=False)
    scene.session.on_tick()
    scene.now += 2.0
    first, second = (short(peer) for peer in scene.session.current.agreement.terms.members if peer in (ANN, BEN))
    assert scene.session.stalled() == f"no quorum for 2 s: waiting for {first}, {second}; {end}"
    peer = SimpleNamespace(ready=True, session=scene.session, environment=SimpleNamespace(now=lambda: scene.now))
    (stall,) = stalls(peer)
    assert set(stall.absent) == {ANN.hex(), BEN.hex()} and set(stall.absent) < set(stall.members)
    assert set(stall.founders) == set(stall.members) - set(stall.absent)
    assert (stall.seconds, stall.until, stall.obstacle) == (2.0, None if exchange else 8.0, "")
    assert recover(peer) == 1 and stalls(peer)[0].until == 0.0
    scene.session.current.agreement.overtaken()
    assert "another state" in stalls(peer)[0].obstacle


def test_session_believes_a_chain_only_with_the_votes_of_its_members():
    session = Scene().session
    root, lives = Fork(0, bytes(32), (), tuple(sorted(ALL)), b"", ()), dict.fromkeys(sorted(ALL), bytes(16))
    forged = certificate(1, name_of_fork(root), lives, ALL, lives)
    vote = vote_for(forged.commit.opened, RESULTS)
    votes = tuple(Proof(peer, sign_message(vote, b"", KEYS[peer], RUN)) for peer in sorted(ALL))
    right = msgspec.structs.replace(forged, commit=msgspec.structs.replace(forged.commit, votes=votes))
    few = msgspec.structs.replace(forged, commit=msgspec.structs.replace(forged.commit, votes=votes[:1]))
    proved = session.prove((Era(root, (right,)),), 0, lambda fork: True)
    assert proved is not None and (proved.round, proved.members) == (1, tuple(sorted(ALL)))
    assert session.prove((Era(root, (right,)),), 0, lambda fork: False) is None
    for wrong in (forged, few):
        assert session.prove((Era(root, (wrong,)),), 0, lambda fork: True) is None
