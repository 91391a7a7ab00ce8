"""Members that are absent: as many stay members as are needed, so that the share of liars does not grow."""

from __future__ import annotations

import dataclasses
from functools import partial

import msgspec
import pytest
from kit.rounds.agreements import sign, verify
from kit.rounds.fake_keys import FakeKeys
from kit.rounds.fake_standing import FakeStanding
from kit.rounds.round_harness import FixedLife, farewell, freely, leaving
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.farewells import signed
from thinwire.collectives.consensus.justification import justify
from thinwire.collectives.consensus.members.lives import lives_in_order, lives_of
from thinwire.collectives.consensus.members.quorum import TWO_THIRDS, enough, tolerated
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import sound, statement
from thinwire.swarm.messages.registry import (
    LIFE,
    Ballot,
    Contribution,
    Leave,
    MemberProof,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Ready,
)

IDS = tuple(bytes([number]) * 32 for number in range(8))
LEADER, ME, LIAR, GONE, NEW, *_ = IDS
MEMBERS = IDS[:4]
LIVES = {peer: bytes([100 + at]) * LIFE for at, peer in enumerate(IDS)}
OTHER_LIFE, RESULTS, ANNOUNCED = b"z" * LIFE, b"r" * 32, b"a" * 32
TERMS = RoundTerms(
    5,
    0,
    MEMBERS,
    bytes(32),
    bytes(32),
    fraction=TWO_THIRDS,
    lives={peer: LIVES[peer] for peer in MEMBERS},
    lineage=b"l" * 16,
    grace=0.5,
)


def terms_of(count, fraction=TWO_THIRDS):
    members = IDS[:count]
    return dataclasses.replace(TERMS, members=members, fraction=fraction, lives={peer: LIVES[peer] for peer in members})


def retained(count, alive, gone=(), fraction=TWO_THIRDS):
    electorate = Electorate(ME, terms_of(count, fraction), (), lambda *_: True)
    return electorate.retained([IDS[at] for at in alive], [IDS[at] for at in gone])


# --- how many stay


def test_absent_member_stays_if_without_it_fewer_liars_would_be_tolerated():
    assert retained(4, (0, 1, 2)) == (IDS[3],)
    assert retained(5, (0, 1, 2, 3)) == (), "four members tolerate one liar, as five do"
    assert retained(7, (0, 1, 2, 6)) == (IDS[3], IDS[4], IDS[5])
    assert retained(8, (0, 1, 6, 7)) == (IDS[2], IDS[3], IDS[4]), "the most senior ones"


def test_newcomers_take_the_place_of_absent_members():
    assert retained(4, (0, 1, 2, 4)) == ()


def test_members_that_have_left_do_not_stay():
    assert retained(4, (0, 1, 2), gone=(3,)) == ()
    assert retained(7, (0, 1, 2, 3), gone=(6,)) == (IDS[4], IDS[5]), "all others"


def test_farewell_of_a_member_that_takes_part_takes_no_other_member_out():
    """A liar could otherwise leave, and take part without a vote, while an honest member is absent."""
    assert retained(4, (0, 1, 3), gone=(3,)) == (IDS[2],)
    assert retained(7, (0, 1, 2, 3, 6), gone=(6,)) == (IDS[4], IDS[5])


def test_no_absent_member_stays_with_plain_majorities():
    assert retained(4, (0, 1, 2), fraction=0.5) == retained(7, (0, 1, 2, 3), fraction=0.5) == ()


@pytest.mark.parametrize("count", range(1, 9))
def test_peers_that_can_commit_can_commit_the_next_round_too(count):
    """The rule costs no vote: a quorum of the members is a quorum of the next ones, although others stay absent."""
    for here in range(1, count + 1):
        alive = IDS[:here]
        if enough(alive, IDS[:count], fraction=TWO_THIRDS):
            after = (*alive, *retained(count, range(here)))
            assert tolerated(len(after), TWO_THIRDS) == tolerated(count, TWO_THIRDS)
            assert enough(alive, after, fraction=TWO_THIRDS)


# --- leaders and acceptors


