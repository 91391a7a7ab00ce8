"""Lives of members: new ones need signed announcements, and a member with another life than the decided one has no vote."""

from __future__ import annotations

import msgspec
import pytest
from kit.rounds.agreements import sign, verify
from kit.rounds.fake_keys import FakeKeys
from kit.rounds.fake_standing import FakeStanding
from kit.rounds.round_harness import FixedLife, freely
from thinwire.collectives.consensus.members.lives import lives_of
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import new_lives, sound, statement
from thinwire.swarm.messages.registry import (
    LIFE,
    Ballot,
    Contribution,
    MemberProof,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Ready,
    Vote,
)

IDS = [bytes([n]) * 32 for n in range(4)]
LEADER, ME, OTHER, NEW = IDS
MEMBERS = IDS[:3]
LIVES = {peer: bytes([100 + at]) * LIFE for at, peer in enumerate(IDS)}
NEW_LIFE = b"n" * LIFE
RESULTS = b"r" * 32
FIRST, SECOND = Ballot(1, LEADER), Ballot(2, LEADER)
TERMS = RoundTerms(
    5,
    0,
    tuple(MEMBERS),
    bytes(32),
    bytes(32),
    lives={peer: LIVES[peer] for peer in MEMBERS},
    lineage=b"l" * LIFE,
)


def announced(life):
    return Ready(5, 0, 1, bytes(32), bytes(32), 1, b"", True, 0.0, 0.0, life=life)


class ForgetfulKeys(FakeKeys):
    """Keyring without the key of the newcomer."""

    def key_of(self, peer):
        return None if peer == NEW else peer


def agreement(me=ME, life=None, keys=FakeKeys, present=MEMBERS, tokens=None):
    life, standing = LIVES[me] if life is None else life, FakeStanding(tokens=tokens)
    one = Agreement(keys(me, sign, verify), TERMS, live=present, store=FixedLife(life), standing=standing)
    for peer in present:
        if peer != me:
            ready = announced(LIVES[peer])
            one.on_message(peer, ready, sign(peer, ready.statement()), 0.0)
    one.announce(announced(life), 0.0)
    one.take()
    return one


def proof(peer, life, signer=None, token=b""):
    said = announced(life).statement()
    return MemberProof(1, said.digest, peer, sign(signer or peer, said), token)


def proposal(lives, proofs=(), ballot=FIRST, **changes):
    """Return a proposal of the leader with these members and lives."""
    group = tuple(sorted(lives))
    entries = tuple(Contribution(peer, 1, 1, announced(lives[peer]).digest) for peer in group)
    made = Proposal(5, 0, ballot, group, group, entries, (), None, (), lives=b"".join(lives[peer] for peer in group))
    made = msgspec.structs.replace(
        made, member_proofs=tuple(proofs), electorate=TERMS.electorate, lineage=TERMS.lineage, **changes
    )
    return msgspec.structs.replace(made, seal=sign(ballot.leader, statement(made)))


def follows(one, proposal):
    first = proposal.ballot.term == 1
    message = Propose(proposal) if first else freely(proposal, MEMBERS, sign)
    one.on_message(LEADER, message, bytes(64), 0.1)
    return one.proposal == proposal


THREE = {peer: LIVES[peer] for peer in MEMBERS}


def test_ballot_with_the_known_lives_needs_no_proofs():
    one = agreement()
    assert follows(one, proposal(THREE))
    one.complete(RESULTS, 0.2)
    assert any(isinstance(message, Vote) for _, message in one.take())


@pytest.mark.parametrize("peer", [ME, OTHER, NEW])
def test_ballot_with_a_new_life_needs_its_announcement(peer):
    """The announcement itself need not be here. Otherwise a lying leader could take all other votes of the next round."""
    lives = {**THREE, peer: NEW_LIFE}
    assert follows(agreement(), proposal(lives, [proof(peer, NEW_LIFE)]))
    for forged in ([], [proof(peer, NEW_LIFE, LEADER)], [proof(peer, LIVES[NEW])], [proof(LEADER, NEW_LIFE)]):
        assert not follows(agreement(), proposal(lives, forged))


