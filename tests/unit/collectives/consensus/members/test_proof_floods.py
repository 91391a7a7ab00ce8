"""Floods of proposals, each with other new members, and of commits: how many of their signatures a peer checks."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
from kit.rounds.agreements import sign, verify
from kit.rounds.fake_keys import FakeKeys
from kit.rounds.round_harness import FixedLife, freely, leaving
from thinwire.collectives.consensus.acceptor import BALLOTS
from thinwire.collectives.consensus.members.lives import lives_in_order
from thinwire.collectives.consensus.members.quorum import TWO_THIRDS
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import statement, vote_for
from thinwire.swarm.messages.registry import (
    LIFE,
    Announced,
    Ballot,
    Commit,
    Contribution,
    MemberProof,
    Prepare,
    Promise,
    Proof,
    Proposal,
    Propose,
    Ready,
    Vote,
)

IDS = tuple(bytes([number]) * 32 for number in range(4))
LEADER, ME, LIAR, OTHER = IDS
LIVES = {peer: bytes([100 + at]) * LIFE for at, peer in enumerate(IDS)}
TERMS = RoundTerms(5, 0, IDS, bytes(32), bytes(32), fraction=TWO_THIRDS, lives=LIVES, lineage=b"l" * LIFE)
RESULTS, NEWCOMERS, FLOOD = b"r" * 32, 6, 40


class LateKeys(FakeKeys):
    """Keyring that lacks the keys of some peers."""

    def __init__(self, scene):
        super().__init__(ME, sign, lambda peer, *signed: peer not in scene.unknown and scene.verify(peer, *signed))
        self._unknown = scene.unknown

    def key_of(self, peer):
        return None if peer in self._unknown else peer


class Scene:
    """Agreement of one peer.

    `checked`: announcements of new members whose signatures it has checked; `counted`: checked votes. `unknown`: peers whose
    keys it does not know yet.
    """

    def __init__(self, present=IDS):
        self.checked = self.counted = 0
        self.unknown = set()
        self.one = Agreement(LateKeys(self), TERMS, live=present, store=FixedLife(LIVES[ME]))
        for peer in present:
            if peer != ME:
                self.receive(peer, announced(LIVES[peer]))
        self.one.announce(announced(LIVES[ME]), 0.0)
        self.one.take()

    def verify(self, peer, message, signature):
        self.checked += isinstance(message, Announced)
        self.counted += isinstance(message, Vote) and message.digest is not None
        return verify(peer, message, signature)

    def receive(self, sender, message, now=0.1):
        self.one.on_message(sender, message, sign(sender, message), now)


def announced(life):
    return Ready(5, 0, 1, bytes(32), bytes(32), 8, b"", True, 0.0, 0.0, life=life)


def proposal_of(number, ballot, *, genuine=True, **changes):
    """Return a proposal of the liar with new members, other ones for each number.

    genuine: False if another peer has signed for the last new member.
    """
    new = {bytes([10 + at, number]) * 16: bytes([number, at]) * (LIFE // 2) for at in range(1, NEWCOMERS + 1)}
    lives, proofs = LIVES | new, []
    for peer, life in new.items():
        said = announced(life).statement()
        signer = peer if genuine or peer != max(new) else LIAR
        proofs.append(MemberProof(1, said.digest, peer, sign(signer, said)))
    peers = tuple(sorted(lives))
    made = Proposal(
        *(5, 0, ballot, peers, peers, (Contribution(LIAR, 1, 8, announced(LIVES[LIAR]).digest),), (), None, ()),
        lives=lives_in_order(peers, lives),
        member_proofs=tuple(proofs),
        lineage=TERMS.lineage,
        electorate=TERMS.electorate,
    )
    made = msgspec.structs.replace(made, **changes)
    return msgspec.structs.replace(made, seal=sign(ballot.leader, statement(made)))


def forged_farewell():
    return leaving(OTHER, lineage=TERMS.lineage, sign=partial(sign, LIAR)).farewell


def test_first_ballots_of_another_leader_than_the_first_member_are_not_checked():
    scene = Scene()
    for number in range(FLOOD):
        scene.receive(LIAR, Propose(proposal_of(number, Ballot(1, LIAR))))
    assert scene.checked == 0


@pytest.mark.parametrize("farewells", [(), (forged_farewell(),)], ids=["valid", "with a forged farewell"])
def test_first_leader_has_one_proposal_checked(farewells):
    scene = Scene()
    for number in range(FLOOD):
        proposal = proposal_of(number, Ballot(1, LEADER), farewells=farewells)
        scene.receive(LEADER, Propose(proposal))
        assert (scene.one.proposal is not None) == (not farewells)
    assert scene.checked == (0 if farewells else NEWCOMERS)


def test_ballots_without_promises_of_a_quorum_are_not_checked():
    scene = Scene()
    for number in range(FLOOD):
        ballot = Ballot(2 + number, LIAR)
        scene.receive(LIAR, Prepare(5, 0, ballot, TERMS.lineage), 0.1 * number)
        message = freely(proposal_of(number, ballot), (ME, LIAR), sign)
        scene.receive(LIAR, message, 0.1 * number)
    assert scene.checked == 0


def test_leader_with_promises_whose_new_members_are_not_admitted_is_checked_once():
    scene = Scene()
    for number in range(FLOOD):
        proposal = proposal_of(number, Ballot(2 + number, LIAR), genuine=False)
        scene.receive(LIAR, freely(proposal, (LEADER, LIAR, OTHER), sign))
    assert scene.checked == NEWCOMERS and scene.one.proposal is None


def test_ballots_with_promises_are_checked_once_each_as_often_as_an_honest_leader_begins_them():
    scene = Scene()
    for number in range(FLOOD):
        for other in (0, FLOOD):
            proposal = proposal_of(other + number, Ballot(2 + number, LIAR))
            scene.receive(LIAR, freely(proposal, (LEADER, LIAR, OTHER), sign))
    assert scene.checked == (BALLOTS + 1) * NEWCOMERS


def test_vote_in_a_promise_is_checked_once_for_each_member_and_ballot():
    scene = Scene((ME, LIAR, OTHER))
    begun = scene.one.acceptor.promised
    assert begun.leader == ME
    for number in range(FLOOD):
        voted = proposal_of(number, Ballot(1, LEADER), genuine=False)
        scene.receive(LIAR, Promise(5, 0, begun, voted, RESULTS, TERMS.lineage))
    assert scene.checked == NEWCOMERS
    scene.receive(OTHER, Promise(5, 0, begun, voted, RESULTS, TERMS.lineage))
    assert scene.checked == 2 * NEWCOMERS


def test_promise_of_another_lineage_does_not_replace_that_of_a_member():
    scene = Scene((ME, LIAR, OTHER))
    begun, voted = scene.one.acceptor.promised, proposal_of(1, Ballot(1, LEADER), genuine=False)
    scene.receive(OTHER, Promise(5, 0, begun, voted, RESULTS, b"o" * LIFE))
    assert scene.checked == 0
    scene.receive(OTHER, Promise(5, 0, begun, voted, RESULTS, TERMS.lineage))
    assert scene.checked == NEWCOMERS


def test_vote_in_a_farewell_is_checked_once_for_each_member_and_sender():
    """A peer that passes on the farewell of an honest member has checked its vote, perhaps with keys that are unknown here."""
    scene = Scene()
    for number in range(FLOOD):
        voted = proposal_of(number, Ballot(1, LEADER), genuine=False)
        leave = leaving(LIAR, voted.ballot, voted, RESULTS, lineage=TERMS.lineage, sign=partial(sign, LIAR))
        scene.receive(LIAR, leave)
    assert scene.checked == NEWCOMERS
    scene.receive(OTHER, leave)
    assert scene.checked == 2 * NEWCOMERS
    scene.receive(bytes([9]) * 32, leave)  # of a peer that is no member
    assert scene.checked == 2 * NEWCOMERS
    # A ballot that counts may bring keys that were unknown, so the farewell is checked again.
    scene.receive(LEADER, Propose(proposal_of(1, Ballot(1, LEADER))))
    before = scene.checked
    scene.receive(OTHER, leave)
    assert scene.checked == before + NEWCOMERS


def commit_of(number, signer=None, digest=RESULTS):
    """Return a commit with the votes of three members, all signed by `signer` if that is given."""
    proposal = proposal_of(number, Ballot(1, LEADER))
    vote = vote_for(proposal, digest)
    voters = (LEADER, LIAR, OTHER)
    return Commit(proposal, digest, tuple(Proof(peer, sign(signer or peer, vote)) for peer in voters))


def test_commits_of_a_peer_whose_last_one_was_false_are_checked_after_a_patience():
    scene = Scene()
    for number in range(FLOOD):
        scene.receive(LIAR, commit_of(number, LIAR), 0.1)
    assert scene.counted == 3
    scene.receive(LIAR, commit_of(0), 0.1 + 0.9 * TERMS.patience)
    assert scene.one.commit is None
    scene.receive(LIAR, commit_of(0), 0.1 + 1.1 * TERMS.patience)
    assert scene.one.commit == commit_of(0)


def test_commit_whose_voters_are_unknown_is_no_false_one():
    """A peer that restarts knows the keys of members that are gone a moment later."""
    scene = Scene()
    scene.unknown.add(LEADER)
    scene.receive(OTHER, commit_of(0), 0.1)
    assert scene.one.commit is None and scene.counted == 0
    scene.unknown.clear()
    scene.receive(OTHER, commit_of(0), 0.2)
    assert scene.one.commit == commit_of(0)


def test_false_commit_does_not_delay_the_true_one_of_another_peer():
    scene = Scene()
    scene.receive(LIAR, commit_of(0, LIAR))
    scene.receive(OTHER, commit_of(0))
    assert scene.one.commit == commit_of(0)


def test_commits_that_contradict_ours_are_checked_as_evidence_once_in_a_patience():
    scene = Scene()
    scene.receive(OTHER, commit_of(0))
    before = scene.counted
    for _ in range(FLOOD):
        scene.receive(LIAR, commit_of(0, LIAR, digest=b"o" * 32))
    assert scene.counted - before == 3
