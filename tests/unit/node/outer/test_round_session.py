"""Session of one peer without a network: ends rounds, begins the next ones."""

import asyncio
import random
import weakref
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from kit.outer.chains import RESULTS, certificate, proved_by
from kit.outer.session_scene import ALL, ANN, BEN, CAT, FIRST, KEYS, ME, RUN, Scene, first_fork, life_of, lone_fork
from thinwire.collectives.consensus.chain import encode, founded
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore, VoteRecord
from thinwire.collectives.consensus.proposal import vote_for
from thinwire.collectives.rounds.data_planes.sparse_butterfly import OwnerResiduals
from thinwire.node.outer.verification.own_contributions import name_of
from thinwire.node.peer.report_sinks import recover
from thinwire.node.peer.status_parts import stalls
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.frame import sign_message
from thinwire.swarm.identity.identity import short
from thinwire.swarm.lineage import lineage_of, name_of_fork
from thinwire.swarm.messages.registry import (
    Ask,
    Ballot,
    ChainEntry,
    Chunk,
    Fetch,
    Fork,
    Found,
    Head,
    Leave,
    Prepare,
    Promise,
    Proof,
    Propose,
    Ready,
    ViewChange,
)


def test_session_applies_rounds_and_remembers_them():
    async def main():
        commits: list[int] = []
        scene = Scene(on_commit=lambda: commits.append(scene.replica.round))
        assert scene.session.dropped_frames == 0
        for number in (1, 2):
            assert scene.announce().voter, "it has a vote"
            await scene.finish_round()
            assert scene.session.history.get(number) is not None and scene.replica.round == number
            assert scene.session.current.round == number + 1 and scene.session.roster.progress == number
        assert commits == [0, 1], "before the commit is applied, and for no other phase"
        phases = [fields["phase"] for name, fields in scene.events if name == "phase"]
        assert {"vote", "commit"} <= set(phases)
        assert scene.session.announced[ANN].round == 2 and BEN not in scene.session.announced

    asyncio.run(main())


def test_outcome_states_whether_most_others_were_past_the_round_when_it_began():
    async def main():
        scene = Scene()
        scene.on_message(ANN, Ask(3, 0))
        scene.on_message(BEN, Ask(2, 0))
        assert not (await scene.finish_round()).began_late
        assert not (await scene.finish_round()).began_late, "only one other peer was past it"
        for peer in (ANN, BEN, CAT):
            scene.on_message(peer, Ask(5, 0))
        assert not (await scene.finish_round()).began_late, "they are past it now, and were not when it began"
        assert (await scene.finish_round()).began_late

    asyncio.run(main())


def test_restarted_peer_with_its_votes_has_a_vote_at_once_and_remembers_its_promise():
    store = MemoryVoteStore()
    before = Scene(votes=lambda fragment: store)
    before.on_message(BEN, Prepare(1, 0, Ballot(5, BEN), FIRST))
    assert len(before.sent(Promise, to=BEN)) == 1
    after = Scene(votes=lambda fragment: store)
    assert after.announce().voter
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
    assert first.voter and again.voter and again.attempt > first.attempt
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
    scene.replica.found(first_fork(*ALL))
    scene.session.advance()
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
    [message, *_] = scene.sent(Propose)
    assert message.reports and set(message.keys) == {KEYS[peer].public_key for peer in (ME, ANN)}


def test_digest_is_computed_after_a_change_unless_the_caller_does_it():
    scene, calls = Scene(), []
    scene.replica.compute_digest = lambda: calls.append("digest")

    async def main():
        await scene.session.change(at_once, lambda: calls.append("change"))
        await scene.session.change(at_once, lambda: calls.append("later"), settled=False)

    asyncio.run(main())
    assert calls == ["change", "digest", "later"]


def test_lost_owner_residuals_are_reported_once():
    residuals = OwnerResiduals()
    residuals.lost = 3, 4.0
    scene = Scene(owner_residuals=residuals)
    scene.session.advance()
    scene.session.advance()
    reports = [fields["detail"] for name, fields in scene.events if name == "residual_lost"]
    assert reports == ["residuals of 3 chunks, norm 2"] and residuals.lost == (0, 0.0)


