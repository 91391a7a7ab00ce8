"""Routing of frames: to the round in progress, past rounds, and those pending for the next one."""

import asyncio

import pytest
from kit.outer.session_scene import ALL, ANN, BEN, CAT, FIRST, Scene
from thinwire.collectives.rounds.round_factory import MAX_PENDING, MAX_PENDING_EACH
from thinwire.collectives.transport.pending_frames import PendingFrames
from thinwire.node.outer.state_transfer.round_history import FOLLOWED_SECONDS
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import (
    Ask,
    Ballot,
    Behind,
    Commit,
    Contribution,
    Decline,
    Fetch,
    Prepare,
    Promise,
    Proposal,
    Ready,
    Result,
    Vote,
)


def test_computed_grace_learns_from_announcements_only(monkeypatch):
    came = []
    monkeypatch.setattr(
        "thinwire.collectives.health.straggler_grace.StragglerGrace.on_announcement",
        lambda self, peer, round, now, contributes: came.append((peer, round)),
    )
    scene = Scene(exchange='straggler_timeout = "auto"')
    terms = scene.session.current.agreement.terms
    scene.on_message(ANN, Ready(1, 0, 1, terms.base, terms.plan, 0, b"", True, 0.0, 0.0))
    scene.on_message(BEN, Prepare(1, 0, Ballot(2, BEN), FIRST))
    scene.on_message(CAT, Ready(2, 0, 1, terms.base, terms.plan, 0, b"", True, 0.0, 0.0))
    assert came == [(ANN, 1)]


@pytest.mark.parametrize("weight", [0, 1, 7])
def test_computed_grace_learns_whether_a_peer_contributes(monkeypatch, weight):
    told = []
    monkeypatch.setattr(
        "thinwire.collectives.health.straggler_grace.StragglerGrace.on_announcement",
        lambda self, peer, round, now, contributes: told.append(contributes),
    )
    scene = Scene(exchange='straggler_timeout = "auto"')
    terms = scene.session.current.agreement.terms
    scene.on_message(ANN, Ready(1, 0, 1, terms.base, terms.plan, weight, b"", True, 0.0, 0.0))
    assert told == [weight > 0]


@pytest.mark.parametrize(("round", "past"), [(0, False), (1, True), (2, True)])
def test_claim_to_have_committed_this_round_or_a_later_one_counts(round, past):
    scene = Scene()
    scene.on_message(ANN, Behind(round))
    assert (ANN in scene.session.current.agreement.past) == past


def test_sender_of_a_commit_is_past_the_round_and_a_voter_is_not():
    scene = Scene()
    proposal = Proposal(
        1, 0, Ballot(2, ANN), tuple(sorted(ALL)), tuple(sorted(ALL)), (Contribution(ANN, 1, 10),), (), None, ()
    )
    scene.on_message(ANN, Vote(1, 0, Ballot(2, ANN), bytes(32), bytes(32)))
    scene.on_message(BEN, Commit(proposal, bytes(32), ()))
    assert scene.session.current.agreement.past == {BEN}


@pytest.mark.parametrize(("members", "declines"), [((), 1), (ALL, 0)])
def test_peer_without_a_state_declines_to_promise(members, declines):
    scene = Scene(members)
    scene.on_message(ANN, Prepare(1, 0, Ballot(2, ANN), FIRST))
    assert len(scene.sent(Decline)) == declines


def test_message_of_a_forgotten_round_is_answered_with_our_progress():
    async def main():
        scene = Scene()
        await scene.finish_round()
        scene.session.history.clear()
        scene.sent(Ready)
        terms = scene.session.current.agreement.terms
        scene.on_message(ANN, Ready(1, 0, 1, terms.base, terms.plan, 0, b"", True, 0.0, 0.0))
        assert scene.sent(Behind) == [Behind(1, 0)] and scene.session.dropped_frames == 1

    asyncio.run(main())


def test_message_of_a_past_round_is_answered_with_its_commit():
    async def main():
        scene = Scene()
        await scene.finish_round()
        scene.sent(Commit)
        scene.on_message(ANN, Ask(1, 0))
        assert [message.proposal.round for message in scene.sent(Commit)] == [1] and scene.session.dropped_frames == 0
        assert scene.sent(Behind) == []

    asyncio.run(main())


def test_message_of_a_dropped_round_is_answered_with_its_commit_and_our_progress():
    async def main():
        scene = Scene()
        for _ in range(2):
            await scene.finish_round()
        scene.session.on_tick()
        assert scene.session.history.get(1) is None
        scene.sent(Commit)
        scene.on_message(ANN, Vote(1, 0, Ballot(2, ANN), bytes(32), bytes(32)))
        assert scene.sent(Commit) == [] and scene.sent(Behind) == [Behind(2, 0)]
        scene.on_message(ANN, Ask(1, 0))
        assert [message.proposal.round for message in scene.sent(Commit)] == [1]
        assert scene.sent(Behind) == [Behind(2, 0)] and scene.session.dropped_frames == 2

    asyncio.run(main())


