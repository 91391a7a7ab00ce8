"""Proposals that name announcements, and contributors that announce two things under one number."""

from __future__ import annotations

import random

import blake3
import msgspec
import pytest
from kit.rounds.fake_keys import FakeKeys
from kit.rounds.fake_standing import FakeStanding
from kit.rounds.round_harness import FixedLife
from thinwire.collectives.consensus.certificates import compact
from thinwire.collectives.consensus.members.lives import lives_of
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import TWO_ANNOUNCEMENTS, names, sound, statement, vote_for
from thinwire.swarm.evidence import conflicting
from thinwire.swarm.messages.registry import (
    LIFE,
    Ballot,
    Blame,
    Commit,
    Contribution,
    Prepare,
    Promise,
    Proof,
    Propose,
    Ready,
    SignedAnnouncement,
    Vote,
)

IDS = LEADER, ANN, BEN, LIAR = tuple(bytes([index]) * 32 for index in range(4))
LIVES = {peer: bytes([1 + peer[0]]) * LIFE for peer in IDS}
TERMS = RoundTerms(5, 0, IDS, bytes(32), bytes(32), lineage=b"l" * LIFE, seniors=IDS, grace=1.0, lives=LIVES)


def sign(peer, message):
    return blake3.blake3(peer + msgspec.msgpack.encode(message.statement())).digest(64)


def verify(peer, message, signature):
    return signature == sign(peer, message)


def ready(peer, data=b"a", attempt=1, life=None):
    hashes = blake3.blake3(data).digest()
    life = LIVES[peer] if life is None else life
    return Ready(5, 0, attempt, bytes(32), bytes(32), 10, hashes, True, 0.0, 0.0, life=life)


class Scene:
    """Four members without a network. The last one has told BEN other data than the leader and ANN."""

    def __init__(self, told=b"b", lives=(None, None, None)):
        """lives: those that the liar tells the leader, ANN and BEN (default: its life)."""
        self.convicted = {}
        self.peers = {me: self.made(me) for me in IDS[:3]}
        self.sent = {me: [] for me in IDS[:3]}
        for me in IDS[:3]:
            self.peers[me].announce(ready(me), 0.0)
        self.settle()
        self.tell(LIAR, BEN, ready(LIAR, told, life=lives[2]))
        self.tell(LIAR, ANN, ready(LIAR, life=lives[1]))
        self.tell(LIAR, LEADER, ready(LIAR, life=lives[0]))
        self.settle()

    def made(self, me):
        def report(peer, first, second):
            self.convicted.setdefault(me, []).append((peer, first, second))

        return Agreement(
            FakeKeys(me, sign, verify),
            TERMS,
            live=set(IDS),
            store=FixedLife(LIVES[me]),
            standing=FakeStanding(report_equivocation=report),
        )

    def tell(self, sender, to, message):
        self.sent.setdefault(to, []).append(message)
        self.peers[to].on_message(sender, message, sign(sender, message), 0.0)

    def settle(self):
        """Deliver all messages between the three honest peers; the liar is silent, but it promises."""
        news = True
        while news:
            news = False
            for me in IDS[:3]:
                for to, message in self.peers[me].take():
                    news = True
                    for peer in IDS if to is None else (to,):
                        if peer in self.peers and peer != me:
                            self.tell(me, peer, message)
                        elif peer == LIAR and isinstance(message, Prepare):
                            self.tell(LIAR, me, Promise(5, 0, message.ballot, None, None, TERMS.lineage))


def contributors(proposal):
    return [entry.peer for entry in proposal.contributors]


def test_proposal_names_the_announcement_of_each_contributor():
    proposal = Scene(told=b"a").peers[LEADER].proposal
    assert contributors(proposal) == list(IDS) and proposal.ballot.term == 1
    assert all(entry.announced == ready(entry.peer).digest for entry in proposal.contributors)
    assert sound(proposal, TERMS)
    unnamed = (msgspec.structs.replace(proposal.contributors[0], announced=b""), *proposal.contributors[1:])
    assert not sound(msgspec.structs.replace(proposal, contributors=unnamed), TERMS)


@pytest.mark.parametrize(
    "change",
    [{"attempt": 2}, {"base": b"b" * 32}, {"plan": b"b" * 32}, {"weight": 9}, {"hashes": b"b" * 32}, {"life": b""}]
    + [{"voter": False}, {"endorses": (BEN,)}, {"distrusts": (BEN,)}, {"site": "x"}, {"up": 1}],
    ids=str,
)
def test_every_field_of_an_announcement_is_named(change):
    entry = Contribution(ANN, 1, 10, ready(ANN).digest)
    assert names(entry, ready(ANN)) and not names(entry, msgspec.structs.replace(ready(ANN), **change))