@pytest.mark.parametrize("demanded", [True, False])
def test_session_names_reachable_members_that_do_not_answer_and_the_leader_otherwise(demanded):
    """demanded: the others ask for another leader before this peer has begun a ballot."""
    scene = Scene()
    agreement = scene.session.current.agreement
    ready = scene.announce()
    for peer in (ANN, BEN):
        scene.on_message(peer, msgspec.structs.replace(ready, life=peer[:16]))
    scene.on_message(BEN, Prepare(1, 0, Ballot(5, BEN), FIRST))
    assert not agreement.overdue and scene.session.stalled() == ""
    for peer in (ANN, BEN) if demanded else ():
        scene.on_message(peer, ViewChange(1, 0, 1, Ballot(5, BEN), FIRST))
    while not agreement.overdue:
        scene.now += 1.0
        scene.session.on_tick()
    silent = ", ".join(short(peer) for peer in agreement.terms.members if peer != ME)
    reason = f"{short(BEN)} leads it" if demanded else f"no answer from {silent} (can be reached)"
    assert scene.session.stalled() == f"round 1 does not end: {reason}"


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
    root, lives = first_fork(*ALL), {peer: life_of(peer) for peer in sorted(ALL)}
    forged = certificate(1, name_of_fork(root), lives, ALL, lives)
    vote = vote_for(forged.commit.proposal, RESULTS)
    votes = tuple(Proof(peer, sign_message(vote, b"", KEYS[peer], RUN)) for peer in sorted(ALL))
    right = msgspec.structs.replace(forged, commit=msgspec.structs.replace(forged.commit, votes=votes))
    few = msgspec.structs.replace(forged, commit=msgspec.structs.replace(forged.commit, votes=votes[:1]))
    proved = proved_by(session.chains, (ChainEntry(root, (right,)),))
    assert proved is not None and (proved.round, proved.members) == (1, tuple(sorted(ALL)))
    assert proved_by(session.chains, (ChainEntry(root, (right,)),), lambda fork: False) is None
    for wrong in (forged, few):
        assert proved_by(session.chains, (ChainEntry(root, (wrong,)),)) is None


PIPELINE = '[outer]\nmethod = "streaming"\nfragments = 2\n[pipeline]\nstages = 2\n'
"""Tables of a run whose replicas are held in stages."""


@pytest.mark.parametrize(("exchange", "paced"), [("", True), (PIPELINE, False)])
def test_results_of_a_past_round_go_with_pauses_to_peers_that_no_round_waits_for(exchange, paced):
    """A member, a peer that falls further behind, and a missing stage of a pipeline would delay all rounds."""

    async def main():
        scene = Scene(exchange=exchange)
        await scene.finish_round()
        ask = Fetch(1, 0, scene.session.history.get(1).agreement.commit.digest, (0,))

        def pauses():
            scene.queue.paced.clear()
            scene.on_message(CAT, ask)
            return len(scene.queue.paced) == 1

        assert pauses() == paced
        members = scene.replica.members
        scene.replica.members = (*members, CAT)
        assert not pauses(), "it is a member by now"
        scene.replica.members = members
        assert pauses() == paced
        await scene.finish_round()
        assert not pauses(), "it is further behind than when it asked first"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("exchange", "lends"),
    [("audit = 0\n", False), ("", True), ('audit = 0.0\n[admission]\nmode = "open"\ntrial_rounds = 3\n', True)],
)
def test_own_contribution_is_lent_in_runs_with_audits_or_trials_only(exchange, lends):
    scene, chunk = Scene(exchange=exchange), bytes(400)
    asyncio.run(scene.session.average([chunk], weight=1, loss=1.0, speed=1.0, give_up=0.0))
    (ready,) = scene.sent(Ready)
    scene.on_message(ANN, Fetch(1, 0, name_of(ready.hashes), (0,)))
    assert [payload for to, _, payload in scene.queue.of(Chunk) if to == ANN] == [chunk] * lends