def sealed(proposal):
    return msgspec.structs.replace(proposal, seal=sign(proposal.ballot.leader, statement(proposal)))


def signed_farewell(peer):
    return signed(Leave(5, 0, TERMS.lineage, farewell(peer), None), partial(sign, peer)).farewell


def announced(peer, life=b"", **changes):
    usual = Ready(5, 0, 1, bytes(32), bytes(32), 8, b"", True, 0.0, 0.0, life=life or LIVES[peer])
    return msgspec.structs.replace(usual, **changes)


def tell(one, peer, life=b"", now=0.0, **changes):
    """Let a peer announce itself to another one."""
    ready = announced(peer, life, **changes)
    one.on_message(peer, ready, sign(peer, ready.statement()), now)


def agreement(me, present, *, terms=TERMS, live=None, banned=(), trial=lambda peer: False):
    """Return the agreement of one peer that has the announcements of `present`."""
    one = Agreement(
        FakeKeys(me, sign, verify),
        terms,
        live=present if live is None else live,
        store=FixedLife(LIVES[me]),
        standing=FakeStanding(banned=banned, trial=trial),
    )
    for peer in present:
        if peer != me:
            tell(one, peer)
    one.announce(announced(me), 0.0)
    one.take()
    return one


def proposed(present, **changes):
    leader = agreement(LEADER, present, **changes)
    leader.tick(20.0)
    assert leader.proposal is not None
    return leader.proposal


def follows(one, message):
    one.on_message(message.proposal.ballot.leader, message, bytes(64), 0.1)
    return one.proposal == message.proposal


THREE, FOUR = MEMBERS[:3], MEMBERS


def test_leader_lets_an_absent_member_stay_with_its_life():
    proposal = proposed(THREE)
    assert proposal.alive == THREE and proposal.members == FOUR
    assert lives_of(proposal.members, proposal.lives) == TERMS.lives
    assert follows(agreement(ME, THREE), Propose(proposal))
    assert proposed(FOUR).kept == () and proposed(THREE, banned=(GONE,)).members == FOUR


def test_acceptor_refuses_a_leader_that_leaves_out_a_member():
    """The leader may be the liar: one of three members, it could then stop all rounds by not voting."""
    proposal = proposed(THREE)
    without = sealed(msgspec.structs.replace(proposal, kept=(), lives=lives_in_order(THREE, LIVES)))
    for present in (THREE, FOUR):
        assert not follows(agreement(ME, present), Propose(without))
    assert not follows(agreement(ME, THREE, banned=(GONE,)), Propose(without)), "others may not know the evidence"
    left = sealed(msgspec.structs.replace(without, farewells=(signed_farewell(GONE),)))
    assert follows(agreement(ME, THREE), Propose(left))


def test_acceptor_refuses_a_banned_peer_that_takes_part():
    """If the leader does not know yet that an absent member is banned, that costs no ballot."""
    assert not follows(agreement(ME, FOUR, banned=(GONE,)), Propose(proposed(FOUR)))
    assert follows(agreement(ME, THREE, banned=(GONE,)), Propose(proposed(THREE)))


@pytest.mark.parametrize("life", [OTHER_LIFE, bytes(LIFE)])
def test_acceptor_refuses_another_life_of_an_absent_member(life):
    """Its vote would be lost, be it listed as absent or as present."""
    proposal = proposed(THREE)
    forged = lives_in_order(FOUR, {**LIVES, GONE: life})
    assert not follows(agreement(ME, THREE), Propose(sealed(msgspec.structs.replace(proposal, lives=forged))))
    present = sealed(msgspec.structs.replace(proposed(FOUR), lives=forged))
    assert not follows(agreement(ME, THREE), Propose(present))


def test_proposal_with_a_life_that_was_lost_is_followed_without_its_announcement():
    """The proposal has its proof."""
    leader = agreement(LEADER, THREE, live=FOUR)
    tell(leader, GONE, OTHER_LIFE)
    leader.tick(20.0)
    assert leader.proposal is not None and leader.proposal.alive == FOUR
    assert follows(agreement(ME, THREE, live=FOUR), Propose(leader.proposal))


