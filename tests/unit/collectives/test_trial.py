"""Newcomers on trial: no vote and no part in proposals before a quorum of the members endorses them."""

from __future__ import annotations

import msgspec
import pytest
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import RoundTerms
from thinwire.swarm.messages.registry import Ballot, Open, Prepare, Ready, Vote

BASE, PLAN = bytes(32), bytes([1]) * 32
*MEMBERS, NEW = [bytes([index]) * 32 for index in range(5)]
TERMS = RoundTerms(5, 0, tuple(MEMBERS), BASE, PLAN, grace=0.5)


def ready(*endorses):
    return Ready(5, 0, 1, BASE, PLAN, 8, b"", True, 0.0, 0.0, endorses=endorses)


def agreement(me, trial=lambda peer: True):
    everyone = (*MEMBERS, NEW)
    return Agreement(me, TERMS, sign=lambda m: bytes(64), verify=lambda *_: True, live=everyone, trial=trial)


def opened_by_the_leader(endorsing, trial=lambda peer: True):
    """Return the proposal of the first member, when so many members endorse the newcomer."""
    leader = agreement(MEMBERS[0], trial)
    for number, member in enumerate(MEMBERS[1:], 1):
        leader.on_message(member, ready(*[NEW] * (number < endorsing)), bytes(64), 0.0)
    leader.on_message(NEW, ready(NEW), bytes(64), 0.0)
    leader.announce(ready(*[NEW] * (endorsing > 0)), 0.0)
    leader.tick(1.0)
    assert leader.opened is not None
    return leader.opened


@pytest.mark.parametrize(("count", "admitted"), [(0, False), (1, False), (2, True), (3, True)])
def test_electorate_admits_a_newcomer_with_a_quorum_of_endorsements(count, admitted):
    # Of four members, two with the most senior one are a quorum.
    electorate = Electorate(MEMBERS[0], TERMS, MEMBERS, lambda *_: True, lambda peer: True)
    said = {member: ready(NEW) for member in MEMBERS[:count]} | {NEW: ready(NEW)}
    assert electorate.admits(NEW, said) is admitted
    assert electorate.admits(MEMBERS[3], {}), "members need no endorsement"


def test_leader_leaves_a_newcomer_without_endorsements_out_of_owners_contributors_and_members():
    opened = opened_by_the_leader(1)
    assert NEW not in (*opened.group, *opened.alive, *opened.members)
    assert NEW not in [entry.peer for entry in opened.contributors]
    assert {entry.peer: entry.reason for entry in opened.excluded} == {NEW: "on trial"}
    assert NEW in opened_by_the_leader(3).members and NEW in opened_by_the_leader(0, lambda peer: False).members


def test_acceptor_follows_a_proposal_with_a_newcomer_only_with_endorsements_and_waits_for_these():
    opened = opened_by_the_leader(3)
    acceptor = agreement(MEMBERS[1])
    acceptor.announce(ready(NEW), 0.0)
    acceptor.on_message(MEMBERS[0], opened, bytes(64), 0.0)
    assert acceptor.opened is None
    acceptor.on_message(MEMBERS[2], ready(), bytes(64), 0.1)
    acceptor.on_message(NEW, ready(NEW), bytes(64), 0.1)
    assert acceptor.opened is None
    acceptor.on_message(MEMBERS[0], ready(NEW), bytes(64), 0.2)
    assert acceptor.opened == opened, "the endorsements were under way"


def test_newcomer_has_no_vote_and_leads_no_ballot():
    newcomer = agreement(NEW)
    newcomer.announce(ready(), 0.0)
    opened = opened_by_the_leader(0)
    newcomer.on_message(MEMBERS[0], opened, bytes(64), 0.0)
    newcomer.complete(bytes(32), 0.1)
    for now in (1.0, 100.0, 1000.0):
        newcomer.tick(now)
    assert not [message for _, message in newcomer.take() if isinstance(message, (Vote, Open, Prepare))]
    member = agreement(MEMBERS[1])
    member.on_message(NEW, msgspec.structs.replace(opened, ballot=Ballot(9, NEW)), bytes(64), 0.0)
    assert member.opened is None


def test_acceptor_follows_no_first_proposal_of_earlier_results():
    """Such results would bring members with them that no peer has endorsed."""
    opened = msgspec.structs.replace(
        opened_by_the_leader(1), adopted=bytes(32), sources=(MEMBERS[0],), kept=tuple(sorted((*MEMBERS, NEW)))
    )
    acceptor = agreement(MEMBERS[1])
    acceptor.announce(ready(), 0.0)
    acceptor.on_message(MEMBERS[0], opened, bytes(64), 0.0)
    assert acceptor.opened is None and acceptor.ready
    acceptor.on_message(MEMBERS[0], opened_by_the_leader(1), bytes(64), 0.0)
    assert acceptor.opened is not None
