"""Ballots of one peer, and the promises that they need."""

from dataclasses import replace

import msgspec
import pytest
from kit.rounds.fake_standing import FakeStanding
from kit.rounds.round_harness import leaving
from thinwire.collectives.consensus.acceptor import LAST_TERM, LEAP
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import DISTRUSTED, ON_TRIAL
from thinwire.collectives.consensus.proposer import Proposer
from thinwire.swarm.messages.registry import Ballot, Blame, Contribution, Promise, Proposal, Ready

IDS = [bytes([n]) * 32 for n in range(5)]
ME = IDS[3]
TERMS = RoundTerms(5, 0, tuple(IDS), bytes(32), bytes(32), patience=2.0)


RESULTS, OTHER, SIGNED = b"r" * 32, b"o" * 32, b"s" * 64


def proposal_of(ballot, alive=tuple(IDS)):
    entries = tuple(Contribution(peer, 1, 1) for peer in alive)
    return Proposal(5, 0, ballot, alive, alive, entries, (), None, (), electorate=TERMS.electorate)


def announced(weight=1):
    return Ready(5, 0, 1, bytes(32), bytes(32), weight, b"", True, 0.0, 0.0)


def electorate(terms=TERMS, live=IDS):
    return Electorate(ME, terms, live, lambda peer, message, signature: True)


def proposer_of(terms=TERMS, live=IDS, weights=(1, 1, 1, 1, 1)):
    ready = {peer: announced(weight) for peer, weight in zip(IDS, weights, strict=True)}
    return Proposer(electorate(terms, live), ready)


def promise(term, voted=None, digest=None):
    return Promise(5, 0, Ballot(term, ME), voted, digest)


def proposed(proposer, before, now):
    """Return the proposal that a proposer makes of the promises."""
    found = proposer.propose(before, now)
    return None if found is None else found.proposal


def prepared(term=3, **options):
    proposer = proposer_of(**options)
    proposer.prepare(promise(term), SIGNED, 0.0)
    return proposer


@pytest.mark.parametrize("linked", [True, False])
def test_proposer_without_promises_of_three_of_five_never_opens(linked):
    """Two are dead, and may have voted; the third promises nothing, whether it is reachable or not."""
    live = {ME, IDS[4]} | ({IDS[0]} if linked else set())
    candidate = Proposer(electorate(live=live), {peer: announced() for peer in (ME, IDS[4])})
    for patiences in range(60):
        now = 2.0 * patiences
        if not candidate.preparing:
            candidate.prepare(promise(2), SIGNED, now)
            candidate.on_promise(IDS[4], promise(2), SIGNED)
        assert proposed(candidate, None, now + 0.1) is None and proposed(candidate, None, now + 2.1) is None


def test_proposer_with_farewells_of_the_dead_opens_with_two_of_three():
    known = electorate(live={ME, IDS[4]})
    for peer in IDS[1:3]:
        known.farewells.add(leaving(peer))
    candidate = Proposer(known, {peer: announced() for peer in (ME, IDS[4])})
    candidate.prepare(promise(2), SIGNED, 0.0)
    assert proposed(candidate, None, 0.1) is None
    candidate.on_promise(IDS[4], promise(2), SIGNED)
    found = proposed(candidate, None, 0.2)
    assert found is not None and [one.peer for one in found.farewells] == IDS[1:3]
    assert {(one.peer, one.reason) for one in found.excluded} == {
        (IDS[0], "silent"),
        (IDS[1], "left"),
        (IDS[2], "left"),
    }


def test_departed_member_takes_no_part_although_it_promised_before():
    known = electorate()
    candidate = Proposer(known, {peer: announced() for peer in IDS})
    candidate.prepare(promise(2), SIGNED, 0.0)
    for peer in IDS:
        if peer != ME:
            candidate.on_promise(peer, promise(2), SIGNED)
    known.farewells.add(leaving(IDS[0], Ballot(2, ME)))
    found = proposed(candidate, None, 0.1)
    assert found is not None and found.alive == tuple(IDS[1:]) and [one.peer for one in found.farewells] == IDS[:1]


