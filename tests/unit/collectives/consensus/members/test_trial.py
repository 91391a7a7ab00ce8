"""Opinions of the members: newcomers need endorsements, and distrusted members have no weight."""

from __future__ import annotations

import msgspec
import pytest
from kit.rounds.fake_keys import FakeKeys
from kit.rounds.fake_standing import FakeStanding
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import DISTRUSTED, ON_TRIAL
from thinwire.swarm.messages.registry import Ballot, Prepare, Propose, Ready, Vote

BASE, PLAN = bytes(32), bytes([1]) * 32
*MEMBERS, NEW = [bytes([index]) * 32 for index in range(5)]
TERMS = RoundTerms(5, 0, tuple(MEMBERS), BASE, PLAN, grace=0.5)


def ready(*endorses, distrusts=()):
    return Ready(5, 0, 1, BASE, PLAN, 8, b"", True, 0.0, 0.0, endorses=endorses, distrusts=distrusts)


def agreement(me, trial=lambda peer: True, terms=TERMS):
    everyone = (*MEMBERS, NEW)
    return Agreement(FakeKeys(me), terms, live=everyone, standing=FakeStanding(trial=trial))


def proposal_of_the_leader(endorsing, trial=lambda peer: True):
    """Return the proposal of the first member, when so many members endorse the newcomer."""
    leader = agreement(MEMBERS[0], trial)
    for number, member in enumerate(MEMBERS[1:], 1):
        leader.on_message(member, ready(*[NEW] * (number < endorsing)), bytes(64), 0.0)
    leader.on_message(NEW, ready(NEW), bytes(64), 0.0)
    leader.announce(ready(*[NEW] * (endorsing > 0)), 0.0)
    leader.tick(1.0)
    assert leader.proposal is not None
    return leader.proposal


@pytest.mark.parametrize(("count", "admitted"), [(0, False), (1, False), (2, True), (3, True)])
def test_electorate_admits_a_newcomer_with_a_quorum_of_endorsements(count, admitted):
    # Of four members, two with the most senior one are a quorum.
    electorate = Electorate(MEMBERS[0], TERMS, MEMBERS, lambda *_: True, FakeStanding(trial=lambda peer: True))
    said = {member: ready(NEW) for member in MEMBERS[:count]} | {NEW: ready(NEW)}
    assert electorate.uncounted([NEW], said) == ({} if admitted else {NEW: ON_TRIAL})
    assert not electorate.uncounted(MEMBERS, {}), "members need no endorsement"


def test_leader_leaves_a_newcomer_without_endorsements_out_of_owners_contributors_and_members():
    proposal = proposal_of_the_leader(1)
    assert NEW not in (*proposal.group, *proposal.alive, *proposal.members)
    assert NEW not in [entry.peer for entry in proposal.contributors]
    assert {entry.peer: entry.reason for entry in proposal.excluded} == {NEW: "on trial"}
    assert NEW in proposal_of_the_leader(3).members and NEW in proposal_of_the_leader(0, lambda peer: False).members


def test_acceptor_follows_a_proposal_with_a_newcomer_only_with_endorsements_and_waits_for_these():
    proposal = proposal_of_the_leader(3)
    acceptor = agreement(MEMBERS[1])
    acceptor.announce(ready(NEW), 0.0)
    acceptor.on_message(MEMBERS[0], Propose(proposal), bytes(64), 0.0)
    assert acceptor.proposal is None
    acceptor.on_message(MEMBERS[2], ready(), bytes(64), 0.1)
    acceptor.on_message(NEW, ready(NEW), bytes(64), 0.1)
    assert acceptor.proposal is None
    acceptor.on_message(MEMBERS[0], ready(NEW), bytes(64), 0.2)
    assert acceptor.proposal == proposal, "the endorsements were under way"


def test_newcomer_has_no_vote_and_leads_no_ballot():
    newcomer = agreement(NEW)
    newcomer.announce(ready(), 0.0)
    proposal = proposal_of_the_leader(0)
    newcomer.on_message(MEMBERS[0], Propose(proposal), bytes(64), 0.0)
    newcomer.complete(bytes(32), 0.1)
    for now in (1.0, 100.0, 1000.0):
        newcomer.tick(now)
    assert not [message for _, message in newcomer.take() if isinstance(message, (Vote, Propose, Prepare))]
    member = agreement(MEMBERS[1])
    member.on_message(NEW, Propose(msgspec.structs.replace(proposal, ballot=Ballot(9, NEW))), bytes(64), 0.0)
    assert member.proposal is None


def test_acceptor_follows_no_first_proposal_of_earlier_results():
    """Such results would bring members with them that no peer has endorsed."""
    proposal = msgspec.structs.replace(
        proposal_of_the_leader(1), adopted=bytes(32), sources=(MEMBERS[0],), kept=tuple(sorted((*MEMBERS, NEW)))
    )
    acceptor = agreement(MEMBERS[1])
    acceptor.announce(ready(), 0.0)
    acceptor.on_message(MEMBERS[0], Propose(proposal), bytes(64), 0.0)
    assert acceptor.proposal is None and acceptor.ready
    acceptor.on_message(MEMBERS[0], Propose(proposal_of_the_leader(1)), bytes(64), 0.0)
    assert acceptor.proposal is not None