def test_leader_that_forges_a_life_leads_no_further_ballot():
    one = agreement()
    assert not follows(one, proposal({**THREE, OTHER: NEW_LIFE}, [proof(OTHER, NEW_LIFE, LEADER)]))
    assert not follows(one, proposal(THREE, ballot=SECOND)) and follows(agreement(), proposal(THREE, ballot=SECOND))


def test_sound_proposal_has_as_many_proofs_as_new_lives():
    entries = [proof(peer, NEW_LIFE) for peer in (OTHER, NEW)]
    new = proposal({**THREE, OTHER: NEW_LIFE, NEW: NEW_LIFE}, entries)
    assert sound(new, TERMS) and new_lives(new, TERMS) == {OTHER: NEW_LIFE, NEW: NEW_LIFE}
    for proofs in ((), entries[:1], [*entries, entries[0]]):
        assert not sound(msgspec.structs.replace(new, member_proofs=tuple(proofs)), TERMS)
    assert not sound(msgspec.structs.replace(proposal(THREE), member_proofs=tuple(entries[:1])), TERMS)


def test_zero_is_no_life():
    assert not follows(agreement(), proposal({**THREE, OTHER: bytes(LIFE)}))


def test_leader_proves_new_lives_and_leaves_out_peers_whose_key_it_does_not_know():
    for known in (True, False):
        one = agreement(LEADER, keys=FakeKeys if known else ForgetfulKeys, present=IDS)
        one.tick(20.0)
        assert one.proposal is not None and (NEW in one.proposal.members) == known


def test_new_member_needs_its_admission_token():
    """In a closed run a lying leader could otherwise make keys of its own members, and outvote all others."""
    lives = {**THREE, NEW: NEW_LIFE}
    for token, admitted in ((NEW, True), (b"", False), (OTHER, False)):
        one = agreement(tokens={})
        assert follows(one, proposal(lives, [proof(NEW, NEW_LIFE, token=token)])) == admitted
        assert follows(one, proposal(THREE, ballot=SECOND)) == admitted, "such a leader leads no further ballot"


def test_leader_shows_the_tokens_of_new_members_and_leaves_out_peers_without_one():
    for tokens in ({NEW: NEW}, {}, {NEW: OTHER}):
        one = agreement(LEADER, present=IDS, tokens=tokens)
        one.tick(20.0)
        assert one.proposal is not None and (NEW in one.proposal.members) == (tokens == {NEW: NEW})
        assert [entry.token for entry in one.proposal.member_proofs] == [NEW] * (NEW in one.proposal.members)


@pytest.mark.parametrize("peer", [ME, OTHER])
def test_adopted_ballot_may_name_an_earlier_life(peer):
    """The lives were decided with the results; the peer has lost its folder since. It becomes a member again later."""
    adopted = {"adopted": RESULTS, "sources": (LEADER,), "kept": tuple(MEMBERS)}
    assert follows(agreement(life=NEW_LIFE), proposal(THREE, ballot=SECOND, **adopted))


def test_member_with_another_life_neither_votes_nor_promises():
    one = agreement(life=NEW_LIFE)
    assert not one.voter
    one.on_message(LEADER, Prepare(5, 0, SECOND, TERMS.lineage), bytes(64), 0.1)
    assert not any(isinstance(message, Promise) for _, message in one.take())


def test_zeros_and_missing_lives_are_unknown():
    assert lives_of(MEMBERS, b"".join([LIVES[LEADER], bytes(LIFE), LIVES[OTHER]])) == {
        LEADER: LIVES[LEADER],
        OTHER: LIVES[OTHER],
    }
    assert lives_of(MEMBERS, b"") == {}
