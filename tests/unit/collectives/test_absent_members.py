"""Members that are absent: as many stay members as are needed, so that the share of liars does not grow."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from kit.rounds.round_harness import FixedLife, farewell, freely
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.justification import justify
from thinwire.collectives.consensus.members.lives import lives_in_order, lives_of
from thinwire.collectives.consensus.members.quorum import TWO_THIRDS, enough, tolerated
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.swarm.messages.registry import LIFE, Ballot, Contribution, Prepare, Promise, Proposal, Propose, Ready

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


def test_members_that_have_left_or_are_banned_do_not_stay():
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


def announced(peer, life=b"", **changes):
    usual = Ready(5, 0, 1, bytes(32), bytes(32), 8, b"", True, 0.0, 0.0, life=life or LIVES[peer])
    return msgspec.structs.replace(usual, **changes)


def agreement(me, present, *, terms=TERMS, live=None, banned=(), trial=lambda peer: False):
    """Return the agreement of one peer that has the announcements of `present`."""
    one = Agreement(
        me,
        terms,
        sign=lambda message: bytes(64),
        verify=lambda *_: True,
        live=present if live is None else live,
        store=FixedLife(LIVES[me]),
        banned=lambda: banned,
        trial=trial,
    )
    for peer in present:
        if peer != me:
            one.on_message(peer, announced(peer), bytes(64), 0.0)
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
    assert proposed(FOUR).kept == () and proposed(THREE, banned=(GONE,)).members == THREE


def test_acceptor_refuses_a_leader_that_leaves_out_a_member():
    """The leader may be the liar: one of three members, it could then stop all rounds by not voting."""
    proposal = proposed(THREE)
    without = msgspec.structs.replace(proposal, kept=(), lives=lives_in_order(THREE, LIVES))
    for present in (THREE, FOUR):
        assert not follows(agreement(ME, present), Propose(without))
    assert follows(agreement(ME, THREE, banned=(GONE,)), Propose(without))
    assert follows(agreement(ME, THREE), Propose(msgspec.structs.replace(without, farewells=(farewell(GONE),))))


def test_acceptor_refuses_a_banned_peer_that_takes_part():
    """If the leader does not know yet that an absent member is banned, that costs no ballot."""
    assert not follows(agreement(ME, FOUR, banned=(GONE,)), Propose(proposed(FOUR)))
    assert follows(agreement(ME, THREE, banned=(GONE,)), Propose(proposed(THREE)))


@pytest.mark.parametrize("life", [OTHER_LIFE, bytes(LIFE)])
def test_acceptor_refuses_another_life_of_an_absent_member(life):
    """Its vote would be lost, be it listed as absent or as present."""
    proposal = proposed(THREE)
    forged = lives_in_order(FOUR, {**LIVES, GONE: life})
    assert not follows(agreement(ME, THREE), Propose(msgspec.structs.replace(proposal, lives=forged)))
    present = msgspec.structs.replace(proposed(FOUR), lives=forged)
    assert not follows(agreement(ME, THREE), Propose(present))


def test_proposal_with_a_life_that_was_lost_is_followed_once_its_announcement_is_here():
    entry = announced(GONE, OTHER_LIFE)
    leader = agreement(LEADER, THREE, live=FOUR)
    leader.on_message(GONE, entry, bytes(64), 0.0)
    leader.tick(20.0)
    assert leader.proposal is not None and leader.proposal.alive == FOUR
    one = agreement(ME, THREE, live=FOUR)
    assert not follows(one, Propose(leader.proposal))
    one.on_message(GONE, entry, bytes(64), 0.2)
    assert one.proposal == leader.proposal


def test_absent_member_that_has_lost_its_folder_raises_no_complaint():
    """It keeps its former life until a round with its announcement, which this peer has and the leader lacks."""
    one = agreement(ME, THREE, live=FOUR)
    one.on_message(GONE, announced(GONE, OTHER_LIFE), bytes(64), 0.0)
    assert follows(one, Propose(proposed(THREE)))
    assert not [message for _, message in one.take() if hasattr(message, "said")]


# --- votes that only a liar reports

FIRST, SECOND = Ballot(1, LEADER), Ballot(2, ME)


def reported(members, lives=LIVES, voters=(LIAR,), terms=TERMS):
    """Return a proposal of the second ballot: it adopts results with these members, for which `voters` report votes."""
    members = tuple(sorted(members))
    entries = (Contribution(LIAR, 1, 8, ANNOUNCED),)
    earlier = Proposal(
        5,
        0,
        FIRST,
        members,
        members,
        entries,
        (),
        None,
        (),
        lives=lives_in_order(members, lives),
        lineage=TERMS.lineage,
        electorate=terms.electorate,
    )
    group = tuple(sorted(THREE))
    ours = msgspec.structs.replace(
        earlier, ballot=SECOND, group=group, alive=group, adopted=RESULTS, sources=tuple(sorted(voters)), kept=members
    )
    promises = {
        peer: (
            Promise(5, 0, SECOND, *((earlier, RESULTS) if peer in voters else (None, None)), TERMS.lineage),
            bytes(64),
        )
        for peer in THREE
    }
    message = justify(ours, promises, ())
    assert message is not None
    return message


def test_vote_of_one_member_binds_while_another_one_is_silent():
    """Together with the tolerated liar they would be a quorum, so the results may have been decided."""
    assert follows(agreement(LEADER, THREE), reported(FOUR))
    free = msgspec.structs.replace(proposed(THREE), ballot=SECOND)
    assert not follows(agreement(LEADER, THREE), msgspec.structs.replace(reported(FOUR), proposal=free))
    assert follows(agreement(LEADER, THREE), freely(free, THREE)), "without the vote"


@pytest.mark.parametrize(
    "members",
    [
        pytest.param(THREE, id="without an honest member"),
        pytest.param((LIAR, *IDS[4:7]), id="peers that nobody knows"),
        pytest.param((*FOUR, NEW), id="a stranger"),
    ],
)
def test_acceptor_adopts_no_other_members_because_of_one_vote(members):
    """The voter may lie. Such members could stop all rounds, or decide them."""
    assert not follows(agreement(LEADER, THREE), reported(members))
    confirmed = reported(members, voters=(LIAR, ME))
    assert follows(agreement(LEADER, THREE), confirmed), "an honest voter has checked them"


def test_acceptor_adopts_no_other_life_because_of_one_vote():
    other = {**LIVES, GONE: OTHER_LIFE}
    assert not follows(agreement(LEADER, THREE), reported(FOUR, other))
    assert follows(agreement(LEADER, THREE), reported(FOUR, other, voters=(LIAR, ME)))


def test_acceptor_adopts_newcomers_that_it_knows():
    known = agreement(LEADER, (*THREE, NEW))
    assert follows(known, reported((*FOUR, NEW)))
    tried = agreement(LEADER, (*THREE, NEW), trial=lambda peer: True)
    assert not follows(tried, reported((*FOUR, NEW))), "no member endorses it"
    for members in (THREE, FOUR):
        assert follows(agreement(LEADER, THREE, banned=(GONE,)), reported(members)), "bans may have come after the vote"


def test_members_of_adopted_results_are_not_checked_with_plain_majorities():
    """There no member lies, and the last voter may be all that is left of a decision."""
    terms = dataclasses.replace(TERMS, fraction=0.5, seniors=(GONE, LIAR, LEADER, ME))
    assert follows(agreement(LEADER, THREE, terms=terms), reported(THREE, terms=terms))


def test_newcomer_that_only_the_leader_knows_costs_no_ballot():
    assert follows(agreement(ME, FOUR), Propose(proposed((*FOUR, NEW))))


def test_later_ballots_have_no_member_that_promises_without_a_vote():
    """It may have announced its new life to some members only, so each of these ballots could be in vain."""
    one = agreement(ME, THREE, live=FOUR)
    one.on_message(GONE, announced(GONE, OTHER_LIFE), bytes(64), 0.0)
    one.on_link_down(LEADER, 0.1)
    for now in (1.0, 2.0, 3.0):
        one.tick(now)
        for ballot in [message.ballot for to, message in one.take() if isinstance(message, Prepare)]:
            for peer in (LEADER, LIAR, GONE):
                one.on_message(peer, Promise(5, 0, ballot, None, None, TERMS.lineage), bytes(64), now)
    assert one.proposal is not None and one.proposal.ballot.term > 1
    assert GONE not in one.proposal.alive and lives_of(one.proposal.members, one.proposal.lives)[GONE] == LIVES[GONE]


def test_round_is_divided_while_two_values_can_have_been_chosen():
    """The absent member may have voted for either of them, and the votes alone do not show which."""
    one = agreement(ME, FOUR)
    values = {LIAR: reported(FOUR).earlier[0], GONE: reported((*FOUR, NEW)).earlier[0]}
    one.on_link_down(LEADER, 0.1)
    for now in (1.0, 2.0, 3.0, 6.0):
        one.tick(now)
        for ballot in [message.ballot for to, message in one.take() if isinstance(message, Prepare)]:
            for peer, voted in values.items():
                one.on_message(peer, Promise(5, 0, ballot, voted, RESULTS, TERMS.lineage), bytes(64), now)
    assert one.divided and one.proposal is None
    ballot = Ballot(one.acceptor.promised.term + 1, LEADER)
    free = msgspec.structs.replace(proposed(FOUR), ballot=ballot)
    assert follows(one, freely(free, THREE)) and not one.divided
