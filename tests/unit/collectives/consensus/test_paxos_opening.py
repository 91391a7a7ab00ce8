"""Opening of rounds whose members are present before they contribute (asynchronous methods)."""

from __future__ import annotations

import pytest
from kit.rounds.fake_keys import FakeKeys
from kit.rounds.round_harness import leaving
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore, VoteRecord
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.swarm.messages.registry import Ballot, Blame, Prepare, Promise, Propose, Ready

BASE, PLAN = bytes(32), bytes([1]) * 32
IDS = [bytes([index]) * 32 for index in range(4)]
GRACE, PATIENCE = 0.5, 2.0


def ready(attempt, weight):
    return Ready(5, 0, attempt, BASE, PLAN, weight, b"", True, 0.0, 0.0)


def leader(*, buffered=True, min_peers=1):
    terms = RoundTerms(
        5, 0, tuple(IDS), BASE, PLAN, grace=GRACE, patience=PATIENCE, buffered=buffered, min_peers=min_peers
    )
    return Agreement(FakeKeys(IDS[0]), terms, live=IDS)


def here(peer, others, *, at=0.0):
    peer.announce(ready(1, 0), at)
    for other in others:
        peer.on_message(other, ready(1, 0), bytes(64), at)


def test_asynchronous_leader_does_not_open_without_contribution():
    peer = leader()
    here(peer, IDS[1:])
    for now in (1.0, 10.0, 100.0):
        peer.tick(now)
        assert peer.proposal is None and peer.waiting_for() == tuple(IDS)


def test_asynchronous_grace_starts_with_first_contribution_and_ends_with_last():
    peer = leader()
    here(peer, IDS[1:])
    peer.on_message(IDS[2], ready(2, 10), bytes(64), 3.0)
    peer.tick(3.0 + 0.9 * GRACE)
    assert peer.proposal is None and peer.waiting_for() == (IDS[0], IDS[1], IDS[3])
    peer.tick(3.0 + 1.1 * GRACE)
    assert peer.proposal is not None
    # All are in the group, and so members of the next round; one of them contributes.
    assert peer.proposal.alive == tuple(IDS) and [one.peer for one in peer.proposal.contributors] == [IDS[2]]
    peer = leader()
    here(peer, IDS[1:])
    peer.announce(ready(2, 10), 3.0)
    for other in IDS[1:]:
        assert peer.proposal is None
        peer.on_message(other, ready(2, 10), bytes(64), 3.1)
    assert peer.proposal is not None and len(peer.proposal.contributors) == 4


def test_asynchronous_leader_waits_for_min_peers():
    peer = leader(min_peers=2)
    here(peer, IDS[1:])
    peer.announce(ready(2, 10), 3.0)
    peer.tick(50.0)
    assert peer.proposal is None
    peer.on_message(IDS[3], ready(2, 10), bytes(64), 50.0)
    peer.tick(50.0 + 1.1 * GRACE)
    assert peer.proposal is not None and len(peer.proposal.contributors) == 2


@pytest.mark.parametrize("said", [2, 0])
def test_asynchronous_leader_waits_for_absent_peers_and_quorum(said):
    peer = leader()
    here(peer, IDS[1 : said + 1])
    peer.announce(ready(2, 10), 0.0)
    peer.tick(0.9 * PATIENCE)
    assert peer.proposal is None
    peer.tick(1.1 * PATIENCE)
    assert (peer.proposal is not None) == (said == 2)


@pytest.mark.parametrize(("buffered", "opens"), [(True, True), (False, False)])
def test_asynchronous_round_waits_for_no_absent_member_as_contributor_or_leader(buffered, opens):
    """A grace of 0 also occurs without absence: by `exchange.straggler_timeout`."""
    terms = RoundTerms(
        5, 0, tuple(IDS), BASE, PLAN, grace=GRACE, patience=PATIENCE, buffered=buffered, graces={IDS[0]: 0.0}
    )
    peer = Agreement(FakeKeys(IDS[1]), terms, live=IDS)
    here(peer, IDS[2:], at=2.0)
    peer.announce(ready(2, 10), 3.0)
    for other in IDS[2:]:
        peer.on_message(other, ready(2, 10), bytes(64), 3.0)
    peer.tick(3.0)
    assert any(isinstance(message, Prepare) for _, message in peer.take()) == opens