@pytest.mark.parametrize(("ahead", "stored", "dropped"), [(1, 1, 0), (2, 0, 1), (3, 0, 1)])
def test_message_of_the_next_round_waits_and_of_a_later_one_is_counted(ahead, stored, dropped):
    scene = Scene()
    scene.on_message(ANN, Ready(1 + ahead, 0, 1, bytes(32), bytes(32), 0, b"", True, 0.0, 0.0))
    assert scene.session.sizes()["stash"][0] == stored and scene.session.dropped_frames == dropped
    assert scene.session.current.agreement.past == {ANN} and scene.sent(Behind) == []


def test_message_of_the_next_round_is_delivered_when_it_begins():
    async def main():
        scene = Scene()
        scene.on_message(ANN, Prepare(2, 0, Ballot(2, ANN), FIRST))
        await scene.finish_round()
        assert [message.round for message in scene.sent(Promise)] == [1, 2]

    asyncio.run(main())


def test_refused_connection_is_no_death_for_the_quorum():
    scene = Scene()
    scene.session.announced[ANN] = Ready(1, 0, 1, bytes(32), bytes(32), 1, b"", True, 1.0, 1.0)
    scene.session.on_link_down(BEN, gone=False)
    assert not scene.session.catch_up.gone
    scene.session.on_link_down(ANN, gone=True)
    assert scene.session.catch_up.gone == {ANN} and not scene.session.announced
    agreement = scene.session.current.agreement
    assert not agreement.electorate.able and set(agreement.electorate.absent) == {ANN, BEN}
    scene.session.on_link_up(ANN)
    assert not scene.session.catch_up.gone and agreement.electorate.able


def test_session_takes_only_frames_of_its_fragment_from_the_stash_that_all_share():
    pending_frames = PendingFrames(MAX_PENDING, MAX_PENDING_EACH)
    scene = Scene(fragment=1, pending_frames=pending_frames)
    for fragment in range(3):
        pending_frames.put(ANN, Frame(Ask(1, fragment), b"", bytes(64)))
    scene.session.advance()
    assert [frame.message.fragment for _, frame in pending_frames.take()] == [0, 2]


def test_peer_that_asks_for_committed_results_follows_until_it_announces_for_our_round():
    """The results of past rounds are stored for it meanwhile."""

    async def main():
        scene = Scene()
        scene.announce()
        scene.on_message(CAT, Fetch(1, 0, bytes(32), (0,)))
        assert scene.session.history.followers == [], "nothing is committed yet"
        scene.deliver_round()
        scene.on_message(BEN, Ask(1, 0))
        assert scene.session.history.followers == [], "it asks for no results"
        scene.on_message(CAT, Fetch(1, 0, bytes(32), (0,)))
        assert scene.session.history.followers == [CAT]
        scene.on_message(CAT, Ask(1, 0))
        assert scene.session.history.followers == [CAT]
        terms = scene.session.current.agreement.terms
        scene.on_message(CAT, Ready(1, 0, 1, terms.base, terms.plan, 0, b"", True, 0.0, 0.0))
        assert scene.session.history.followers == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("message", "follows"), [(Ask(1, 0), True), (Vote(1, 0, Ballot(2, ANN), bytes(32), bytes(32)), False)]
)
def test_peer_that_asks_about_a_past_round_follows_and_a_late_voter_does_not(message, follows):
    async def main():
        scene = Scene()
        await scene.finish_round()
        scene.on_message(CAT, message)
        assert scene.session.history.followers == [CAT] * follows

    asyncio.run(main())


@pytest.mark.parametrize(("signature", "committed", "asked"), [(64, False, 1), (0, False, 0), (64, True, 0)])
def test_signer_of_a_message_of_a_later_round_is_asked_how_ours_ended_unless_we_know(signature, committed, asked):
    scene = Scene()
    scene.announce()
    if committed:
        scene.deliver_round()
    scene.sent(Ask)
    message = Ask(2, 0) if signature else Result(2, 0, Ballot(2, ANN), 0, FIRST)
    scene.session.on_frame(ANN, Frame(message, b"", bytes(signature)))
    assert scene.sent(Ask) == [Ask(1, 0)] * asked


def test_peer_follows_while_results_for_it_wait_and_gets_them_without_pauses_once_it_falls_behind():
    async def main():
        scene = Scene()
        await scene.finish_round()
        scene.on_message(CAT, Ask(1, 0))
        scene.queue.waiting = 1
        scene.now += 0.8 * FOLLOWED_SECONDS
        scene.session.on_tick()
        scene.now += 0.8 * FOLLOWED_SECONDS
        scene.session.on_tick()
        assert scene.session.history.followers == [CAT] and not scene.queue.released
        scene.queue.waiting = 0
        await scene.finish_round()
        scene.queue.waiting = 1
        scene.session.on_tick()
        assert set(scene.queue.released) == {(CAT, 0)}
        scene.queue.waiting = 0
        scene.now += 1.2 * FOLLOWED_SECONDS
        scene.session.on_tick()
        assert scene.session.history.followers == []

    asyncio.run(main())
