"""Acceptor of one peer: durable promises and votes, and the pace at which it accepts ballots of one leader."""

from __future__ import annotations

import random

import pytest
from thinwire.collectives.consensus.acceptor import BALLOTS, LAST_TERM, LEAP, Acceptor, ballot_pause
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.members.lives import electorate_digest
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore, VoteRecord
from thinwire.collectives.consensus.proposal import name_of
from thinwire.swarm.messages.registry import LIFE, Ballot, Contribution, Farewell, Leave, Prepare, Proposal

FIRST, SECOND, THIRD = (bytes([index]) * 32 for index in (1, 2, 3))
MEMBERS = (FIRST, SECOND, THIRD)
ELECTORATE = electorate_digest(MEMBERS, bytes(3 * LIFE))
BASE, PLAN, DIGEST, OTHER = bytes(32), b"p" * 32, b"d" * 32, b"e" * 32
PATIENCE = 2.0


def terms(round=5, **changes):
    return RoundTerms(round, 0, MEMBERS, BASE, PLAN, max_weight=100, patience=PATIENCE, **changes)


def views_of(terms):
    return Electorate(FIRST, terms, MEMBERS, lambda peer, message, signature: True).views


def acceptor_of(store=None, *, abstains=False, **changes):
    given = terms(**changes)
    return Acceptor(given, store or MemoryVoteStore(), views_of(given), abstains=abstains)


class FullDisk(MemoryVoteStore):
    """Store that cannot save while `full`."""

    full = True

    def save(self, record):
        if self.full:
            raise OSError("no space left on device")
        super().save(record)


def sign(message):
    return b"signed"


def proposal_of(term, leader=FIRST, electorate=ELECTORATE):
    entries = tuple(Contribution(peer, 1, 10) for peer in MEMBERS)
    return Proposal(5, 0, Ballot(term, leader), MEMBERS, MEMBERS, entries, (), None, (), electorate=electorate)


def prepare(term, leader):
    return Prepare(5, 0, Ballot(term, leader))


def follows(acceptor, sender, proposal):
    """Let an acceptor follow a valid proposal; return True if it does."""
    return acceptor.heed_proposal(sender, proposal, 0.0) and acceptor.follow(proposal.ballot)


def test_acceptor_without_a_promise_has_no_leader_and_no_vote():
    acceptor = acceptor_of()
    assert acceptor.leader == b"" and acceptor.voted is None


def test_acceptor_is_bound_by_a_promise_of_the_first_term_and_not_before():
    acceptor = acceptor_of()
    assert not acceptor.bound
    acceptor.promise(Ballot(1, FIRST))
    assert acceptor.bound


@pytest.mark.parametrize("later", [2, 3, 4, 7, 40])
def test_promise_after_any_number_of_terms_carries_the_last_vote(later):
    """Without the old vote in a promise, a new leader could choose another value for a committed round."""
    acceptor = acceptor_of()
    assert acceptor.vote(proposal_of(1), DIGEST)
    for term in range(2, later + 1):
        promise = acceptor.promise(Ballot(term, SECOND))
        assert (promise.voted, promise.digest) == (proposal_of(1), DIGEST)
        assert (promise.round, promise.fragment, promise.ballot) == (5, 0, Ballot(term, SECOND))


def test_promise_after_two_votes_carries_the_newer_one():
    acceptor = acceptor_of()
    acceptor.vote(proposal_of(1), DIGEST)
    acceptor.promise(Ballot(2, SECOND))
    assert acceptor.vote(proposal_of(2, SECOND), OTHER)
    promise = acceptor.promise(Ballot(3, THIRD))
    assert (promise.voted, promise.digest) == (proposal_of(2, SECOND), OTHER) and acceptor.voted == proposal_of(
        2, SECOND
    )


def test_promise_without_a_vote_carries_none():
    promise = acceptor_of().promise(Ballot(2, SECOND))
    assert promise.voted is None and promise.digest is None