def test_absent_member_that_has_lost_its_folder_raises_no_complaint():
    """It keeps its former life until a round with its announcement, which this peer has and the leader lacks."""
    one = agreement(ME, THREE, live=FOUR)
    tell(one, GONE, OTHER_LIFE)
    assert follows(one, Propose(proposed(THREE)))
    assert not [message for _, message in one.take() if hasattr(message, "said")]


# --- votes that only a liar reports

FIRST, SECOND = Ballot(1, LEADER), Ballot(2, ME)


def proofs_of(members, lives, signer=None, terms=TERMS):
    """Return the proofs of the new lives among these, signed by their peers, or all by `signer`."""
    found = []
    for peer in members:
        if terms.lives.get(peer) != lives[peer]:
            said = announced(peer, lives[peer]).statement()
            found.append(MemberProof(1, said.digest, peer, sign(signer or peer, said)))
    return tuple(found)


def voted_for(members, lives=LIVES, terms=TERMS, signer=None, **changes):
    """Return a proposal of the first leader with these members."""
    members = tuple(sorted(members))
    made = Proposal(
        *(5, 0, FIRST, members, members, (Contribution(LIAR, 1, 8, ANNOUNCED),), (), None, ()),
        lives=lives_in_order(members, lives),
        member_proofs=proofs_of(members, lives, signer, terms),
        lineage=TERMS.lineage,
        electorate=terms.electorate,
    )
    return sealed(msgspec.structs.replace(made, **changes))


def promised(peer, ballot, voted=None):
    promise = Promise(5, 0, ballot, voted, RESULTS if voted is not None else None, TERMS.lineage)
    return promise, sign(peer, promise)


def reported(members, lives=LIVES, voters=(LIAR,), terms=TERMS, signer=None, left=()):
    """Return a proposal of the second ballot: it adopts results with these members, for which `voters` report votes."""
    earlier, group = voted_for(members, lives, terms, signer, farewells=left), tuple(sorted(THREE))
    ours = msgspec.structs.replace(
        earlier,
        ballot=SECOND,
        group=group,
        alive=group,
        adopted=RESULTS,
        sources=tuple(sorted(voters)),
        kept=earlier.members,
        farewells=(),
        left=left,
    )
    promises = {peer: promised(peer, SECOND, earlier if peer in voters else None) for peer in THREE}
    message = justify(sealed(ours), promises, ())
    assert message is not None
    return message


def lead(one, voted):
    """Let a member lead while the liar reports this vote, and the absent member answers nothing; return its proposal."""
    one.on_link_down(LEADER, 0.1)
    one.reach(LEADER)
    for now in (1.0, 2.0, 3.0, 6.0):
        one.tick(now)
        for ballot in [message.ballot for to, message in one.take() if isinstance(message, Prepare)]:
            for peer, vote in ((LIAR, voted), (LEADER, None)):
                one.on_message(peer, *promised(peer, ballot, vote), now)
        if one.proposal is not None:
            break
    return one.proposal


def test_vote_of_one_member_binds_while_another_one_is_silent():
    """Together with the tolerated liar they would be a quorum, so the results may have been decided."""
    assert follows(agreement(LEADER, THREE), reported(FOUR))
    free = sealed(msgspec.structs.replace(proposed(THREE), ballot=SECOND))
    assert not follows(agreement(LEADER, THREE), msgspec.structs.replace(reported(FOUR), proposal=free))
    assert follows(agreement(LEADER, THREE), freely(free, THREE, sign)), "without the vote"


GHOSTS = pytest.mark.parametrize(
    ("members", "lives"),
    [
        pytest.param((LIAR, *IDS[4:7]), LIVES, id="peers that nobody knows"),
        pytest.param((*FOUR, NEW), LIVES, id="a stranger"),
        pytest.param(FOUR, {**LIVES, GONE: OTHER_LIFE}, id="another life of a member"),
    ],
)