def test_member_has_answered_a_ballot_with_its_promise_and_then_with_its_vote():
    candidate = Proposer(electorate(live=IDS[1:]), {peer: announced() for peer in IDS})
    assert candidate.unanswered == ()
    candidate.prepare(promise(2), SIGNED, 0.0)
    for peer in IDS[1:3]:
        candidate.on_promise(peer, promise(2), SIGNED)
    assert candidate.unanswered == (IDS[4],), "the first member cannot be reached"
    candidate.on_promise(IDS[4], promise(2), SIGNED)
    assert candidate.unanswered == ()
    found = proposed(candidate, None, 0.1)
    assert found is not None and candidate.unanswered == (IDS[1], IDS[2], IDS[4])
    candidate.on_vote(IDS[2])
    candidate.yield_to_others()
    assert candidate.unanswered == (IDS[1], IDS[4]), "those of the last ballot count until the next one"


def test_proposer_waits_for_peer_without_state_only_if_member():
    """One of five is dead; a newcomer and a member have no state. Only the member may have voted before."""
    guest, alive = bytes([9]) * 32, [peer for peer in IDS if peer != IDS[0]]
    ready = {peer: announced() for peer in alive}
    candidate = Proposer(electorate(live={*alive, guest}), ready)
    candidate.prepare(promise(2), SIGNED, 0.0)
    for peer in (IDS[1], IDS[2]):
        candidate.on_promise(peer, promise(2), SIGNED)
    candidate.excuse(guest)
    candidate.excuse(IDS[4])
    assert proposed(candidate, None, 0.1) is None
    candidate.on_promise(IDS[4], promise(2), SIGNED)
    assert proposed(candidate, None, 0.2) is not None


@pytest.mark.parametrize("why", ["no vote", "farewell", "no link"])
def test_proposer_waits_only_for_peers_that_would_answer(why):
    """A reachable member that has founded another lineage, for example, has no vote and promises nothing."""
    known = electorate(live=set(IDS) - ({IDS[0]} if why == "no link" else set()))
    candidate = Proposer(known, {peer: announced() for peer in IDS})
    candidate.prepare(promise(2), SIGNED, 0.0)
    for peer in (IDS[1], IDS[2], IDS[4]):
        candidate.on_promise(peer, promise(2), SIGNED)
    if why != "no link":
        assert proposed(candidate, None, 0.1) is None
    if why == "no vote":
        known.nonvoters.add(IDS[0])
    if why == "farewell":
        known.farewells.add(leaving(IDS[0], Ballot(2, ME)))
    found = proposed(candidate, None, 0.1)
    assert found is not None and IDS[0] not in found.alive