def test_asynchronous_round_waits_for_an_absent_member_that_is_back():
    terms = RoundTerms(5, 0, tuple(IDS), BASE, PLAN, patience=PATIENCE, buffered=True, graces={IDS[0]: 0.0})
    peer = Agreement(FakeKeys(IDS[1]), terms, live=IDS)
    here(peer, [IDS[0], *IDS[2:]])
    peer.announce(ready(2, 10), 3.0)
    peer.tick(3.0)
    assert not any(isinstance(message, Prepare) for _, message in peer.take()), "the member that is back leads"


def test_synchronous_leader_opens_when_all_are_ready():
    peer = leader(buffered=False)
    here(peer, IDS[1:])
    peer.announce(ready(2, 10), 0.1)
    assert peer.proposal is not None


@pytest.mark.parametrize("newcomers", [(), (bytes([9]) * 32,)])
def test_leader_opens_with_the_announcement_of_the_last_member(newcomers):
    peer = leader(buffered=False)
    peer.announce(ready(1, 10), 0.0)
    for other in (*newcomers, *IDS[1:]):
        assert peer.proposal is None
        peer.on_message(other, ready(1, 10), bytes(64), 0.1)
    assert peer.proposal is not None


@pytest.mark.parametrize(("count", "left", "came"), [(7, 3, 2), (4, 0, 1)], ids=["three of four", "the senior half"])
def test_grace_begins_with_the_announcement_that_completes_a_quorum(count, left, came):
    ids = [bytes([index]) * 32 for index in range(count)]
    terms = RoundTerms(5, 0, tuple(ids), BASE, PLAN, grace=GRACE, patience=PATIENCE)
    peer = Agreement(FakeKeys(ids[0]), terms, live=ids)
    for other in ids[count - left :]:
        peer.on_message(other, leaving(other), bytes(64), 0.0)
    peer.announce(ready(1, 10), 0.0)
    for other in ids[1 : 1 + came]:
        peer.on_message(other, ready(1, 10), bytes(64), 1.0)
    peer.tick(1.0 + 0.9 * GRACE)
    assert peer.proposal is None
    peer.tick(1.0 + 1.1 * GRACE)
    assert peer.proposal is not None


def test_announcement_while_others_are_missing_leaves_the_round_to_the_next_tick():
    """Most announcements change nothing, and in a large round each look at the members takes time."""
    peer = leader(buffered=False)
    here(peer, IDS[1:3])
    peer.announce(ready(2, 10), 0.0)
    peer.on_message(IDS[1], ready(2, 10), bytes(64), 1.1 * GRACE)
    assert peer.proposal is None
    peer.tick(1.1 * GRACE)
    assert peer.proposal is not None


def test_announcement_is_also_the_time_to_replace_a_leader_that_stands_still():
    terms = RoundTerms(5, 0, tuple(IDS), BASE, PLAN, grace=GRACE, patience=PATIENCE)
    peer, first = Agreement(FakeKeys(IDS[1]), terms, live=IDS), leader(buffered=False)
    for one, others in ((first, IDS[1:3]), (peer, (IDS[0], IDS[2]))):
        one.announce(ready(1, 10), 0.0)
        for other in others:
            one.on_message(other, ready(1, 10), bytes(64), 0.0)
    first.tick(1.1 * GRACE)
    peer.on_message(IDS[0], Propose(first.proposal), bytes(64), 1.0)
    peer.on_message(IDS[2], ready(2, 10), bytes(64), 1.0 + 3.1 * PATIENCE)
    assert [one.ballot.term for _, one in peer.take() if isinstance(one, Prepare)] == [2]