def test_vote_below_the_promise_is_refused_and_changes_nothing():
    acceptor = acceptor_of()
    acceptor.promise(Ballot(3, SECOND))
    assert not acceptor.vote(proposal_of(2, SECOND), DIGEST) and acceptor.voted is None
    assert acceptor.vote(proposal_of(3, SECOND), DIGEST) and acceptor.voted == proposal_of(3, SECOND)


def test_vote_for_the_same_ballot_a_second_time_is_refused():
    acceptor = acceptor_of()
    assert acceptor.vote(proposal_of(1), DIGEST)
    assert not acceptor.vote(proposal_of(1), OTHER)
    assert acceptor.promise(Ballot(2, SECOND)).digest == DIGEST


def test_vote_above_the_promise_is_accepted():
    acceptor = acceptor_of()
    acceptor.vote(proposal_of(1), DIGEST)
    assert acceptor.vote(proposal_of(2, SECOND), OTHER)


def test_heeds_a_prepare_only_from_its_leader_and_above_the_promise():
    acceptor = acceptor_of()
    assert not acceptor.heed_prepare(FIRST, prepare(2, SECOND), 0.0) and not acceptor.heed_prepare(
        THIRD, prepare(2, SECOND), 0.0
    )
    acceptor.promise(Ballot(3, SECOND))
    assert not acceptor.heed_prepare(SECOND, prepare(3, SECOND), 0.0)
    assert not acceptor.heed_prepare(SECOND, prepare(2, SECOND), 0.0)
    assert acceptor.heed_prepare(SECOND, prepare(4, SECOND), 0.0)
    assert acceptor.promised == Ballot(3, SECOND), "the promise is made by promise()"


def test_first_ballot_needs_no_promises_and_another_member_cannot_begin_it():
    """Otherwise a member could take the first ballot from its leader before it opens."""
    for term in (1, 2):
        assert acceptor_of().heed_prepare(SECOND, prepare(term, SECOND), 0.0) == (term > 1)


def test_heeds_a_term_up_to_a_bound_that_grows_with_each_view_and_is_higher_for_the_member_with_precedence():
    """Another acceptor may have promised any lower term to a liar; so the leader of a view must be able to lead above it."""
    views = views_of(given := terms())
    acceptor = Acceptor(given, MemoryVoteStore(), views, abstains=False)
    views.begin(0.0)
    for number, member in enumerate((b"", *MEMBERS[1:], *MEMBERS)):
        assert (views.number, views.member) == (number, member)
        for peer in MEMBERS:
            highest = LEAP * (number + 1 + (peer == member))
            assert not acceptor.heed_prepare(peer, prepare(highest + 1, peer), 1000.0 * number)
        if member:
            assert acceptor.heed_prepare(member, prepare(LEAP * (number + 2), member), 1000.0 * number)
        for peer in MEMBERS:
            views.on_change(peer, number + 1, 1000.0 * number)


def test_heeds_no_term_above_the_last_one():
    store = MemoryVoteStore()
    store.save(VoteRecord(b"", 5, Ballot(LAST_TERM - 1, FIRST), None, None))
    acceptor = acceptor_of(store)
    assert not acceptor.heed_prepare(SECOND, prepare(LAST_TERM + 1, SECOND), 0.0)
    assert acceptor.heed_prepare(SECOND, prepare(LAST_TERM, SECOND), 0.0)


def test_follows_a_justified_proposal_of_any_term():
    """Its promises prove that the term is in use. A peer that has restarted follows the others like that."""
    assert follows(acceptor_of(), SECOND, proposal_of(10 * LEAP, SECOND))


