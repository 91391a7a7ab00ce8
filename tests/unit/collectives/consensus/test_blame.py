"""Blames between peers: when they cost chunks, and when they exclude a contribution."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.consensus.blame import BlameBook, Complaints
from thinwire.collectives.consensus.members.quorum import enough
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import TWO_ANNOUNCEMENTS
from thinwire.swarm.messages.registry import Announced, Ballot, Blame, Contribution, Proposal, SignedAnnouncement

IDS = [bytes([i]) * 32 for i in range(6)]
LEADER, ANN, BEN, CAT, DAN, EVE = IDS


def proposal_of(alive, *, term=1, idle=(), adopted=None):
    contributors = tuple(Contribution(peer, 1, 10) for peer in alive)
    group = tuple(alive)
    return Proposal(1, 0, Ballot(term, LEADER), group, group, contributors, (), adopted, (), tuple(sorted(idle)))


class Bench:
    """Blame book of the leader in a group of members."""

    def __init__(self, count, **more):
        self.blame_book, self.proposal = BlameBook(), proposal_of(IDS[:count], **more)

    def say(self, accuser, about, reason="hash", silent=()):
        blame, alive = Blame(1, 0, self.proposal.ballot, about, reason), self.proposal.alive
        return self.blame_book.on_message(
            accuser, blame, self.proposal, lambda peers: enough(peers, alive, ()), silent=lambda peer: peer in silent
        )

    def next(self):
        """Return the next ballot that the blame book asks for."""
        self.proposal = proposal_of(
            self.proposal.alive,
            term=self.proposal.ballot.term + 1,
            idle=self.blame_book.idle & set(self.proposal.alive),
        )


def test_one_blame_takes_chunks_but_keeps_the_contribution():
    bench = Bench(4)
    assert bench.say(ANN, BEN, "chunk missing") and bench.say(BEN, ANN, "chunk missing") is False
    assert bench.blame_book.idle == {ANN, BEN} and not bench.blame_book.rejected


def test_first_blame_of_ring_ends_it_and_blames_nobody():
    bench = Bench(4)
    assert not bench.say(ANN, BEN, "ring"), "there is none"
    bench.proposal = msgspec.structs.replace(bench.proposal, order=(0, 2, 1, 3))
    assert not bench.say(EVE, BEN, "ring"), "she has no part in it"
    assert bench.say(ANN, BEN, "ring") and not bench.say(BEN, CAT, "ring")
    assert bench.blame_book.ring_failed
    assert not bench.blame_book.idle and not bench.blame_book.rejected


def test_blame_of_second_owner_excludes_the_contribution():
    bench = Bench(4)
    bench.say(ANN, BEN)
    assert not bench.say(ANN, BEN), "saying it twice adds nothing"
    bench.next()
    assert not bench.say(ANN, BEN), "and it owns no chunks any more"
    assert bench.say(CAT, BEN)
    assert bench.blame_book.rejected == {BEN: "hash"}


def test_blame_of_leader_excludes_at_once():
    bench = Bench(3)
    assert bench.say(LEADER, BEN, "norm") and bench.blame_book.rejected == {BEN: "norm"}


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_one_lying_accuser_excludes_nobody_and_loses_its_chunks(count):
    bench = Bench(count)
    for _ in range(3):
        for about in bench.proposal.alive:
            if about != ANN:
                bench.say(ANN, about)
        bench.next()
    assert not bench.blame_book.rejected and ANN in bench.blame_book.idle
    assert set(bench.proposal.alive) - bench.blame_book.idle, "somebody owns the chunks"
    assert len(bench.blame_book.idle) <= 2, "it, and the one that it has named first"


def test_self_blame_excludes_at_once():
    bench = Bench(4)
    assert bench.say(BEN, BEN, "withdrawn") and bench.blame_book.rejected == {BEN: "withdrawn"}


def test_blames_do_not_carry_over_to_new_contribution():
    bench = Bench(4)
    bench.say(ANN, BEN)
    bench.blame_book.forgive(BEN)
    assert bench.say(CAT, BEN) and not bench.blame_book.rejected


def test_peer_is_forgiven_only_once():
    """A peer that announces before every ballot and never sends its data is excluded for good."""
    bench = Bench(4)
    for reason in ("chunk missing", "hash"):
        bench.say(LEADER, BEN, reason)
        assert bench.blame_book.rejected == {BEN: reason}
        for _ in range(3):
            bench.blame_book.forgive(CAT)
        if reason != "hash":
            bench.blame_book.forgive(BEN)
            assert not bench.blame_book.rejected
    for _ in range(3):
        bench.blame_book.forgive(BEN)
        bench.next()
    assert bench.blame_book.rejected == {BEN: "hash"}
    assert bench.say(LEADER, CAT, "norm") and bench.blame_book.rejected == {BEN: "hash", CAT: "norm"}
    bench.blame_book.forgive(CAT)
    assert bench.blame_book.rejected == {BEN: "hash"}, "it had not been forgiven anything"


@pytest.mark.parametrize("accuser", [EVE, bytes([9]) * 32])
def test_blame_of_non_member_is_ignored(accuser):
    bench = Bench(4)
    assert not bench.say(accuser, BEN) and not bench.say(accuser, BEN, "result") and not bench.blame_book.idle


def test_blame_of_non_contributor_or_without_reason_is_ignored():
    bench = Bench(4)
    assert not bench.say(ANN, EVE) and not bench.say(ANN, BEN, "ugly") and not bench.blame_book.idle
    entries = tuple(entry for entry in bench.proposal.contributors if entry.peer != BEN)
    bench.proposal = msgspec.structs.replace(bench.proposal, contributors=entries)
    assert not bench.say(ANN, BEN) and not bench.blame_book.idle, "it takes part without a contribution"


def test_blame_does_not_exclude_adopted_contributors():
    bench = Bench(4, adopted=bytes(32))
    bench.say(LEADER, BEN)
    bench.say(BEN, BEN, "withdrawn")
    assert not bench.blame_book.rejected


def test_proven_complaint_leaves_a_peer_out_of_free_proposals_and_changes_the_ballot_once():
    bench = Bench(4)
    proof = Blame(1, 0, bench.proposal.ballot, BEN, "two announcements")
    for news in (True, False):
        assert bench.blame_book.on_message(ANN, proof, bench.proposal, lambda peers: True, proven=True) == news
    bench.proposal = msgspec.structs.replace(bench.proposal, adopted=bytes(32))
    about = msgspec.structs.replace(proof, peer=CAT)
    assert not bench.blame_book.on_message(ANN, about, bench.proposal, lambda peers: True, proven=True)
    assert bench.blame_book.equivocators == {BEN, CAT} and not bench.blame_book.idle


def test_repeated_complaint_about_missing_results_changes_the_ballot_once():
    bench = Bench(3)
    bench.say(ANN, BEN, "result missing")
    assert bench.say(LEADER, BEN, "result missing") and not bench.say(LEADER, BEN, "result missing")


@pytest.mark.parametrize(("about", "idle"), [(EVE, ()), (CAT, (CAT,)), (ANN, ())])
def test_missing_results_of_a_peer_that_owns_no_chunks_are_ignored(about, idle):
    bench = Bench(3, idle=idle)
    for accuser in (ANN, LEADER):
        if accuser != about:
            assert not bench.say(accuser, about, "result missing")
    assert not bench.say(about, about, "result missing") and (about == ANN or not bench.blame_book.idle)


def test_missing_results_count_only_if_they_prevent_the_quorum():
    bench = Bench(5)
    assert not bench.say(ANN, CAT, "result missing") and not bench.say(ANN, CAT, "result missing")
    assert not bench.say(BEN, CAT, "result")
    assert not bench.blame_book.idle, "three of five have all"
    assert bench.say(DAN, CAT, "result missing")
    assert bench.blame_book.idle == {CAT} and not bench.blame_book.rejected


def test_silent_owner_and_its_accuser_lose_their_chunks_if_the_quorum_needs_its_vote():
    """One of them lies, and no peer can tell which. A peer without chunks has no say, so a liar can do this once."""
    bench = Bench(3)
    assert not bench.say(ANN, BEN, "result missing")
    assert bench.say(ANN, BEN, "result missing", silent={BEN})
    assert bench.blame_book.idle == {ANN, BEN} and not bench.blame_book.rejected
    bench.next()
    assert not bench.say(ANN, LEADER, "result missing", silent={LEADER}) and bench.blame_book.idle == {ANN, BEN}


def test_vote_of_a_silent_owner_that_is_not_needed_costs_no_chunks():
    bench = Bench(5)
    assert not bench.say(ANN, CAT, "result missing", silent={CAT}) and not bench.blame_book.idle


@pytest.mark.parametrize(("count", "accuser", "about"), [(2, LEADER, ANN), (3, ANN, BEN)])
def test_blame_in_small_groups_never_blocks_the_round(count, accuser, about):
    """In a group of two, a single blame has to suffice."""
    bench = Bench(count)
    moved = bench.say(accuser, about, "result missing")
    if count == 3:
        assert not moved, "two of three can commit, and the third is brought up to date"
        moved = bench.say(LEADER, about, "result missing")
    assert moved and bench.blame_book.idle == {about}


def test_owner_blamed_by_many_is_idle_despite_its_own_blames():
    bench = Bench(5)
    bench.say(ANN, BEN, "result missing")
    for honest in (LEADER, CAT, DAN):
        bench.say(honest, ANN, "result missing")
    assert bench.blame_book.idle == {ANN}


REASONS = st.sampled_from(["hash", "norm", "chunk missing", "result", "result missing", "withdrawn", "?"])
WORDS = st.lists(st.tuples(st.sampled_from(IDS[:5]), st.sampled_from(IDS[:5]), REASONS), max_size=40)


@given(WORDS, st.sampled_from(IDS[1:5]))
def test_repeated_blames_of_one_peer_exclude_nobody(words, liar):
    """One peer alone, with any blames over several ballots, only takes chunks away."""
    bench = Bench(5)
    for at, (_, about, reason) in enumerate(words):
        if about != liar and bench.say(liar, about, reason) and at % 2:
            bench.next()
    assert not bench.blame_book.rejected


@given(WORDS)
def test_blames_cause_a_bounded_number_of_ballots(words):
    """A blame causes a new ballot only if that differs: fewer ballots than twice the group, for any blames."""
    bench, ballots = Bench(5), 0
    for accuser, about, reason in words * 3:
        if bench.say(accuser, about, reason):
            ballots += 1
            bench.next()
    assert ballots <= 2 * 5


def test_first_blame_of_owner_below_the_leader_in_peer_order_only_takes_chunks():
    bench = Bench(5)
    bench.proposal = msgspec.structs.replace(bench.proposal, ballot=Ballot(1, CAT))
    assert bench.say(ANN, BEN) and not bench.blame_book.rejected
    assert bench.blame_book.idle == {ANN, BEN}
    assert bench.say(CAT, DAN) and bench.blame_book.rejected == {DAN: "hash"}


@pytest.mark.parametrize("reason", ["subtotal", "subtotal missing"])
def test_blame_of_relay_takes_chunks_of_both_and_excludes_nobody(reason):
    bench = Bench(4)
    assert bench.say(ANN, BEN, reason)
    assert bench.blame_book.idle == {ANN, BEN} and not bench.blame_book.rejected
    assert not bench.say(CAT, BEN, reason), "BEN owns no chunks already"
    assert not bench.say(ANN, CAT, reason), "ANN owns no chunks any more"
    assert bench.blame_book.idle == {ANN, BEN}


def test_blame_of_relay_by_the_leader_takes_only_the_chunks_of_the_relay():
    bench = Bench(4)
    assert bench.say(LEADER, BEN, "subtotal") and bench.blame_book.idle == {BEN}
    pair = Bench(2)
    assert pair.say(LEADER, ANN, "subtotal") and pair.blame_book.idle == {ANN}, "also if there are no other owners"


def test_blame_of_relay_by_an_owner_above_it_or_below_the_leader_takes_the_chunks_of_both():
    bench = Bench(5)
    bench.proposal = msgspec.structs.replace(bench.proposal, ballot=Ballot(1, CAT))
    assert bench.say(BEN, ANN, "subtotal") and bench.blame_book.idle == {ANN, BEN}


def test_blame_of_relay_that_is_last_owner_leaves_it_its_chunks():
    bench = Bench(3)
    bench.blame_book.idle |= {CAT, LEADER}
    assert bench.say(ANN, BEN, "subtotal") and ANN in bench.blame_book.idle and BEN not in bench.blame_book.idle


@pytest.mark.parametrize(
    ("accuser", "about", "idle"),
    [(ANN, EVE, ()), (EVE, ANN, ()), (ANN, ANN, ()), (ANN, BEN, (BEN,)), (BEN, ANN, (BEN,))],
)
def test_blame_of_relay_among_other_peers_than_two_owners_is_ignored(accuser, about, idle):
    bench = Bench(4, idle=idle)
    assert not bench.say(accuser, about, "subtotal") and not bench.blame_book.idle


def test_missing_results_of_earlier_ballots_do_not_add_up():
    bench = Bench(5)
    assert not bench.say(ANN, DAN, "result missing")
    bench.next()
    assert not bench.say(BEN, DAN, "result missing") and not bench.say(CAT, DAN, "result missing")
    assert bench.say(ANN, DAN, "result missing") and bench.blame_book.idle == {DAN}


def test_barred_contribution_is_out_from_the_start_and_stays_out_after_another_announcement():
    book = BlameBook(barred={BEN})
    book.forgive(BEN)
    assert book.rejected == {BEN: "withheld"}
    book.forgive_all()
    assert not book.rejected, "too few others are left"


class Shown:
    """Announcements with one of every peer."""

    def signed(self, peer):
        return SignedAnnouncement(Announced(1, 0, 1, b"life", bytes(32), bytes(32)), b"s" * 64)


def test_complaint_is_repeated_after_a_quarter_of_a_patience_and_at_once_in_another_ballot():
    complaints = Complaints(RoundTerms(5, 0, tuple(IDS), bytes(32), bytes(32), patience=4.0), Shown(), ())
    first, second = proposal_of(IDS), proposal_of(IDS, term=2)
    assert complaints.make(first, IDS[1], "missing", 0.0) is not None
    assert complaints.make(first, IDS[1], "missing", 0.9) is None
    assert complaints.make(first, IDS[2], "missing", 0.9) is not None
    assert complaints.make(first, IDS[1], "missing", 1.0) is not None
    assert complaints.make(second, IDS[1], "missing", 1.1) is not None


def test_only_a_complaint_about_two_announcements_shows_one():
    complaints = Complaints(RoundTerms(5, 0, tuple(IDS), bytes(32), bytes(32)), Shown(), ())
    shown = {
        reason: complaints.make(proposal_of(IDS), IDS[1], reason, 0.0).said is not None
        for reason in ("a", "missing", TWO_ANNOUNCEMENTS, "zz")
    }
    assert shown == {"a": False, "missing": False, TWO_ANNOUNCEMENTS: True, "zz": False}