def test_own_contribution_is_freed_when_all_participants_have_announced_themselves_in_the_next_round():
    """It was in memory until the contribution to the round after that was encoded: during the inner steps."""

    async def main():
        scene, chunk = Scene(), np.zeros(400, np.uint8)
        held = weakref.ref(chunk)
        await scene.session.average([chunk], weight=1, loss=1.0, speed=1.0, give_up=0.0)
        ask = Fetch(1, 0, name_of(scene.sent(Ready)[-1].hashes), (0,))
        del chunk
        await scene.finish_round()
        terms = scene.announce()
        again = [msgspec.structs.replace(terms, attempt=1, life=life_of(peer)) for peer in (ANN, BEN)]
        scene.on_message(ANN, again[0])
        scene.session.on_tick()
        scene.on_message(BEN, ask)
        assert len(scene.queue.of(Chunk)) == 1, "BEN may audit the last round"
        scene.on_message(BEN, again[1])
        assert held() is None

    asyncio.run(main())


def test_no_spare_buffers_remain_after_a_round():
    async def main():
        scene = Scene()
        scene.replica.pool.lend(1 << 20)
        assert scene.replica.pool.spare
        await scene.finish_round()
        assert not scene.replica.pool.spare and scene.queue.rests == 1

    asyncio.run(main())


@pytest.mark.parametrize(("exchange", "believed"), [("", False), (PIPELINE, True)])
def test_only_a_lost_stage_begins_again_after_a_gap_and_with_another_founder(exchange, believed):
    session = Scene((), exchange=exchange, founder=ANN).session
    life = bytes([9]) * 16
    found = Found(5, 0, bytes(32), (ANN,), life)
    later = Fork(5, bytes(32), (ANN,), (ANN,), life, (sign_message(found, b"", KEYS[ANN], RUN),))
    proved = proved_by(session.chains, (ChainEntry(first_fork(ANN)), ChainEntry(later)))
    assert (proved is not None) == believed
    assert session.lineages.trusted(msgspec.structs.replace(later, before=(), members=(BEN,))) == believed
    assert session.lineages.trusted(msgspec.structs.replace(later, before=()))


@pytest.mark.parametrize(
    ("entered", "members", "serves"), [(True, ALL, True), (False, ALL, False), (True, (ANN, BEN), False)]
)
def test_state_is_served_before_the_first_round_only_by_a_member_that_need_not_compare_it(entered, members, serves):
    assert Scene(members, entered=entered).session.states.entered == serves


def test_round_is_overtaken_from_its_commit_until_the_replica_has_it():
    async def main():
        scene = Scene()
        session = scene.session
        scene.announce()
        assert session.open_commit is None and not session.overtaken
        scene.deliver_round()
        assert session.open_commit is session.current.agreement.commit is not None and session.overtaken
        outcome = await session.outcome(give_up=1.0)
        await session.change(at_once, lambda: scene.replica.commit(outcome, ME))
        assert session.open_commit is None and not session.overtaken
        scene.replica.round += 3
        assert session.open_commit is None, "a later state was fetched"
        session.catch_up.behind.set()
        assert session.overtaken

    asyncio.run(main())


def test_late_lineage_is_told_as_due_now():
    scene = Scene()
    scene.now = 5.0
    for peer in (ANN, BEN):
        scene.session.live.discard(peer)
        scene.session.on_link_down(peer, gone=False)
    scene.session.on_tick()
    scene.now += 60.0
    told = scene.session.stalled()
    assert told.startswith("no quorum for 60 s") and told.endswith("continues in 0 s")