def test_announcement_is_also_the_time_to_open_a_ballot_without_a_peer_that_does_not_answer():
    silent = bytes([9]) * 32
    terms = RoundTerms(5, 0, tuple(IDS), BASE, PLAN, grace=GRACE, patience=PATIENCE)
    peer = Agreement(FakeKeys(IDS[1]), terms, live=[*IDS[1:], silent])
    peer.announce(ready(1, 10), 0.0)
    for other in IDS[2:]:
        peer.on_message(other, ready(1, 10), bytes(64), 1.0)
    begun = peer.acceptor.promised
    assert begun.leader == IDS[1]
    for other in IDS[2:]:
        peer.on_message(other, Promise(5, 0, begun, None, None), bytes(64), 1.1)
    peer.on_message(IDS[2], ready(2, 10), bytes(64), 1.0 + 0.9 * PATIENCE)
    assert peer.proposal is None
    peer.on_message(IDS[2], ready(3, 10), bytes(64), 1.0 + 1.1 * PATIENCE)
    assert peer.proposal.ballot == begun


def test_restarted_leader_that_promised_its_first_ballot_begins_the_next_one_as_soon_as_all_are_ready():
    """It had not proposed anything, so it does not wait for its own proposal."""
    terms = RoundTerms(5, 0, tuple(IDS), BASE, PLAN, grace=GRACE, patience=PATIENCE)
    store = MemoryVoteStore()
    store.save(VoteRecord(b"", 5, Ballot(1, IDS[0]), None, None))
    peer = Agreement(FakeKeys(IDS[0]), terms, live=IDS, store=store)
    here(peer, IDS[1:], at=3.0)
    assert [one.ballot.term for _, one in peer.take() if isinstance(one, Prepare)] == [2]


def test_leader_waits_for_each_member_as_long_as_its_own_grace():
    ids = [*IDS, bytes([4]) * 32]
    terms = RoundTerms(5, 0, tuple(ids), BASE, PLAN, grace=GRACE, patience=PATIENCE, graces={ids[4]: 0.1})

    def opens(came):
        """Return the time at which the leader opens; the peers `came` announce at their times, in order."""
        peer = Agreement(FakeKeys(ids[0]), terms, live=ids)
        peer.announce(ready(1, 1), 0.0)
        for at in range(100):
            for other in [other for other, when in came.items() if when == at]:
                peer.on_message(other, ready(1, 1), bytes(64), at / 100)
            peer.tick(at / 100)
            if peer.proposal is not None:
                return at / 100
        return None

    here = dict.fromkeys(ids[1:3], 0)
    assert opens({**here, ids[3]: 0}) == 0.1
    assert opens({**here, ids[4]: 0}) == opens(here) == GRACE
    assert opens({**here, ids[3]: 30}) == 0.3, "only the last one is missing, and its time is over"


def barring(me, barred, **more):
    terms = RoundTerms(5, 0, tuple(IDS), BASE, PLAN, patience=PATIENCE, **more)
    return Agreement(FakeKeys(IDS[me]), terms, live=IDS, barred=barred)


def test_leader_excludes_barred_contributor_which_stays_a_member():
    peer = barring(0, {IDS[3]})
    peer.announce(ready(1, 1), 0.0)
    for other in IDS[1:]:
        peer.on_message(other, ready(1, 1), bytes(64), 0.0)
    assert [one.peer for one in peer.proposal.contributors] == IDS[:3] and IDS[3] in peer.proposal.alive
    assert [(one.peer, one.reason) for one in peer.proposal.excluded] == [(IDS[3], "withheld")]


@pytest.mark.parametrize(("min_peers", "objects"), [(1, True), (3, True), (4, False)])
def test_participant_objects_to_barred_contributor_unless_too_few_are_left(min_peers, objects):
    leader, peer = barring(0, ()), barring(1, {IDS[3]}, min_peers=min_peers)
    leader.announce(ready(1, 1), 0.0)
    for other in IDS[1:]:
        leader.on_message(other, ready(1, 1), bytes(64), 0.0)
    peer.on_message(IDS[0], Propose(leader.proposal), bytes(64), 0.1)
    said = [(to, message.peer, message.reason) for to, message in peer.take() if isinstance(message, Blame)]
    assert said == ([(IDS[0], IDS[3], "withheld")] if objects else [])