def test_ballots_of_the_member_with_precedence_are_counted_again_in_its_view():
    views = views_of(given := terms())
    acceptor = Acceptor(given, MemoryVoteStore(), views, abstains=False)
    for term in range(2, 12):
        acceptor.heed_prepare(SECOND, prepare(term, SECOND), 100.0 * term)
    assert not acceptor.heed_prepare(SECOND, prepare(12, SECOND), 1100.0)
    views.begin(0.0)
    for peer in MEMBERS[:2]:
        views.on_change(peer, 1, 1100.0)
    assert [acceptor.heed_prepare(SECOND, prepare(term, SECOND), 1100.0) for term in range(12, 18)] == [True] * 5 + [
        False
    ]
    assert not acceptor.trusts(SECOND), "for its leadership those of the round count"


def test_heeds_the_first_ballots_at_once_and_later_ones_after_growing_pauses():
    acceptor, now = acceptor_of(), 0.0
    for term in range(2, 2 + BALLOTS):
        assert acceptor.heed_prepare(SECOND, prepare(term, SECOND), now)
    for number in range(BALLOTS, BALLOTS + 8):
        pause = 0.75 * ballot_pause(number) * PATIENCE
        if pause:
            assert not acceptor.heed_prepare(SECOND, prepare(100 + number, SECOND), now + 0.99 * pause)
        now += 1.01 * pause
        assert acceptor.heed_prepare(SECOND, prepare(100 + number, SECOND), now)


def test_heeds_counts_the_ballots_of_each_leader_separately():
    acceptor = acceptor_of()
    for term in range(2, 4 + BALLOTS):
        acceptor.heed_prepare(SECOND, prepare(term, SECOND), 0.0)
    assert not acceptor.heed_prepare(SECOND, prepare(50, SECOND), 0.0)
    assert acceptor.heed_prepare(THIRD, prepare(50, THIRD), 0.0)


def test_trusts_a_peer_until_it_has_begun_more_ballots_than_an_honest_one():
    acceptor = acceptor_of()
    assert acceptor.trusts(SECOND)
    for term in range(2, 2 + BALLOTS):
        acceptor.heed_prepare(SECOND, prepare(term, SECOND), 500.0)
        assert acceptor.trusts(SECOND)
    acceptor.heed_prepare(SECOND, prepare(90, SECOND), 1000.0)
    assert not acceptor.trusts(SECOND) and acceptor.trusts(THIRD)


def test_follows_the_first_term_only_from_the_first_member():
    assert follows(acceptor_of(), FIRST, proposal_of(1))
    assert not follows(acceptor_of(), SECOND, proposal_of(1, SECOND))
    assert not follows(acceptor_of(), SECOND, proposal_of(1)), "sent by another peer than its leader"
    assert not follows(acceptor_of(), FIRST, proposal_of(0))


def test_only_the_first_proposal_of_a_ballot_counts():
    """A liar could otherwise have the signatures of any number of proposals checked."""
    for term, leader in ((1, FIRST), (2, SECOND)):
        acceptor = acceptor_of()
        assert acceptor.heed_proposal(leader, proposal_of(term, leader), 0.0)
        assert not acceptor.heed_proposal(leader, proposal_of(term, leader), 100.0)
        acceptor.promise(Ballot(term, leader))
        assert not acceptor.heed_proposal(leader, proposal_of(term, leader), 200.0)
        assert acceptor.heed_proposal(leader, proposal_of(term + 1, leader), 300.0)
        assert acceptor.heed_proposal(THIRD, proposal_of(term + 1, THIRD), 300.0)


def test_counted_ballot_is_not_promised_until_it_is_followed():
    acceptor = acceptor_of()
    assert acceptor.heed_proposal(SECOND, proposal_of(2, SECOND), 0.0) and acceptor.promised.term == 0
    assert acceptor.follow(Ballot(2, SECOND)) and acceptor.promised == Ballot(2, SECOND)


def test_counted_ballot_is_not_followed_once_a_higher_one_is_promised():
    acceptor = acceptor_of()
    assert acceptor.heed_proposal(SECOND, proposal_of(2, SECOND), 0.0)
    acceptor.promise(Ballot(2, THIRD))
    assert not acceptor.follow(Ballot(2, SECOND)) and acceptor.promised == Ballot(2, THIRD)