@GHOSTS
@pytest.mark.parametrize("voters", [(LIAR,), (LIAR, ME)])
def test_acceptor_follows_no_ballot_with_members_that_have_not_announced_themselves(members, lives, voters):
    """Such members could stop all rounds, or decide them. No honest member votes for them."""
    assert not follows(agreement(LEADER, THREE), reported(members, lives, voters, signer=LIAR))
    if voters == (LIAR, ME):
        assert follows(agreement(LEADER, THREE), reported(members, lives, voters)), "with their proofs"


@GHOSTS
def test_leader_ignores_a_vote_for_members_that_have_not_announced_themselves(members, lives):
    """Its own vote would confirm them, and the other members would follow."""
    assert lead(agreement(ME, THREE), voted_for(members, lives, signer=LIAR)) is None
    assert lead(agreement(ME, THREE), voted_for(FOUR)) is not None


@GHOSTS
def test_farewell_with_a_vote_for_members_that_have_not_announced_themselves_is_ignored(members, lives):
    for signer in (LIAR, None):
        one, voted = agreement(ME, THREE), voted_for(members, lives, signer=signer)
        leave = leaving(LIAR, FIRST, voted, RESULTS, lineage=TERMS.lineage, sign=partial(sign, LIAR))
        one.on_message(LIAR, leave, sign(LIAR, leave), 0.1)
        passed_on = [message for _, message in one.take() if isinstance(message, Leave)]
        assert bool(passed_on) == (signer is None)


def test_leader_and_acceptor_refuse_members_without_an_honest_one_that_is_absent():
    """The liar would be one of three members, and could stop all rounds."""
    assert lead(agreement(ME, THREE), voted_for(THREE)) is None
    for voters in ((LIAR,), (LIAR, ME)):
        assert not follows(agreement(LEADER, THREE), reported(THREE, voters=voters)), "no honest member votes for them"


def test_forged_farewell_takes_no_member_out():
    assert lead(agreement(ME, THREE), voted_for(THREE, farewells=(farewell(GONE),))) is None
    assert lead(agreement(ME, THREE), voted_for(THREE, farewells=(signed_farewell(GONE),))) is not None


@pytest.mark.parametrize("lives", [LIVES, {**LIVES, GONE: OTHER_LIFE}])
def test_leader_and_acceptor_adopt_members_that_only_a_voter_knows(lives):
    """The voter may be the honest one. If the proof were missing here, the round would stop."""
    members = (*FOUR, NEW)
    found = lead(agreement(ME, THREE), voted_for(members, lives))
    assert found is not None and found.members == members and lives_of(found.members, found.lives)[GONE] == lives[GONE]
    assert follows(agreement(LEADER, THREE), reported(members, lives))


@pytest.mark.parametrize(("honest", "liar"), [(False, False), (False, True), (True, True)])
def test_adopted_newcomers_on_trial_need_the_endorsement_of_an_honest_member(honest, liar):
    """Their voter had those of a quorum, but a liar may have shown its own to the voter only."""
    members = (*FOUR, NEW)
    for me, other in ((ME, LEADER), (LEADER, ME)):
        one = agreement(me, THREE, trial=lambda peer: True)
        for peer, endorses in ((other, honest), (LIAR, liar)):
            tell(one, peer, attempt=2, endorses=(NEW,) if endorses else ())
        adopts = lead(one, voted_for(members)) is not None if me == ME else follows(one, reported(members))
        assert adopts == (honest and liar)


def test_acceptor_adopts_members_that_are_banned():
    assert follows(agreement(LEADER, THREE, banned=(GONE,)), reported(FOUR)), "the ban may have come after the vote"


def test_excluded_newcomers_become_members_only_if_an_honest_member_has_voted_for_them():
    """Otherwise a liar could bring in banned peers by its own vote for results with them."""
    members = (*FOUR, NEW)
    for banned in ((), (NEW,)):
        found = lead(agreement(ME, THREE, banned=banned), voted_for(members))
        assert (found is not None) == (not banned)
        assert follows(agreement(LEADER, THREE, banned=banned), reported(members)) == (not banned)
        assert follows(agreement(LEADER, THREE, banned=banned), reported(members, voters=(LIAR, ME))), "two have voted"