def test_contributor_with_two_announcements_is_convicted_and_out_of_the_next_ballot():
    """The leader has one announcement, another peer the other. The complaint carries the second; so the leader has both."""
    scene = Scene()
    (blame,) = [message for message in scene.sent[LEADER] if isinstance(message, Blame)]
    assert blame.reason == TWO_ANNOUNCEMENTS and blame.said.statement == ready(LIAR, b"b").statement()
    proposal = scene.peers[LEADER].proposal
    assert proposal.ballot.term == 2 and contributors(proposal) == [LEADER, ANN, BEN] and not proposal.idle
    assert all(scene.peers[peer].proposal == proposal for peer in (ANN, BEN))
    ((peer, first, second),) = scene.convicted[LEADER]
    assert peer == LIAR and conflicting(first[0], second[0]) and all(verify(LIAR, *one) for one in (first, second))


@pytest.mark.parametrize("committed", [False, True])
def test_leader_with_two_announcements_is_convicted_by_the_other_peers(committed):
    """It ignores the complaint, but that goes to all."""
    scene = Scene(told=b"a")
    proposal, ann, ben = scene.peers[LEADER].proposal, scene.peers[ANN], scene.made(BEN)
    ben.announce(ready(BEN), 0.0)
    ben.on_message(LEADER, ready(LEADER, b"b"), sign(LEADER, ready(LEADER, b"b")), 0.0)
    ben.take()
    ben.on_message(LEADER, Propose(proposal), bytes(64), 0.0)
    ((to, blame),) = [(to, message) for to, message in ben.take() if isinstance(message, Blame)]
    assert to is None and blame.peer == LEADER and not scene.convicted
    if committed:
        vote = vote_for(proposal, bytes(32))
        ann.on_message(LEADER, Commit(proposal, bytes(32), tuple(Proof(p, sign(p, vote)) for p in IDS[:3])), b"", 0.0)
        assert ann.commit is not None
    ann.on_message(BEN, blame, sign(BEN, blame), 0.0)
    assert [peer for peer, *_ in scene.convicted[ANN]] == [LEADER]


def test_peer_votes_for_no_proposal_that_contradicts_an_announcement():
    """Not even if the leader is one with the contributor and ignores the complaint."""
    scene = Scene(told=b"a")
    ben = scene.made(BEN)
    ben.announce(ready(BEN), 0.0)
    ben.on_message(LIAR, ready(LIAR, b"b"), sign(LIAR, ready(LIAR, b"b")), 0.0)
    proposal = scene.peers[LEADER].proposal
    ben.on_message(LEADER, Propose(proposal), bytes(64), 0.0)
    assert ben.proposal == proposal
    ben.complete(bytes(32), 0.0)
    assert not [message for _, message in ben.take() if isinstance(message, Vote)]
    honest = scene.peers[ANN]
    honest.complete(bytes(32), 0.0)
    assert [message for _, message in honest.take() if isinstance(message, Vote)]


@pytest.mark.parametrize("kind", ["other number", "forged", "other round", "the named one"])
def test_false_complaint_about_two_announcements_excludes_nobody(kind):
    scene = Scene(told=b"a")
    said = {
        "other number": ready(ANN, b"b", attempt=2),
        "other round": msgspec.structs.replace(ready(ANN, b"b"), round=6),
        "the named one": ready(ANN),
    }.get(kind, ready(ANN, b"b")).statement()
    signer = LIAR if kind == "forged" else ANN
    proposal = scene.peers[LEADER].proposal
    shown = SignedAnnouncement(said, sign(signer, said))
    scene.tell(LIAR, LEADER, Blame(5, 0, proposal.ballot, ANN, TWO_ANNOUNCEMENTS, shown))
    scene.settle()
    now = scene.peers[LEADER].proposal
    assert not scene.convicted and ANN in contributors(now) and set(now.idle) <= {ANN, LIAR}


def test_two_announcements_to_one_peer_are_evidence_but_a_later_one_is_not():
    scene = Scene(told=b"a")
    scene.tell(LIAR, ANN, ready(LIAR, b"b", attempt=2))
    assert not scene.convicted
    scene.tell(LIAR, ANN, ready(LIAR, b"c", attempt=2))
    assert [peer for peer, *_ in scene.convicted[ANN]] == [LIAR]


@pytest.mark.parametrize(
    "lives", [(None, b"y" * LIFE, b"z" * LIFE), (None, b"z" * LIFE, b"z" * LIFE), (b"x" * LIFE, None, None)], ids=str
)
def test_peer_that_tells_others_another_life_is_out_of_the_next_ballot(lives):
    """It is no evidence, because a peer that loses its folder in the round has two lives, too."""
    scene = Scene(told=b"a", lives=lives)
    scene.settle()
    proposal = scene.peers[LEADER].proposal
    assert proposal.ballot.term == 2 and LIAR not in proposal.alive and not scene.convicted
    assert all(scene.peers[peer].proposal == proposal for peer in (ANN, BEN))
    for peer in (ANN, BEN, LEADER):
        scene.peers[peer].complete(bytes(32), 0.0)
    scene.settle()
    assert all(scene.peers[peer].commit is not None for peer in (ANN, BEN, LEADER))