def test_follows_a_later_term_when_promised_or_heeded_and_never_below_the_promise():
    acceptor = acceptor_of()
    assert not follows(acceptor, FIRST, proposal_of(2, SECOND))
    assert not follows(acceptor, THIRD, proposal_of(2, SECOND))
    assert follows(acceptor, SECOND, proposal_of(2, SECOND))
    acceptor.promise(Ballot(3, THIRD))
    assert follows(acceptor, THIRD, proposal_of(3, THIRD))
    assert not follows(acceptor, SECOND, proposal_of(2, SECOND))
    assert not follows(acceptor, FIRST, proposal_of(1))


def test_follows_a_promised_ballot_although_its_leader_has_begun_too_many():
    acceptor = acceptor_of()
    for term in range(2, 3 + BALLOTS):
        acceptor.heed_prepare(SECOND, prepare(term, SECOND), 0.0)
    acceptor.promise(Ballot(9, SECOND))
    assert follows(acceptor, SECOND, proposal_of(9, SECOND))
    assert not follows(acceptor, SECOND, proposal_of(10, SECOND))


@pytest.mark.parametrize("term", [1, 4])
@pytest.mark.parametrize(
    "electorate",
    [
        b"",
        electorate_digest((SECOND, FIRST, THIRD), bytes(3 * LIFE)),
        electorate_digest((FIRST, SECOND), bytes(2 * LIFE)),
        electorate_digest(MEMBERS, b"x" * LIFE + bytes(2 * LIFE)),
    ],
    ids=["none", "other seniority", "fewer members", "known life"],
)
def test_follows_no_ballot_of_another_electorate(electorate, term):
    """Its vote would prove the ballot to peers that count the quorum over the other electorate."""
    assert follows(acceptor_of(), FIRST, proposal_of(term))
    acceptor = acceptor_of()
    assert not follows(acceptor, FIRST, proposal_of(term, electorate=electorate))
    assert acceptor.promised.term == 0


@pytest.mark.parametrize("changes", [{"lives": {THIRD: b"x" * LIFE}}, {"seniors": (THIRD, FIRST, SECOND)}])
def test_follows_the_electorate_of_its_lives_and_seniors(changes):
    electorate = terms(**changes).electorate
    assert follows(acceptor_of(**changes), FIRST, proposal_of(1, electorate=electorate))
    assert not follows(acceptor_of(**changes), FIRST, proposal_of(1))
    assert not follows(acceptor_of(), FIRST, proposal_of(1, electorate=electorate))


def test_rest_is_zero_at_first_then_doubles_up_to_its_bound():
    assert [ballot_pause(ballots) for ballots in range(13)] == [0, 0, 0, 0, 0, 0.25, 0.5, 1, 2, 4, 8, 8, 8]
    assert ballot_pause(10**6) == 8


def test_follows_the_first_term_from_the_first_in_leader_order_not_in_peer_order():
    reordered = RoundTerms(5, 0, (SECOND, FIRST, THIRD), BASE, PLAN, max_weight=100, patience=PATIENCE)
    for peer in MEMBERS:
        first = proposal_of(1, peer, reordered.electorate)
        acceptor = Acceptor(reordered, MemoryVoteStore(), views_of(reordered), abstains=False)
        assert follows(acceptor, peer, first) == (peer == SECOND)


# --- durable before it is sent


def test_promise_is_stored_with_the_last_vote_when_it_is_returned():
    acceptor = acceptor_of(store := MemoryVoteStore())
    assert store.record is None
    acceptor.promise(Ballot(2, SECOND))
    assert store.record == VoteRecord(b"", 5, Ballot(2, SECOND), None, None)
    acceptor.vote(proposal_of(2, SECOND), DIGEST)
    assert store.record == VoteRecord(b"", 5, Ballot(2, SECOND), proposal_of(2, SECOND), DIGEST)
    acceptor.promise(Ballot(7, THIRD))
    assert store.record == VoteRecord(b"", 5, Ballot(7, THIRD), proposal_of(2, SECOND), DIGEST)