def test_farewell_of_an_adopted_proposal_is_passed_on_with_its_value():
    """Two of seven lie: one leads with its own farewell and without itself. Later voters must be able to check that."""
    left = signed_farewell(GONE)
    found = lead(agreement(ME, THREE), voted_for(THREE, farewells=(left,)))
    assert found is not None and found.members == THREE and found.left == (left,) and not found.farewells
    message = reported(THREE, left=(left,))
    assert follows(agreement(LEADER, THREE), message)
    again = sealed(msgspec.structs.replace(message.proposal, ballot=Ballot(1, LIAR)))
    assert lead(agreement(ME, THREE), again) is not None, "also if it is adopted a second time"
    stripped = sealed(msgspec.structs.replace(message.proposal, left=()))
    assert not follows(agreement(LEADER, THREE), msgspec.structs.replace(message, proposal=stripped))


def test_free_proposal_carries_no_farewells_of_earlier_ballots():
    left = (signed_farewell(GONE),)
    assert sound(proposed(THREE), TERMS) and not sound(msgspec.structs.replace(proposed(THREE), left=left), TERMS)


@pytest.mark.parametrize("change", [{"base": b"o" * 32}, {"round": 4}, {"fragment": 1}])
def test_announcement_of_another_state_round_or_fragment_proves_no_life(change):
    """A member that has given way to another lineage has announced a life there that has ended."""
    said = announced(GONE, OTHER_LIFE, **change).statement()
    proof = MemberProof(1, said.digest, GONE, sign(GONE, said))
    earlier = voted_for(FOUR, {**LIVES, GONE: OTHER_LIFE})
    assert lead(agreement(ME, THREE), earlier) is not None
    assert lead(agreement(ME, THREE), sealed(msgspec.structs.replace(earlier, member_proofs=(proof,)))) is None


def test_members_of_adopted_results_are_not_checked_with_plain_majorities():
    """There no member lies, and the last voter may be all that is left of a decision."""
    terms = dataclasses.replace(TERMS, fraction=0.5, seniors=(GONE, LIAR, LEADER, ME))
    assert follows(agreement(LEADER, THREE, terms=terms), reported(THREE, terms=terms))


def test_newcomer_that_only_the_leader_knows_costs_no_ballot():
    assert follows(agreement(ME, FOUR), Propose(proposed((*FOUR, NEW))))


def test_later_ballots_have_no_member_that_promises_without_a_vote():
    """It may have announced its new life to some members only, so each of these ballots could be in vain."""
    one = agreement(ME, THREE, live=FOUR)
    tell(one, GONE, OTHER_LIFE)
    one.on_link_down(LEADER, 0.1)
    for now in (1.0, 2.0, 3.0):
        one.tick(now)
        for ballot in [message.ballot for to, message in one.take() if isinstance(message, Prepare)]:
            for peer in (LEADER, LIAR, GONE):
                one.on_message(peer, Promise(5, 0, ballot, None, None, TERMS.lineage), bytes(64), now)
    assert one.proposal is not None and one.proposal.ballot.term > 1
    assert GONE not in one.proposal.alive and lives_of(one.proposal.members, one.proposal.lives)[GONE] == LIVES[GONE]


def test_round_is_blocked_while_two_values_can_have_been_chosen():
    """The absent member may have voted for either of them, and the votes alone do not show which."""
    one = agreement(ME, FOUR)
    values = {LIAR: reported(FOUR).earlier[0], GONE: reported((*FOUR, NEW)).earlier[0]}
    one.on_link_down(LEADER, 0.1)
    for now in (1.0, 2.0, 3.0, 6.0):
        one.tick(now)
        for ballot in [message.ballot for to, message in one.take() if isinstance(message, Prepare)]:
            for peer, voted in values.items():
                one.on_message(peer, *promised(peer, ballot, voted), now)
    assert one.blocked and one.proposal is None
    ballot = Ballot(one.acceptor.promised.term + 1, LEADER)
    free = sealed(msgspec.structs.replace(proposed(FOUR), ballot=ballot))
    assert follows(one, freely(free, THREE, sign)) and not one.blocked