def test_another_life_under_a_later_number_costs_no_ballot():
    proposal, ben = Scene(told=b"a").peers[LEADER].proposal, Scene(told=b"a").made(BEN)
    ben.announce(ready(BEN), 0.0)
    later = ready(LIAR, attempt=2, life=b"n" * LIFE)
    ben.on_message(LIAR, later, sign(LIAR, later), 0.0)
    ben.on_message(LEADER, Propose(proposal), bytes(64), 0.0)
    assert ben.proposal == proposal and lives_of(proposal.members, proposal.lives)[LIAR] == LIVES[LIAR]


def test_announcement_without_a_life_counts_for_nothing():
    """Its peer could become a member in any life, and two such announcements are no evidence."""
    scene = Scene(told=b"a", lives=(b"", b"", b""))
    assert all(LIAR not in scene.peers[peer].ready for peer in (ANN, BEN, LEADER))


def test_proposal_without_the_life_of_a_member_is_unsound():
    proposal = Scene(told=b"a").peers[LEADER].proposal
    assert sound(proposal, TERMS)
    assert not sound(msgspec.structs.replace(proposal, lives=proposal.lives[:-LIFE] + bytes(LIFE)), TERMS)
    assert not sound(msgspec.structs.replace(proposal, lives=b""), TERMS)


def test_announcements_with_lower_numbers_do_not_displace_evidence():
    scene = Scene(told=b"a")
    ben = scene.made(BEN)
    ben.announce(ready(BEN), 0.0)
    for message in (ready(LIAR, b"b", attempt=9), *(ready(LIAR, b"b", attempt=number) for number in range(1, 6))):
        ben.on_message(LIAR, message, sign(LIAR, message), 0.0)
    ben.on_message(LIAR, later := ready(LIAR, b"c", attempt=9), sign(LIAR, later), 0.0)
    assert [peer for peer, *_ in scene.convicted[BEN]] == [LIAR]


def test_leader_that_names_false_announcements_of_all_gets_one_complaint_of_each_peer():
    scene = Scene(told=b"a")
    proposal = scene.peers[LEADER].proposal
    entries = tuple(msgspec.structs.replace(entry, announced=b"f" * 32) for entry in proposal.contributors)
    false = msgspec.structs.replace(proposal, contributors=entries)
    false = msgspec.structs.replace(false, seal=sign(LEADER, statement(false)))
    ben = scene.made(BEN)
    for message in (ready(LEADER), ready(ANN), ready(LIAR)):
        peer = next(peer for peer in IDS if LIVES[peer] == message.life)
        ben.on_message(peer, message, sign(peer, message), 0.0)
    ben.announce(ready(BEN), 0.0)
    ben.take()
    ben.on_message(LEADER, Propose(false), bytes(64), 0.0)
    assert len([message for _, message in ben.take() if isinstance(message, Blame)]) == 1


def test_commit_without_its_proposal_is_understood_by_a_voter_that_follows_a_later_ballot():
    scene = Scene(told=b"a")
    ben, proposal = scene.peers[BEN], scene.peers[LEADER].proposal
    ben.complete(bytes(32), 0.0)
    prepare = Prepare(5, 0, Ballot(2, ANN), TERMS.lineage)
    ben.on_message(ANN, prepare, sign(ANN, prepare), 0.0)
    ben.proposal = None
    ben.take()
    vote = vote_for(proposal, bytes(32))
    commit = Commit(proposal, bytes(32), tuple(Proof(peer, sign(peer, vote)) for peer in IDS[:3]))
    ben.on_message(LEADER, compact(commit), b"", 0.0)
    assert ben.commit == commit


class BrokenStore(MemoryVoteStore):
    """A store whose disk fails when it should note a number: another life begins in memory, as in VoteFile."""

    def use_number(self, number):
        self.renew()
        raise OSError


def test_round_decides_the_life_in_memory_of_a_member_that_could_not_store_its_number():
    """Its folder still has the old life, so a later process is no member and cannot vote twice."""
    scene = Scene(told=b"a")
    store = BrokenStore(random.Random(4))
    before = store.life
    ben = Agreement(FakeKeys(BEN, sign, verify), TERMS, live=set(IDS), store=store)
    life = ben.use_number(2)
    again = msgspec.structs.replace(ready(BEN, attempt=2, life=life), voter=ben.voter)
    assert life == store.life != before and not ben.voter
    ben.announce(again, 0.0)
    leader = scene.made(LEADER)
    leader.announce(ready(LEADER), 0.0)
    for peer, message in ((ANN, ready(ANN)), (LIAR, ready(LIAR)), (BEN, again)):
        leader.on_message(peer, message, sign(peer, message), 0.0)
    leader.tick(2.0)
    (proposal,) = [message.proposal for _, message in leader.take() if isinstance(message, Propose)]
    assert lives_of(proposal.members, proposal.lives)[BEN] == life
    ben.on_message(LEADER, Propose(proposal), bytes(64), 2.0)
    assert ben.proposal == proposal, "it takes part without a vote"