BAD = MEMBERS[3]


def distrusting(count, terms=TERMS):
    """Return announcements of all members, so many of which distrust the last one."""
    return {one: ready(distrusts=(BAD,) * (at < count)) for at, one in enumerate(terms.members)}


@pytest.mark.parametrize(("count", "out"), [(0, False), (1, False), (2, True), (3, True)])
def test_more_than_half_of_the_other_members_take_the_weight_of_one(count, out):
    electorate = Electorate(MEMBERS[0], TERMS, MEMBERS, lambda *_: True)
    assert electorate.uncounted(MEMBERS, distrusting(count)) == ({BAD: DISTRUSTED} if out else {})


@pytest.mark.parametrize("members", range(2, 40))
def test_minority_of_liars_takes_no_weight(members):
    everyone = tuple(bytes([index]) * 32 for index in range(members))
    terms = RoundTerms(5, 0, everyone, BASE, PLAN)
    liars = everyone[: (members - 1) // 2]
    said = {one: ready(distrusts=everyone if one in liars else ()) for one in everyone}
    electorate = Electorate(everyone[0], terms, everyone, lambda *_: True)
    assert not electorate.uncounted(everyone, said)
    said[everyone[-1]] = ready(distrusts=everyone[:1])
    assert not electorate.uncounted(everyone[1:], said)


def test_distrust_of_newcomers_and_of_oneself_does_not_count():
    electorate = Electorate(MEMBERS[0], TERMS, (*MEMBERS, NEW), lambda *_: True)
    said = {MEMBERS[0]: ready(distrusts=(BAD,)), BAD: ready(distrusts=(BAD,)), NEW: ready(distrusts=(BAD,))}
    assert not electorate.uncounted(MEMBERS, said)


def proposal_with(count, terms=TERMS):
    leader = agreement(MEMBERS[0], terms=terms)
    said = distrusting(count)
    for member in MEMBERS[1:]:
        leader.on_message(member, said[member], bytes(64), 0.0)
    leader.announce(said[MEMBERS[0]], 0.0)
    leader.tick(1.0)
    assert leader.proposal is not None
    return leader.proposal


def test_leader_leaves_out_only_the_contribution_of_a_distrusted_member():
    proposal = proposal_with(2)
    assert BAD in proposal.members and BAD in proposal.alive and BAD not in proposal.idle
    assert BAD not in [entry.peer for entry in proposal.contributors] and len(proposal.contributors) == 3
    assert {entry.peer: entry.reason for entry in proposal.excluded} == {BAD: DISTRUSTED}
    assert not proposal_with(1).excluded


def test_distrusted_member_contributes_if_there_are_too_few_others():
    terms = RoundTerms(5, 0, tuple(MEMBERS), BASE, PLAN, grace=0.5, min_peers=4)
    proposal = proposal_with(3, terms)
    assert len(proposal.contributors) == 4
    acceptor = agreement(MEMBERS[1], terms=terms)
    for member, said in distrusting(3).items():
        acceptor.on_message(member, said, bytes(64), 0.0)
    acceptor.on_message(MEMBERS[0], Propose(proposal), bytes(64), 0.1)
    assert acceptor.proposal == proposal


def test_acceptor_follows_no_leader_that_counts_a_distrusted_member_and_soon_replaces_it():
    proposal, acceptor = proposal_with(1), agreement(MEMBERS[1])
    said = distrusting(2)
    for member in MEMBERS[2:]:
        acceptor.on_message(member, said[member], bytes(64), 0.0)
    acceptor.on_message(MEMBERS[0], said[MEMBERS[0]], bytes(64), 0.0)
    acceptor.announce(said[MEMBERS[1]], 0.0)
    acceptor.on_message(MEMBERS[0], Propose(proposal), bytes(64), 0.1)
    assert acceptor.proposal is None
    acceptor.tick(10.0)
    assert any(isinstance(message, Prepare) for _, message in acceptor.take())


def test_acceptor_that_knows_fewer_announcements_than_the_leader_follows_it():
    """A late announcement that the leader did not have is not in its proposal."""
    proposal, acceptor = proposal_with(2), agreement(MEMBERS[1])
    acceptor.announce(distrusting(2)[MEMBERS[1]], 0.0)
    acceptor.on_message(MEMBERS[0], Propose(proposal), bytes(64), 0.1)
    assert acceptor.proposal == proposal
    late, alive = agreement(MEMBERS[1]), tuple(peer for peer in proposal.alive if peer != MEMBERS[2])
    partial = msgspec.structs.replace(proposal_with(1), group=alive, alive=alive)
    partial = msgspec.structs.replace(
        partial, contributors=tuple(entry for entry in partial.contributors if entry.peer != MEMBERS[2])
    )
    said = {**distrusting(1), MEMBERS[2]: ready(distrusts=(BAD,))}
    for member in (MEMBERS[0], MEMBERS[2], BAD):
        late.on_message(member, said[member], bytes(64), 0.0)
    late.announce(said[MEMBERS[1]], 0.0)
    late.on_message(MEMBERS[0], Propose(partial), bytes(64), 0.1)
    assert late.proposal == partial
