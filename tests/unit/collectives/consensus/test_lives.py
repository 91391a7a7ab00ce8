"""Lives of members: a ballot with wrong ones is not followed, and a member with another one has no vote."""

from __future__ import annotations

import msgspec
import pytest
from kit.rounds.round_harness import FixedLife, freely
from thinwire.collectives.consensus.members.lives import lives_of
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.swarm.messages.registry import (
    LIFE,
    Ballot,
    Contribution,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Ready,
    Vote,
)

IDS = [bytes([n]) * 32 for n in range(3)]
LEADER, ME, OTHER = IDS
LIVES = {peer: bytes([100 + at]) * LIFE for at, peer in enumerate(IDS)}
RESULTS = b"r" * 32
FIRST = Ballot(1, LEADER)


TERMS = RoundTerms(5, 0, tuple(IDS), bytes(32), bytes(32), lives=LIVES)


def agreement(life=LIVES[ME]):
    store = FixedLife(life)
    one = Agreement(ME, TERMS, sign=lambda message: bytes(64), verify=lambda *_: True, live=IDS, store=store)
    for peer in (LEADER, OTHER):
        one.on_message(peer, announced(LIVES[peer]), bytes(64), 0.0)
    one.announce(announced(life), 0.0)
    one.take()
    return one


def announced(life):
    return Ready(5, 0, 1, bytes(32), bytes(32), 1, b"", True, 0.0, 0.0, life=life)


def proposal(lives, ballot=FIRST):
    entries = tuple(Contribution(peer, 1, 1) for peer in IDS)
    group, lives = tuple(IDS), b"".join(lives)
    return Proposal(5, 0, ballot, group, group, entries, (), None, (), lives=lives, electorate=TERMS.electorate)


def follows(one, proposal):
    first = proposal.ballot.term == 1
    one.on_message(LEADER, Propose(proposal) if first else freely(proposal, IDS), bytes(64), 0.1)
    return one.proposal == proposal


def test_ballot_with_the_announced_lives_is_followed():
    one = agreement()
    assert follows(one, proposal(LIVES.values()))
    one.complete(RESULTS, 0.2)
    assert any(isinstance(message, Vote) for _, message in one.take())


@pytest.mark.parametrize("peer", [ME, OTHER])
@pytest.mark.parametrize("forged", [b"x" * LIFE, bytes(LIFE)])
def test_ballot_with_a_forged_life_is_ignored(peer, forged):
    """Otherwise a lying leader could take all other votes of the next round."""
    assert not follows(agreement(), proposal({**LIVES, peer: forged}.values()))


def test_ballot_without_lives_is_ignored_by_peers_that_have_one():
    assert not follows(agreement(), proposal(()))


def test_adopted_ballot_may_name_an_earlier_life_of_another_peer_but_not_of_ours():
    """The lives were decided with the results; the other peer has lost its folder since."""
    second = Ballot(2, LEADER)
    for peer, followed in ((OTHER, True), (ME, False)):
        adopted = msgspec.structs.replace(
            proposal({**LIVES, peer: b"y" * LIFE}.values(), second), adopted=RESULTS, sources=(LEADER,), kept=tuple(IDS)
        )
        assert follows(agreement(), adopted) == followed


def test_member_with_another_life_neither_votes_nor_promises():
    one = agreement(life=b"z" * LIFE)
    assert not one.voter
    one.on_message(LEADER, Prepare(5, 0, Ballot(2, LEADER)), bytes(64), 0.1)
    assert not any(isinstance(message, Promise) for _, message in one.take())


def test_zeros_and_missing_lives_are_unknown():
    assert lives_of(IDS, b"".join([LIVES[LEADER], bytes(LIFE), LIVES[OTHER]])) == {
        LEADER: LIVES[LEADER],
        OTHER: LIVES[OTHER],
    }
    assert lives_of(IDS, b"") == {}
