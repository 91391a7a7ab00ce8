"""Words against others: what they cost whom."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.complaints import Complaints
from thinwire.collectives.quorum import enough
from thinwire.swarm.protocol import Ballot, Blame, Contribution, Open

IDS = [bytes([i]) * 32 for i in range(6)]
LEADER, ANN, BEN, CAT, DAN, EVE = IDS


def opened(alive, *, term=1, idle=(), adopted=None):
    contributors = tuple(Contribution(peer, 1, 10) for peer in alive)
    group = tuple(alive)
    return Open(1, 0, Ballot(term, LEADER), group, group, contributors, (), adopted, (), tuple(sorted(idle)))


class Bench:
    """The leader's complaints in a group, all of it members."""

    def __init__(self, count, **more):
        self.complaints, self.opened = Complaints(), opened(IDS[:count], **more)

    def say(self, accuser, about, reason="hash"):
        blame = Blame(1, 0, self.opened.ballot, about, reason)
        alive = self.opened.alive
        return self.complaints.hear(accuser, blame, self.opened, lambda peers: enough(peers, alive, ()))

    def next(self):
        """The next ballot, as the complaints want it."""
        self.opened = opened(
            self.opened.alive, term=self.opened.ballot.term + 1, idle=self.complaints.idle & set(self.opened.alive)
        )


def test_one_word_moves_chunks_and_leaves_the_contribution():
    bench = Bench(4)
    assert bench.say(ANN, BEN, "chunk missing") and bench.say(BEN, ANN, "chunk missing") is False
    assert bench.complaints.idle == {ANN, BEN} and not bench.complaints.rejected


def test_a_ring_ends_with_the_first_word_and_nobody_is_blamed():
    bench = Bench(4)
    assert not bench.say(ANN, BEN, "ring"), "there is none"
    bench.opened = msgspec.structs.replace(bench.opened, order=(0, 2, 1, 3))
    assert not bench.say(EVE, BEN, "ring"), "she has no part in it"
    assert bench.say(ANN, BEN, "ring") and not bench.say(BEN, CAT, "ring")
    assert bench.complaints.straight
    assert not bench.complaints.idle and not bench.complaints.rejected


def test_word_of_a_second_owner_puts_the_contribution_out():
    bench = Bench(4)
    bench.say(ANN, BEN)
    assert not bench.say(ANN, BEN), "saying it twice adds nothing"
    bench.next()
    assert not bench.say(ANN, BEN), "and it owns no chunks any more"
    assert bench.say(CAT, BEN)
    assert bench.complaints.rejected == {BEN: "hash"}


def test_what_the_leader_has_seen_counts_at_once():
    bench = Bench(3)
    assert bench.say(LEADER, BEN, "norm") and bench.complaints.rejected == {BEN: "norm"}


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_one_liar_puts_nobody_out_and_ends_without_chunks(count):
    bench = Bench(count)
    for _ in range(3):
        for about in bench.opened.alive:
            if about != ANN:
                bench.say(ANN, about)
        bench.next()
    assert not bench.complaints.rejected and ANN in bench.complaints.idle
    assert set(bench.opened.alive) - bench.complaints.idle, "somebody owns the chunks"
    assert len(bench.complaints.idle) <= 2, "it, and the one that it has named first"


def test_own_word_counts():
    bench = Bench(4)
    assert bench.say(BEN, BEN, "withdrawn") and bench.complaints.rejected == {BEN: "withdrawn"}


def test_new_contribution_is_judged_anew():
    bench = Bench(4)
    bench.say(ANN, BEN)
    bench.complaints.forgive(BEN)
    assert bench.say(CAT, BEN) and not bench.complaints.rejected


def test_a_peer_is_forgiven_once():
    """Who announces before every ballot and never sends what it announced is out for good."""
    bench = Bench(4)
    for reason in ("chunk missing", "hash"):
        bench.say(LEADER, BEN, reason)
        assert bench.complaints.rejected == {BEN: reason}
        for _ in range(3):
            bench.complaints.forgive(CAT)
        if reason != "hash":
            bench.complaints.forgive(BEN)
            assert not bench.complaints.rejected
    for _ in range(3):
        bench.complaints.forgive(BEN)
        bench.next()
    assert bench.complaints.rejected == {BEN: "hash"}
    assert bench.say(LEADER, CAT, "norm") and bench.complaints.rejected == {BEN: "hash", CAT: "norm"}
    bench.complaints.forgive(CAT)
    assert bench.complaints.rejected == {BEN: "hash"}, "it had not been forgiven anything"


@pytest.mark.parametrize("accuser", [EVE, bytes([9]) * 32])
def test_who_takes_no_part_has_no_word(accuser):
    bench = Bench(4)
    assert not bench.say(accuser, BEN) and not bench.say(accuser, BEN, "result") and not bench.complaints.idle


def test_word_about_one_who_contributes_nothing_or_for_no_reason_is_nothing():
    bench = Bench(4)
    assert not bench.say(ANN, EVE) and not bench.say(ANN, BEN, "ugly") and not bench.complaints.idle


def test_settled_contributors_stay():
    bench = Bench(4, adopted=bytes(32))
    bench.say(LEADER, BEN)
    bench.say(BEN, BEN, "withdrawn")
    assert not bench.complaints.rejected


def test_missing_results_matter_when_the_round_cannot_commit_without_those_who_lack_them():
    bench = Bench(5)
    assert not bench.say(ANN, CAT, "result missing") and not bench.say(ANN, CAT, "result missing")
    assert not bench.say(BEN, CAT, "result")
    assert not bench.complaints.idle, "three of five have all"
    assert bench.say(DAN, CAT, "result missing")
    assert bench.complaints.idle == {CAT} and not bench.complaints.rejected


@pytest.mark.parametrize(("count", "accuser", "about"), [(2, LEADER, ANN), (3, ANN, BEN)])
def test_small_groups_are_never_stuck(count, accuser, about):
    """Of two, one word is all there can be."""
    bench = Bench(count)
    moved = bench.say(accuser, about, "result missing")
    if count == 3:
        assert not moved, "two of three can commit, and the third is brought up to date"
        moved = bench.say(LEADER, about, "result missing")
    assert moved and bench.complaints.idle == {about}


def test_liar_does_not_hide_behind_who_lacks_results():
    bench = Bench(5)
    bench.say(ANN, BEN, "result missing")
    for honest in (LEADER, CAT, DAN):
        bench.say(honest, ANN, "result missing")
    assert bench.complaints.idle == {ANN}


REASONS = st.sampled_from(["hash", "norm", "chunk missing", "result", "result missing", "withdrawn", "?"])
WORDS = st.lists(st.tuples(st.sampled_from(IDS[:5]), st.sampled_from(IDS[:5]), REASONS), max_size=40)


@given(WORDS, st.sampled_from(IDS[1:5]))
def test_no_two_words_of_one_put_another_out(words, liar):
    """Whatever one peer says, in whatever order, with new ballots between: alone it only takes chunks away."""
    bench = Bench(5)
    for at, (_, about, reason) in enumerate(words):
        if about != liar and bench.say(liar, about, reason) and at % 2:
            bench.next()
    assert not bench.complaints.rejected


@given(WORDS)
def test_ballots_come_to_an_end(words):
    """A complaint calls for a new ballot only if that is another one: fewer than twice the group, whoever says what."""
    bench, ballots = Bench(5), 0
    for accuser, about, reason in words * 3:
        if bench.say(accuser, about, reason):
            ballots += 1
            bench.next()
    assert ballots <= 2 * 5