def test_proposer_waits_longer_for_a_leader_after_four_ballots():
    proposer, growth = proposer_of(), []
    for _ in range(8):
        proposer.on_other_ballot()
        growth.append(proposer.growth)
    assert growth == [1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_proposer_counts_its_own_ballots_among_those_after_which_it_waits_longer():
    proposer = proposer_of()
    for _ in range(5):
        proposer.prepare(promise(2), SIGNED, 0.0)
    assert proposer.growth == 2.0


@pytest.mark.parametrize(("view", "seconds"), [(3, 2.0), (7, 2.0), (8, 4.0), (9, 2.0)])
def test_proposer_waits_for_promises_as_long_as_its_view_has_grown(view, seconds):
    """It has precedence in every fifth view, and views last twice as long in the second rotation."""
    voters = electorate()
    proposer = Proposer(voters, {peer: announced() for peer in IDS})
    voters.views.begin(0.0)
    for peer in IDS[:3]:
        voters.views.on_change(peer, view, 0.0)
    proposer.prepare(promise(2), SIGNED, 0.0)
    assert proposed(proposer, None, seconds - 0.1) is None and proposer.preparing
    assert proposed(proposer, None, seconds) is None and not proposer.preparing


@pytest.mark.parametrize(("promised", "term"), [(0, 2), (1, 2), (2, 3), (9, 10)])
def test_next_ballot_is_above_the_first_and_the_promised_one(promised, term):
    assert proposer_of().next(Ballot(promised, IDS[0]), LAST_TERM, 0.0) == Ballot(term, ME)


def test_next_ballot_waits_for_the_pause_after_the_fifth():
    proposer = proposer_of()
    for _ in range(5):
        proposer.prepare(promise(2), SIGNED, 10.0)
    assert proposer.next(Ballot(2, ME), LAST_TERM, 10.4) is None
    assert proposer.next(Ballot(2, ME), LAST_TERM, 10.5) == Ballot(3, ME)


def test_ballots_of_others_do_not_lengthen_the_pauses():
    proposer = proposer_of()
    for _ in range(100):
        proposer.on_other_ballot()
    for _ in range(4):
        proposer.prepare(promise(2), SIGNED, 10.0)
    assert proposer.next(Ballot(2, ME), LAST_TERM, 10.0) == Ballot(3, ME)


def test_refusal_with_a_higher_promise_raises_the_next_ballot_within_bounds():
    """A report may be a lie, so it uses up no more than half of the terms above those of the last view."""
    proposer = proposer_of()
    proposer.prepare(promise(2), SIGNED, 0.0)
    proposer.refused(Ballot(70, IDS[0]))
    assert proposer.next(Ballot(2, ME), 2 * LEAP, 0.0) == Ballot(71, ME)
    proposer.refused(Ballot(2**31, IDS[0]))
    assert proposer.next(Ballot(2, ME), 2 * LEAP, 0.0) == Ballot(2 * LEAP - LEAP // 2 + 1, ME)


@pytest.mark.parametrize("view", [0, 2, 3, 4])
def test_refusals_make_a_proposer_with_precedence_begin_at_once_as_long_as_it_needs_no_pause(view):
    """Others would stop each other. And a liar could refuse each ballot before its leader has the promises."""
    voters = electorate()
    proposer, begun = Proposer(voters, {peer: announced() for peer in IDS}), []
    voters.views.begin(0.0)
    for peer in IDS[:3]:
        voters.views.on_change(peer, view, 0.0)
    for term in range(2, 9):
        proposer.prepare(promise(term), SIGNED, 0.0)
        assert not proposer.refused(Ballot(term, ME))
        begun.append(proposer.refused(Ballot(1000, IDS[0])))
    assert begun == [view == IDS.index(ME)] * 3 + [False] * 4


def test_group_of_an_earlier_ballot_is_given_up_after_a_rotation_of_leader_views():
    """One of its members may withhold its vote, and the others of the group may be no quorum."""
    before = proposal_of(Ballot(1, IDS[0]), alive=tuple(IDS[:4]))
    for view in range(8):
        voters = electorate()
        proposer = Proposer(voters, {peer: announced() for peer in IDS})
        voters.views.begin(0.0)
        for peer in IDS[:3]:
            voters.views.on_change(peer, view, 0.0)
        proposer.prepare(promise(9), SIGNED, 0.0)
        for peer in IDS:
            proposer.on_promise(peer, promise(9), SIGNED)
        assert (proposed(proposer, before, 0.1).group == before.group) == (view < 5)


def test_proposer_opens_with_promises_of_a_quorum_for_its_ballot():
    proposer = prepared(live={ME, *IDS[:2]})
    proposer.on_promise(IDS[0], promise(3), SIGNED)
    assert proposed(proposer, None, 0.1) is None
    proposer.on_promise(IDS[1], promise(3), SIGNED)
    found = proposed(proposer, None, 0.2)
    assert found is not None and found.alive == (IDS[0], IDS[1], ME) and not proposer.preparing


@pytest.mark.parametrize("term", [2, 4])
def test_promise_for_another_ballot_is_ignored(term):
    proposer = prepared(live={ME, *IDS[:2]})
    proposer.on_promise(IDS[0], promise(3), SIGNED)
    proposer.on_promise(IDS[1], promise(term), SIGNED)
    assert proposed(proposer, None, 0.1) is None


@pytest.mark.parametrize(
    ("voted", "digest"),
    [
        (proposal_of(Ballot(3, ME)), RESULTS),
        (proposal_of(Ballot(4, IDS[0])), RESULTS),
        (proposal_of(Ballot(1, IDS[0])), None),
        (None, RESULTS),
        (msgspec.structs.replace(proposal_of(Ballot(1, IDS[0])), contributors=()), RESULTS),
    ],
)
def test_promise_with_an_invalid_vote_is_ignored(voted, digest):
    proposer = prepared(live={ME, *IDS[:2]})
    proposer.on_promise(IDS[0], promise(3), SIGNED)
    proposer.on_promise(IDS[1], promise(3, voted, digest), SIGNED)
    assert proposed(proposer, None, 0.1) is None


def test_promise_with_a_lower_vote_is_adopted():
    proposer, voted = prepared(live={ME, *IDS[:2]}), proposal_of(Ballot(1, IDS[0]))
    proposer.on_promise(IDS[0], promise(3), SIGNED)
    proposer.on_promise(IDS[1], promise(3, voted, RESULTS), SIGNED)
    found = proposed(proposer, None, 0.1)
    assert found is not None and found.adopted == RESULTS and found.sources == (IDS[1],)


def test_proposer_without_a_quorum_steps_back_after_a_patience():
    proposer = prepared()
    proposer.on_promise(IDS[0], promise(3), SIGNED)
    assert proposed(proposer, None, 1.9) is None and proposer.preparing
    assert proposed(proposer, None, 2.0) is None and not proposer.preparing and proposer.ballot is None


def test_ballot_does_not_wait_for_a_peer_on_trial():
    guest = bytes([9]) * 32
    standing = FakeStanding(trial=lambda peer: peer == guest)
    known = Electorate(ME, TERMS, [*IDS, guest], lambda peer, message, signature: True, standing)
    proposer = Proposer(known, {peer: announced() for peer in IDS})
    proposer.prepare(promise(2), SIGNED, 0.0)
    for peer in IDS:
        proposer.on_promise(peer, promise(2), SIGNED)
    assert proposer.propose(None, 0.1) is not None


@pytest.mark.parametrize("lineage", [b"a" * 16, b"k" * 16, b"z" * 16])
def test_promise_of_another_lineage_is_ignored(lineage):
    ours = replace(TERMS, lineage=b"k" * 16, lives=dict.fromkeys(IDS, b""))
    proposer = prepared(live={ME, *IDS[:2]}, terms=ours)
    for peer, one in ((IDS[0], b"k" * 16), (IDS[1], lineage)):
        proposer.on_promise(peer, msgspec.structs.replace(promise(3), lineage=one), SIGNED)
    assert (proposed(proposer, None, 0.1) is not None) == (lineage == ours.lineage)


@pytest.mark.parametrize("endorsed", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_newcomer_on_trial_takes_part_only_in_the_first_ballot_and_with_endorsements(endorsed, first):
    """Members defer a proposal with a newcomer that others may not have endorsed. A distrusted member stays a member."""
    guest, said = bytes([9]) * 32, {"distrusts": (IDS[4],), "endorses": (bytes([9]) * 32,) if endorsed else ()}
    ready = {peer: msgspec.structs.replace(announced(), **said) for peer in IDS} | {guest: announced()}
    everyone = [*IDS, guest]
    standing = FakeStanding(trial=lambda peer: peer == guest)
    known = Electorate(ME, TERMS, everyone, lambda peer, message, signature: True, standing)
    proposer, ballot = Proposer(known, ready), Ballot(1 if first else 2, ME)
    if first:
        proposer.first(Promise(5, 0, ballot, None, None), SIGNED)
    else:
        proposer.prepare(promise(2), SIGNED, 0.0)
        for peer in everyone:
            proposer.on_promise(peer, promise(2), SIGNED)
    found = proposer.propose(None, 0.1)
    assert bool(found.reports) != first
    proposal = found.proposal
    assert proposal.alive == tuple(everyone if first and endorsed else IDS)
    assert [entry.peer for entry in proposal.contributors] == [peer for peer in proposal.alive if peer != IDS[4]]
    out = {one.peer: one.reason for one in proposal.excluded}
    assert out.get(guest) == (None if first and endorsed else ON_TRIAL) and out[IDS[4]] == DISTRUSTED


def test_proposer_wants_no_ballot_of_its_own_at_first():
    assert not proposer_of().urged


def test_blame_of_our_ballot_calls_for_a_new_one():
    proposer, ballot = prepared(), Ballot(3, ME)
    proposer.on_blame(
        IDS[0], Blame(5, 0, ballot, IDS[0], "chunk missing"), proposal_of(ballot, tuple(IDS[1:])), 0.0, voters=()
    )
    assert not proposer.urged, "it does not take part"
    proposer.on_blame(IDS[0], Blame(5, 0, ballot, IDS[1], "hash"), proposal_of(ballot), 0.0, voters=())
    assert proposer.urged and proposer.blame_book.idle == {IDS[0], IDS[1]}


@pytest.mark.parametrize(
    ("now", "voters", "urged"), [(2.0, (), False), (2.1, (), True), (2.1, (IDS[1],), False), (2.1, (IDS[2],), True)]
)
def test_missing_results_of_an_owner_call_for_a_new_ballot_once_it_has_had_time_to_vote(now, voters, urged):
    """The three others are a quorum with the owner, and none without it."""
    proposer = prepared()
    for peer in IDS:
        proposer.on_promise(peer, promise(3), SIGNED)
    proposal = proposed(proposer, None, 0.1)
    for accuser in (IDS[0], IDS[4]):
        blame = Blame(5, 0, proposal.ballot, IDS[1], "result missing")
        proposer.on_blame(accuser, blame, proposal, now, voters=voters)
    assert proposer.urged == urged


@pytest.mark.parametrize(
    ("blamed", "led"),
    [
        (Ballot(2, ME), Ballot(3, ME)),
        (Ballot(4, ME), Ballot(3, ME)),
        *[(Ballot(3, IDS[index]), Ballot(3, IDS[index])) for index in (0, 4)],
    ],
)
def test_blame_of_another_ballot_is_ignored(blamed, led):
    proposer = prepared()
    proposer.on_blame(IDS[0], Blame(5, 0, blamed, IDS[1], "hash"), proposal_of(led), 0.0, voters=())
    assert not proposer.urged and not proposer.blame_book.idle and not proposer.blame_book.rejected


@pytest.mark.parametrize("min_peers", [1, 2])
def test_new_contribution_is_forgiven_alone_while_enough_contributors_are_left(min_peers):
    proposer = proposer_of(replace(TERMS, min_peers=min_peers), weights=(1, 1, 1, 0, 1))
    proposer.blame_book.rejected.update({IDS[2]: "hash", IDS[4]: "hash"})
    proposer.on_new_announcement(IDS[4])
    assert proposer.blame_book.rejected == {IDS[2]: "hash"}


def test_new_contribution_clears_all_complaints_while_too_few_contributors_are_left():
    proposer = proposer_of(replace(TERMS, min_peers=2), weights=(1, 0, 1, 0, 1))
    proposer.blame_book.rejected.update({IDS[2]: "hash", IDS[4]: "hash"})
    proposer.on_new_announcement(IDS[4])
    assert not proposer.blame_book.rejected


def test_next_ballot_ends_at_the_last_term():
    proposer = proposer_of()
    assert proposer.next(Ballot(LAST_TERM - 1, ME), LAST_TERM, 0.0) == Ballot(LAST_TERM, ME)
    assert proposer.next(Ballot(LAST_TERM, ME), LAST_TERM, 0.0) is None


def test_newcomers_own_no_chunks_while_they_are_at_most_half():
    terms = replace(TERMS, members=(ME, IDS[0]))
    proposer = prepared(terms=terms, live={ME, IDS[0], IDS[1], IDS[4]})
    proposer.on_promise(IDS[0], promise(3), SIGNED)
    for guest in (IDS[1], IDS[4]):
        proposer.on_promise(guest, promise(3), SIGNED)
    found = proposed(proposer, None, 0.1)
    assert found is not None and found.idle == (IDS[1], IDS[4]) and len(found.alive) == 4


@pytest.mark.parametrize(("guests", "idle"), [((), ()), ((1,), (1,)), ((1, 4), (1, 4)), ((1, 2, 4), ())])
def test_newcomers_own_chunks_only_if_they_are_more_than_half(guests, idle):
    terms = replace(TERMS, members=(ME, IDS[0]))
    proposer = prepared(terms=terms, live={ME, IDS[0], *(IDS[guest] for guest in guests)})
    proposer.on_promise(IDS[0], promise(3), SIGNED)
    for guest in guests:
        proposer.on_promise(IDS[guest], promise(3), SIGNED)
    found = proposed(proposer, None, 0.1)
    assert found is not None and found.idle == tuple(IDS[guest] for guest in idle)


def test_next_ballot_takes_chunks_of_blamed_peers_unless_no_owner_would_be_left():
    proposer = prepared(live={ME, *IDS[:2]})
    proposer.blame_book.idle |= {IDS[0]}
    for peer in IDS[:2]:
        proposer.on_promise(peer, promise(3), SIGNED)
    found = proposed(proposer, None, 0.1)
    assert found is not None and found.idle == (IDS[0],)
    proposer.prepare(promise(4), SIGNED, 1.0)
    proposer.blame_book.idle |= {IDS[1], ME}
    for peer in IDS[:2]:
        proposer.on_promise(peer, promise(4), SIGNED)
    found = proposed(proposer, None, 1.1)
    assert found is not None and found.idle == ()


def test_proposer_adopts_the_possible_value_of_the_highest_ballot():
    proposer = prepared()
    for peer, term, digest in ((IDS[0], 1, OTHER), (IDS[1], 2, RESULTS)):
        proposer.on_promise(peer, promise(3, proposal_of(Ballot(term, IDS[term])), digest), SIGNED)
    found = proposed(proposer, None, 2.0)
    assert found is not None and found.adopted == RESULTS and found.sources == (IDS[1],)


def test_proposer_with_members_that_may_lie_opens_freely_without_reported_votes():
    terms = replace(TERMS, members=tuple(IDS[:4]), fraction=2 / 3)
    proposer = prepared(terms=terms, live=IDS[:4])
    for peer in IDS[:3]:
        proposer.on_promise(peer, promise(3), SIGNED)
    found = proposed(proposer, None, 0.1)
    assert found is not None and found.adopted is None and len(found.contributors) == 4


@pytest.mark.parametrize("differ", [False, True])
def test_proposer_with_members_that_may_lie_adopts_a_value_only_if_no_other_is_possible(differ):
    """Two of four report votes. If they differ, the fourth member is silent and may have voted for either value."""
    terms = replace(TERMS, members=tuple(IDS[:4]), fraction=2 / 3)
    proposer = prepared(terms=terms, live=IDS[1:4] if differ else IDS[:4])
    for term, digest in ((1, RESULTS), (2, OTHER if differ else RESULTS)):
        proposal = proposal_of(Ballot(2 if differ else 1, IDS[term if differ else 1]), tuple(IDS[:4]))
        proposal = msgspec.structs.replace(proposal, electorate=terms.electorate)
        proposer.on_promise(IDS[term], promise(3, proposal, digest), SIGNED)
    if not differ:
        proposer.on_promise(IDS[0], promise(3), SIGNED)
    found = proposed(proposer, None, 0.1)
    assert (found is None) if differ else (found is not None and found.adopted == RESULTS)


def voted(term, digest, *contributors):
    """Return a vote of an earlier ballot: proposal and digest."""
    leader = IDS[term]
    proposal = proposal_of(Ballot(term, leader))
    entries = tuple(entry for entry in proposal.contributors if entry.peer in contributors)
    return msgspec.structs.replace(proposal, contributors=entries), digest


@pytest.mark.parametrize(
    ("contributors", "other", "tried"),
    [(IDS, IDS, True), (IDS, IDS[1:], False), (IDS[1:], IDS, False), (IDS[:4], IDS, False)],
)
def test_results_of_voters_are_tried_again_only_if_votes_for_the_same_contributors_differ(contributors, other, tried):
    """Two of six voted for two digests, and three promise without a vote, so no value may have been chosen.

    Each of the voters may lie. So the results are computed in another ballot first, and adopted in the one after it.
    """
    terms = replace(TERMS, members=(*IDS, bytes([9]) * 32))
    proposer, adopted = proposer_of(terms=terms), []
    proposer.first(promise(1), SIGNED)
    assert proposed(proposer, None, 0.0) is not None, "another leader may have taken its place"
    votes = {IDS[0]: voted(1, RESULTS, *contributors), IDS[1]: voted(2, OTHER, *other)}
    proposals = {peer: msgspec.structs.replace(one, electorate=terms.electorate) for peer, (one, _) in votes.items()}
    for term in (3, 4, 5, 6):
        proposer.prepare(promise(term), SIGNED, float(term))
        for peer in (IDS[0], IDS[1], IDS[2], IDS[4]):
            said = promise(term, proposals[peer], votes[peer][1]) if peer in votes else promise(term)
            proposer.on_promise(peer, said, SIGNED)
        found = proposed(proposer, None, term + 0.1)
        assert found is not None and (found.adopted is not None) == (tried and term in (4, 5))
        adopted += [found.adopted] if found.adopted is not None else []
    assert set(adopted) == ({RESULTS, OTHER} if tried else set()), "each value once"


@pytest.mark.parametrize("second", [RESULTS, OTHER])
def test_contested_results_with_more_votes_than_may_lie_are_adopted_at_once(second):
    terms = replace(TERMS, members=(*IDS, bytes([9]) * 32))
    proposer, proposal = prepared(terms=terms), voted(1, RESULTS, *IDS)[0]
    for peer, digest in ((IDS[0], RESULTS), (IDS[1], second), (IDS[2], OTHER), (IDS[4], None)):
        vote = msgspec.structs.replace(proposal, electorate=terms.electorate), digest
        proposer.on_promise(peer, promise(3, *vote) if digest is not None else promise(3), SIGNED)
    found = proposed(proposer, None, 0.1)
    assert found is not None and found.adopted == second
    assert found.sources == (tuple(IDS[:2]) if second == RESULTS else tuple(IDS[1:3]))


def test_ballot_of_another_peer_ends_the_wish_for_a_new_one_of_ours():
    proposer, ballot = prepared(), Ballot(3, ME)
    proposer.on_blame(IDS[0], Blame(5, 0, ballot, IDS[1], "hash"), proposal_of(ballot), 0.0, voters=())
    assert proposer.urged
    proposer.on_other_ballot()
    assert not proposer.urged and not proposer.preparing