def test_vote_above_the_promise_is_stored_as_a_promise_too():
    acceptor = acceptor_of(store := MemoryVoteStore())
    acceptor.vote(proposal_of(4, SECOND), DIGEST)
    assert store.record.promised == Ballot(4, SECOND)


def test_followed_ballot_without_a_vote_is_not_stored():
    """A restarted peer has voted for no ballot that it only followed, so it may promise or follow any."""
    acceptor = acceptor_of(store := MemoryVoteStore())
    assert follows(acceptor, SECOND, proposal_of(2, SECOND))
    assert store.record is None and acceptor.promised == Ballot(2, SECOND)


def test_restarted_peer_remembers_its_promise_and_vote_and_votes_no_lower_ballot():
    store = MemoryVoteStore()
    before = acceptor_of(store)
    before.vote(proposal_of(1), DIGEST)
    before.promise(Ballot(3, SECOND))
    after = acceptor_of(store)
    assert not after.abstains and after.promised == Ballot(3, SECOND) and after.voted == proposal_of(1)
    assert not after.vote(proposal_of(2, THIRD), OTHER) and not after.vote(proposal_of(1), OTHER)
    assert not follows(after, THIRD, proposal_of(2, THIRD))
    assert not after.heed_prepare(SECOND, prepare(3, SECOND), 0.0)
    assert after.vote(proposal_of(3, SECOND), OTHER)
    assert acceptor_of(store).promise(Ballot(9, THIRD)).voted == proposal_of(3, SECOND)


def test_failing_store_means_no_promise_no_vote_and_no_farewell():
    assert acceptor_of(FullDisk()).promise(Ballot(2, SECOND)) is None
    assert not acceptor_of(FullDisk()).vote(proposal_of(1), DIGEST)
    full = acceptor_of(FullDisk())
    assert not full.abstain() and full.farewell(FIRST, sign) is None


@pytest.mark.parametrize("action", ["promise", "vote", "withdraw"])
def test_acceptor_whose_store_failed_is_mute_although_the_disk_has_space_again(action):
    """The store may have written the record in part, and begun another life, which is no member."""
    acceptor = acceptor_of(store := FullDisk())
    if action == "promise":
        acceptor.promise(Ballot(2, SECOND))
    elif action == "vote":
        acceptor.vote(proposal_of(1), DIGEST)
    else:
        acceptor.abstain()
    store.full = False
    assert acceptor.abstains and acceptor.voted is None and acceptor.promised.term == 0
    assert acceptor.promise(Ballot(3, SECOND)) is None and not acceptor.vote(proposal_of(1), DIGEST)
    assert not acceptor.abstain() and acceptor.farewell(FIRST, sign) is None and store.record is None


@pytest.mark.parametrize(
    ("lineage", "round", "muted"),
    [
        *[(b"k" * 16, 6, True), (b"k" * 16, 500, True), (b"k" * 16, 4, False)],
        *[(b"a" * 16, 6, False), (b"z" * 16, 6, False), (b"z" * 16, 5, False)],
    ],
)
def test_record_of_a_later_round_of_the_same_lineage_mutes(lineage, round, muted):
    """A peer that comes back with an older state may have voted in this round, and the record of that is overwritten."""
    store = MemoryVoteStore()
    store.save(VoteRecord(lineage, round, Ballot(8, THIRD), None, None))
    acceptor = acceptor_of(store, lineage=b"k" * 16)
    assert acceptor.abstains == muted and acceptor.promised.term == 0
    assert (acceptor.promise(Ballot(2, SECOND)) is None) == muted
    assert acceptor.vote(proposal_of(2, SECOND), DIGEST) != muted
    assert (store.record.round, store.record.lineage) == ((round, lineage) if muted else (5, b"k" * 16))