@pytest.mark.parametrize(("live", "soon"), [((), True), ((BEN,), False)])
def test_retry_waits_for_one_patience_or_until_the_first_peer_comes(live, soon):
    async def main():
        scene = Scene()
        scene.session.live.clear()
        scene.session.live.update(live)
        waits = asyncio.create_task(scene.session.wait_before_retry())
        await asyncio.sleep(1.0)
        scene.now = 1.9
        await asyncio.sleep(1.0)
        assert not waits.done()
        scene.session.live.add(ANN)
        await asyncio.sleep(1.0)
        assert waits.done() == soon
        scene.now = 2.0
        await asyncio.sleep(1.0)
        assert waits.done()

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("end", [2.0, 50.0])
def test_retry_ends_after_one_patience_without_any_peer(end):
    async def main():
        scene = Scene()
        scene.session.live.clear()
        waits = asyncio.create_task(scene.session.wait_before_retry())
        await asyncio.sleep(1.0)
        assert not waits.done()
        scene.now = end
        await asyncio.sleep(1.0)
        assert waits.done()

    virtual_loop.run(main(), seed=1)


@pytest.mark.parametrize("committed", [False, True])
def test_round_that_was_given_up_continues_unless_it_has_committed(committed):
    commits = []
    scene = Scene(on_commit=lambda: commits.append(1))
    scene.announce()
    if committed:
        scene.deliver_round()
    scene.session.current.agreement.overtaken()
    scene.session.resume_round()
    scene.session.current.pump()
    assert scene.session.current.agreement.diverged == committed and len(commits) == committed


@pytest.mark.parametrize("skipped", [-1, 1])
def test_committed_round_is_no_history_of_another_state(skipped):
    """A lineage was founded with the state before it, or a later state was fetched."""

    async def main():
        scene = Scene()
        scene.announce()
        scene.deliver_round()
        scene.replica.round += 1 + skipped
        scene.session.advance()
        assert scene.session.history.get(1) is None

    asyncio.run(main())


def test_round_without_results_is_no_history_of_the_state_that_was_fetched_for_it():
    scene = Scene()
    scene.announce()
    scene.replica.round += 1
    scene.session.advance()
    assert scene.session.history.get(1) is None


@pytest.mark.parametrize("other", [bytes(32), b"\xff" * 32], ids=["below ours", "above ours"])
def test_peers_that_announced_with_our_state_are_asked_again_when_the_round_begins_again(other):
    scene = Scene()
    terms = scene.session.current.agreement.terms
    for peer, base in ((ANN, terms.base), (BEN, other)):
        scene.on_message(peer, Ready(1, 0, 1, base, terms.plan, 0, b"", True, 0.0, 0.0, life=peer[:16]))
    scene.announce()
    scene.session.advance()
    asked = [(peer, message.round) for peer, message, _ in scene.queue.of(Ask)]
    assert asked == [(ANN, 1)]


def test_peers_of_the_last_round_are_not_asked_about_the_next_one():
    async def main():
        scene = Scene()
        await scene.finish_round()
        assert scene.queue.of(Ask) == []

    asyncio.run(main())


def test_member_of_an_open_run_asks_for_a_contribution_to_the_committed_round_to_score_it():
    async def main():
        scene = Scene(exchange='quorum = 0.5\naudit = 0.0\n[admission]\nmode = "open"\n')
        await scene.session.average([bytes(400)], weight=1, loss=1.0, speed=1.0, give_up=0.0)
        scene.session.trials.hold()
        await scene.finish_round()
        assert [message.indices for message in scene.sent(Fetch)] == [(0,)]

    asyncio.run(main())


def test_peer_that_takes_part_without_a_contribution_announces_neither_loss_nor_speed():
    scene = Scene()
    scene.session.take_part()
    (ready,) = scene.sent(Ready)
    assert (ready.weight, ready.hashes, ready.loss, ready.speed) == (0, b"", 0.0, 0.0)


@pytest.mark.parametrize("peers", [ALL, ()])
def test_peer_that_continues_alone_reports_the_lineage_unless_it_is_the_first_one(peers):
    scene = Scene(peers)
    asyncio.run(scene.session.continue_alone(at_once))
    assert scene.replica.members == (ME,)
    assert [name for name, _ in scene.events if name in ("lineage", "alarm")] == ["lineage", "alarm"][: 2 * bool(peers)]