class Renewing(MemoryVoteStore):
    """Store of which `use` begins the life `after`, or fails if that is None."""

    def __init__(self, before, after):
        super().__init__()
        self._now, self._after = before, after

    @property
    def life(self):
        return self._now

    def use_number(self, number):
        if self._after is None:
            raise OSError("no space left on device")
        self._now = self._after


@pytest.mark.parametrize("after", [b"a" * LIFE, b"k" * LIFE, b"z" * LIFE, None])
def test_acceptor_whose_announcement_has_another_life_or_is_not_stored_has_no_vote(after):
    acceptor = acceptor_of(Renewing(b"k" * LIFE, after))
    assert acceptor.use_number(7) == (after or b"k" * LIFE)
    assert acceptor.abstains == (after != b"k" * LIFE)


def test_record_of_another_lineage_is_no_promise_in_this_one():
    acceptor_of(store := MemoryVoteStore(), lineage=b"l" * 16).promise(Ballot(9, THIRD))
    assert store.record.lineage == b"l" * 16
    assert acceptor_of(store, lineage=b"m" * 16).promised.term == 0
    assert acceptor_of(store, lineage=b"l" * 16).promised == Ballot(9, THIRD)


# --- end of our part


def test_peer_that_left_neither_votes_nor_promises_even_after_a_restart():
    acceptor = acceptor_of(store := MemoryVoteStore())
    acceptor.promise(Ballot(2, SECOND))
    assert acceptor.abstain() and acceptor.abstain(), "once more is no change"
    said = acceptor.farewell(FIRST, sign)
    for one in (acceptor, acceptor_of(store)):
        assert one.abstains and not one.vote(proposal_of(2, SECOND), DIGEST) and one.promise(Ballot(4, THIRD)) is None
        assert one.farewell(FIRST, sign) == said, "it says the same again"
    assert store.record.promised == Ballot(2, SECOND), "nothing was stored after the farewell"
    assert not acceptor_of(store, round=6).abstains, "it may vote in the next round"


def test_farewell_has_the_promise_and_the_last_vote():
    acceptor = acceptor_of()
    acceptor.vote(proposal_of(2, SECOND), DIGEST)
    acceptor.promise(Ballot(3, THIRD))
    farewell = Farewell(FIRST, Ballot(3, THIRD), name_of(proposal_of(2, SECOND)), DIGEST, b"signed")
    assert acceptor.abstain()
    assert acceptor.farewell(FIRST, sign) == Leave(5, 0, b"", farewell, proposal_of(2, SECOND))


def test_farewell_without_a_vote_names_none():
    acceptor = acceptor_of()
    assert acceptor.farewell(FIRST, sign) is None, "it has not left"
    assert acceptor.abstain() and acceptor.farewell(FIRST, sign) == Leave(
        5, 0, b"", Farewell(FIRST, Ballot(0, bytes(32)), None, None, b"signed"), None
    )


def test_mute_acceptor_neither_votes_nor_promises_nor_leaves_and_stores_nothing():
    acceptor = acceptor_of(store := MemoryVoteStore(), abstains=True)
    assert acceptor.promise(Ballot(2, SECOND)) is None and not acceptor.vote(proposal_of(1), DIGEST)
    assert not acceptor.abstain() and acceptor.farewell(FIRST, sign) is None and store.record is None


def test_peer_that_cannot_store_the_number_of_an_announcement_has_no_vote():
    class Broken(MemoryVoteStore):
        def use_number(self, number):
            self.renew()
            raise OSError

    acceptor = acceptor_of(store := Broken(random.Random(1)))
    life = store.life
    assert acceptor.use_number(7) == store.life != life and acceptor.abstains, (
        "the announcement names the life in memory"
    )


def test_peer_whose_life_has_ended_in_a_round_announces_the_next_one_without_a_vote():
    acceptor = acceptor_of(store := MemoryVoteStore(random.Random(1)))
    assert acceptor.use_number(7) == store.life and store.numbers == 7 and not acceptor.abstains
    store.renew()
    assert acceptor.use_number(8) == store.life and acceptor.abstains
