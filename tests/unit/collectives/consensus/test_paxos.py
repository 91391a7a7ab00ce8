"""The agreement as a pure state machine, under random faults of the network and its peers.

The network here is a bag of messages: any may be lost, repeated or overtaken. Processes crash, restart with their votes or
without their run folder, and leave with farewells. Links are reported as broken at any time, truly or not.
"""

from __future__ import annotations

import random
import tracemalloc

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.rounds.agreements import agreement, digest, name, ready, sign, terms, verify
from kit.rounds.fake_keys import FakeKeys
from kit.rounds.round_harness import freely
from thinwire.collectives.consensus.acceptor import BALLOTS, LAST_TERM, LEAP
from thinwire.collectives.consensus.certificates import compact
from thinwire.collectives.consensus.electorate import VIEW
from thinwire.collectives.consensus.members.quorum import enough
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore, VoteRecord
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import vote_for
from thinwire.swarm.messages.registry import (
    Ask,
    Ballot,
    Commit,
    Contribution,
    Exclusion,
    Leave,
    Prepare,
    Promise,
    Proof,
    Proposal,
    Propose,
    Ready,
    ViewChange,
    Vote,
)


class World:
    """Peers 0..n-1, all members except the last `guests`.

    `bag` has their messages until they are delivered, repeated or lost. Members that keep their votes and do not leave are
    always a quorum, because without one the round cannot commit.
    """

    def __init__(self, n, rng, guests=0):
        self.rng, self.now, self.started = rng, 0.0, False
        self.ids = [name(i) for i in range(n)]
        self.order = rng.sample(self.ids[: n - guests], n - guests)
        self.seniors = tuple(rng.sample(self.order, n - guests))
        self.stores = {me: MemoryVoteStore(rng) for me in self.ids}
        self.lives = {me: self.stores[me].life for me in self.order}
        self.peers = {}
        self.bag = []
        self.verdicts = set()
        """Decided values that any process has ever known."""
        self.out = set()
        """Members that have left, or have lost their votes."""
        self.notices = []
        """(peer, dead peer): deaths that the first does not know yet."""
        self.attempts = dict.fromkeys(self.ids, 0)
        # Each world has its own kinds of faults: with all kinds in every world, few would get far.
        self.weights = [
            weight * rng.choice([0.2, 1, 1, 5]) for weight in [60, 3, 3, 6, 12, 6, 1, 6, 1, 3, 1, 2, 0.5, 1]
        ]
        for me in self.ids:
            self.begin(me)
        self.started = True

    def begin(self, me):
        """Start a process with its stored votes."""
        others = self.peers if self.started else self.ids
        self.peers[me] = agreement(
            me, self.order, set(others), store=self.stores[me], seniors=self.seniors, lives=self.lives
        )

    def collect(self, me):
        for to, message in self.peers[me].take():
            for peer in sorted(self.peers[me].electorate.live) if to is None else [to]:
                if peer != me:
                    self.bag.append((me, peer, message))

    def deliver(self, place):
        sender, to, message = self.bag[place]
        if to in self.peers:
            self.peers[to].on_message(sender, message, sign(sender, message), self.now)
            self.collect(to)

    def announce(self, me):
        self.attempts[me] += 1
        peer = self.peers[me]
        peer.announce(ready(self.attempts[me], voter=peer.voter, life=self.stores[me].life), self.now)
        self.collect(me)

    def complete(self, me):
        proposal = self.peers[me].proposal
        if proposal is not None and me in proposal.alive:
            self.peers[me].complete(digest(proposal.contributors), self.now)
            self.collect(me)

    def tick(self, seconds):
        self.now += seconds
        for me in list(self.peers):
            self.peers[me].tick(self.now)
            self.collect(me)

    def crash(self, me):
        """Kill a peer: some of its messages are still sent; other peers learn of its death at different times."""
        del self.peers[me]
        self.bag = [entry for entry in self.bag if entry[1] != me and (entry[0] != me or self.rng.random() < 0.5)]
        self.notices += [(peer, me) for peer in self.peers]

    def spared(self, me):
        """Return True if the other members that keep their votes are a quorum."""
        return enough(set(self.order) - self.out - {me}, self.seniors)

    def restart(self, me):
        """Restart a peer with its store; other peers may still have messages of its last process, and links to it."""
        self.begin(me)
        for other in self.peers:
            if other != me:
                self.join_up(me, other)

    def lose(self, me):
        """Kill a peer and delete its run folder, but not its key."""
        self.out.add(me)
        self.crash(me)
        self.stores[me].renew()

    def leave(self, me):
        """Let a peer say farewell and end; some of its messages are lost."""
        self.out.add(me)
        self.peers[me].leave()
        self.collect(me)
        self.crash(me)

    def notify(self, place):
        to, dead = self.notices.pop(place)
        if to in self.peers and dead not in self.peers:
            self.peers[to].on_link_down(dead, self.now)
            self.collect(to)

    def cut(self, a, b):
        for one, other in ((a, b), (b, a)):
            if one in self.peers:
                self.peers[one].on_link_down(other, self.now)
                self.collect(one)

    def join_up(self, a, b):
        for one, other in ((a, b), (b, a)):
            if one in self.peers and other in self.peers:
                self.peers[one].reach(other)
                self.collect(one)

    def step(self):
        rng = self.rng
        action = rng.choices(
            [
                *("deliver", "lose", "repeat", "announce", "complete", "tick"),
                *("crash", "notify", "cut", "join", "blame", "restart", "lose folder", "leave"),
            ],
            self.weights,
        )[0]
        here = list(self.peers)
        if not here:
            action = "restart"
        me = rng.choice(here or self.ids)
        if action in ("deliver", "lose", "repeat") and self.bag:
            place = rng.randrange(len(self.bag))
            if action != "lose":
                self.deliver(place)
            if action != "repeat":
                del self.bag[place]
        elif action == "announce" and self.attempts[me] < 3:
            self.announce(me)
        elif action == "complete":
            self.complete(me)
        elif action == "tick":
            self.tick(rng.choice([0.1, 0.5, 2.0, 5.0]))
        elif action == "crash":
            self.crash(me)
        elif action in ("lose folder", "leave") and self.spared(me):
            (self.leave if action == "leave" else self.lose)(me)
        elif action == "restart" and len(here) < len(self.ids):
            self.restart(rng.choice([peer for peer in self.ids if peer not in self.peers]))
        elif action == "notify" and self.notices:
            self.notify(rng.randrange(len(self.notices)))
        elif action in ("cut", "join"):
            (self.cut if action == "cut" else self.join_up)(*rng.sample(self.ids, 2))
        elif action == "blame":
            self.peers[me].accuse(
                rng.choice(self.ids), rng.choice(["norm", "chunk missing", "result missing"]), self.now
            )
            self.collect(me)

    def heal(self):
        """Restart all peers that have not left, and deliver everything at once from now on, until all have acted."""
        for me in self.ids:
            if me not in self.peers and not (self.stores[me].record and self.stores[me].record.left):
                self.restart(me)
        for a in self.ids:
            for b in self.ids:
                if a < b:
                    self.join_up(a, b)
        for me in list(self.peers):
            self.announce(me)
        for _ in range(400):
            while self.bag:
                self.deliver(0)
                del self.bag[0]
            while self.notices:
                self.notify(0)
            for me in list(self.peers):
                self.complete(me)
            self.tick(0.25)

    def committed(self):
        return {me: peer.commit for me, peer in self.peers.items() if peer.commit is not None}

    def check(self):
        """Check that all processes that have ever run agree on contributors, members, their lives and the results."""
        for peer in self.peers.values():
            if peer.commit is not None:
                proposal = peer.commit.proposal
                self.verdicts.add((proposal.contributors, proposal.members, proposal.lives, peer.commit.digest))
                assert peer.commit.digest == digest(proposal.contributors)
        assert len(self.verdicts) <= 1


@settings(max_examples=400)
@example(seed=24528, n=2, guests=1)  # the only contributor is excluded twice
@example(seed=1003525, n=2, guests=1)  # another one was not in the group
@example(seed=2001385, n=2, guests=1)  # the other does not answer
@example(seed=1002016, n=3, guests=1)  # only a guest knows the commit of a dead peer
@example(seed=569715483684, n=4, guests=0)  # a peer promises another one its ballot and begins its own at once
@example(seed=1436540679335, n=4, guests=1)  # or when the other has waited for the answer of a third one
@given(seed=st.integers(0, 2**48), n=st.integers(2, 6), guests=st.integers(0, 2))
def test_paxos_reaches_one_verdict_under_random_faults(seed, n, guests):
    """Live peers never have two commits, and when the faults are over all have the same one."""
    _misfortune(seed, n, guests)


@pytest.mark.soak
@settings(max_examples=40_000)
@given(seed=st.integers(0, 2**48), n=st.integers(2, 6), guests=st.integers(0, 2))
def test_paxos_reaches_one_verdict_under_many_random_faults(seed, n, guests):
    _misfortune(seed, n, guests)


def _misfortune(seed, n, guests):
    rng = random.Random(seed)
    world = World(n, rng, min(guests, n - 1))
    for _ in range(rng.choice([30, 100, 300])):
        world.step()
        world.check()
    world.heal()
    world.check()
    assert set(world.committed()) == set(world.peers)


class Script(World):
    """World without chance: all are ready, peer 0 leads, and messages of `silent` peers are not delivered."""

    def __init__(self, n):
        super().__init__(n, random.Random(0))
        self.order, self.seniors = self.ids, tuple(self.ids)
        self.silent, self.started = set(), False
        for me in self.ids:
            self.begin(me)
        self.started = True
        for me in self.ids:
            self.announce(me)
        self.flow()
        self.tick(0.0)
        self.flow()
        assert all(peer.proposal.ballot == Ballot(1, self.ids[0]) for peer in self.peers.values())

    def flow(self, wanted=lambda sender, to, message: True):
        """Deliver all messages except those of or to silent peers, and those that are not `wanted`."""
        kept = []
        while self.bag:
            sender, to, message = self.bag[0]
            if {sender, to} & self.silent or not wanted(sender, to, message):
                kept.append(self.bag[0])
            else:
                self.deliver(0)
            del self.bag[0]
        self.bag = kept

    def kill(self, *victims):
        """Kill these peers with their unsent messages; all others learn that the links broke."""
        for me in victims:
            self.crash(me)
        self.bag = [entry for entry in self.bag if entry[0] not in victims]
        while self.notices:
            self.notify(0)

    def say_farewell(self, *leavers):
        """Let these peers leave; their farewells arrive at all that are not silent."""
        for me in leavers:
            self.peers[me].leave()
            self.collect(me)
        self.flow(lambda sender, to, message: isinstance(message, Leave))
        self.kill(*leavers)

    def go_on(self, seconds):
        for _ in range(int(seconds / 0.5)):
            self.tick(0.5)
            self.flow()
            for me in list(self.peers):
                if me not in self.silent:
                    self.complete(me)
            self.flow()


def _hidden_verdict():
    """Six peers: 0, 1, 2 have voted, and 0 sent the commit only to 2, which is silent from now on."""
    world = Script(6)
    a, b, c, *_ = world.ids
    for me in (a, b, c):
        world.complete(me)
    world.flow(lambda sender, to, message: isinstance(message, Vote))
    world.flow(lambda sender, to, message: to == c)
    assert set(world.committed()) == {a, b, c} - {b}
    world.silent = {c}
    return world


def test_verdict_known_to_silent_peer_is_never_overruled():
    """Two of six are dead, one is silent: the other three are no quorum, however long they wait."""
    world = _hidden_verdict()
    world.kill(*world.ids[:2])
    world.go_on(200.0)
    assert set(world.committed()) == {world.ids[2]}
    world.silent = set()
    world.go_on(12.0)
    assert set(world.committed()) == set(world.peers)
    world.check()


def test_members_left_after_farewells_commit_the_value_that_the_farewells_report():
    """Two of six leave, one is silent: three of four are a quorum, and the votes of the leavers bind them."""
    world = _hidden_verdict()
    world.check()
    world.say_farewell(*world.ids[:2])
    world.go_on(20.0)
    assert set(world.committed()) == set(world.ids[2:])
    commit = world.peers[world.ids[3]].commit
    assert [farewell.peer for farewell in commit.proposal.farewells] == world.ids[:2]
    assert commit.proposal.adopted is not None
    world.check()


def test_peers_without_a_quorum_never_commit_however_many_are_refused():
    """Two of four without the most senior one: no number of broken links or patiences makes them a quorum."""
    world = Script(4)
    world.kill(*world.ids[:2])
    for _ in range(20):
        world.go_on(10.0)
        world.cut(*world.ids[2:])
        world.join_up(*world.ids[2:])
    assert not world.committed() and not world.peers[world.ids[2]].electorate.able


def test_restarted_swarm_commits_what_was_chosen_before():
    """All processes end at once, after a commit that only the first one knew; all come back with their votes."""
    world = Script(5)
    for me in world.ids[:3]:
        world.complete(me)
    world.flow(lambda sender, to, message: isinstance(message, Vote))
    assert set(world.committed()) == {world.ids[0]}
    world.check()
    world.kill(*world.ids)
    for me in world.ids[1:]:
        world.restart(me)
    world.flow()
    for me in world.ids[1:]:
        world.announce(me)
    world.go_on(40.0)
    assert set(world.committed()) == set(world.ids[1:])
    world.check()


def test_members_are_part_of_the_decided_value():
    """A leader is paused with enough votes; the others commit the same results with the same members."""
    world = Script(5)
    leader, *others = world.ids
    for me in (leader, *others[:2]):
        world.complete(me)
    votes, world.bag = world.bag, []
    paused = world.peers.pop(leader)
    world.go_on(30.0)
    assert set(world.committed()) == set(others)
    commit = world.peers[others[0]].commit
    assert commit.proposal.adopted is not None and commit.proposal.alive == tuple(others)
    world.peers[leader], world.bag = paused, votes
    world.flow()
    assert paused.commit.proposal.ballot == Ballot(1, leader)
    assert paused.commit.proposal.members == commit.proposal.members == tuple(world.ids)
    world.check()


# --- ballot after ballot


@pytest.mark.parametrize("told", [1, 2])
def test_verdict_of_leader_that_dies_while_sending_it_reaches_all(told):
    """The next proposer knows the commit and sends it, or asks for it and forwards it."""
    world = Script(5)
    leader = world.ids[0]
    for me in world.ids:
        world.complete(me)
    world.flow(lambda sender, to, message: isinstance(message, Vote))
    world.flow(lambda sender, to, message: to == world.ids[told])
    assert set(world.committed()) == {leader, world.ids[told]}
    world.kill(leader)
    world.flow()
    assert set(world.committed()) == set(world.ids[1:])
    world.check()


def _ballots(world, seconds, trouble):
    """Return the ballots that begin in this many seconds of `trouble`, which is called ten times a second."""
    begun = set()
    for _ in range(int(10 * seconds)):
        world.tick(0.1)
        trouble()
        while world.bag:
            sender, to, message = world.bag[0]
            if isinstance(message, Prepare):
                begun.add(message.ballot)
            world.deliver(0)
            del world.bag[0]
    return len(begun)


def test_failing_ballots_become_rarer():
    """No ballot completes: there are more and more rarely ballots, but always some."""
    world = Script(4)
    first, then = _ballots(world, 30.0, lambda: None), _ballots(world, 300.0, lambda: None)
    assert first >= 4 and 300 / 20 <= then <= 300 / 4
    for me in world.ids:
        world.complete(me)
    world.flow()
    assert set(world.committed()) == set(world.peers), "and the next one that can be decided is"


def test_thousands_of_ballots_of_one_round_do_not_grow_state():
    """The minority of a partition proposes for days. From 1024 ballots on, twice the pause would be no float."""
    world = Script(3)
    world.silent = set(world.ids[1:])
    leader = world.peers[world.ids[0]]
    leader.on_link_down(world.ids[1], 0.0)
    world.collect(world.ids[0])

    def play(turns):
        ballots = set()
        for _ in range(turns):
            world.tick(20.0)
            ballots = {message.ballot for _, _, message in world.bag if isinstance(message, Prepare)} or ballots
            world.bag = []
        return max(ballots).term

    assert play(2500) > 1100
    tracemalloc.start()
    try:
        play(50)
        before = tracemalloc.get_traced_memory()[0]
        play(300)
        assert tracemalloc.get_traced_memory()[0] < before + 10_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("trouble", ["flapping", "lies"])
def test_leader_limits_its_ballot_rate(trouble):
    world = Script(4)
    leader, liar = world.ids[0], world.ids[3]

    def flap():
        world.cut(leader, liar)
        world.join_up(leader, liar)

    def lie():
        """Blame with a new announcement each time, so that each blame is new."""
        agreement = world.peers[liar]
        if agreement.proposal is not None:
            world.attempts[liar] += 1
            agreement.announce(ready(world.attempts[liar]), world.now)
            agreement.accuse(liar, "withdrawn", world.now)
            world.collect(liar)

    # Four at once at first and in each view of the leader, and others after growing pauses.
    assert 4 <= _ballots(world, 60.0, flap if trouble == "flapping" else lie) <= 40


def test_endless_proposer_is_answered_no_more_often_than_an_honest_one():
    peer, ids = _led()
    peer.on_message(ids[0], Propose(proposal := _open(ids, ids[0])), b"", 0.0)
    heard = 0
    for at in range(400):
        now = at / 10
        peer.on_message(ids[3], Prepare(5, 0, Ballot(2 * at + 3, ids[3])), b"", now)
        peer.on_message(ids[3], freely(_open(ids, ids[3], 2 * at + 4), ids, sign), b"", now)
        heard += sum(isinstance(message, Promise) and to == ids[3] for to, message in peer.take())
    assert proposal != peer.proposal and 4 <= heard <= 10
    assert not peer.acceptor.trusts(ids[3]) and peer.acceptor.trusts(ids[2])


def test_endless_proposer_does_not_block_other_ballots():
    """One member proposes ten times a second with growing terms, and leads nothing: the other three commit."""
    world = Script(4)
    liar, honest = world.ids[3], world.ids[:3]
    world.silent = {liar}
    followed = 0
    for at in range(600):
        world.tick(0.1)
        for me in honest:
            ballot = Ballot(world.peers[me].acceptor.promised.term + 1, liar)
            world.peers[me].on_message(liar, Prepare(5, 0, ballot), b"", world.now)
            lives = {"lives": b"".join(world.lives[peer] for peer in world.ids)}
            electorate = world.peers[me].terms.electorate
            proposal = _open(world.ids, liar, ballot.term, electorate=electorate, **lives)
            world.peers[me].on_message(liar, freely(proposal, world.ids, sign), b"", world.now)
            followed += world.peers[me].proposal == proposal
            world.collect(me)
        world.flow()
        if at % 10 == 0:  # moving the data takes a while
            for me in honest:
                world.complete(me)
            world.flow()
    assert followed and set(honest) <= set(world.committed())
    world.check()


def _split_votes(*votes):
    """Let peer 1 of five lead a second ballot; the others promise with these digests of the first vote.

    None: without a vote.
    """
    peer, ids = _led(n=5)
    peer.on_message(ids[0], Propose(proposal := _open(ids, ids[0])), b"", 0.0)
    begun = None
    for at in range(1, 60):
        peer.tick(at / 2)
        begun = begun or next((m for _, m in peer.take() if isinstance(m, Prepare)), None)
        if begun:
            break
    for other, voted in zip((ids[0], *ids[2:]), votes, strict=True):
        if voted != "silent":
            promise = Promise(5, 0, begun.ballot, proposal if voted else None, voted)
            peer.on_message(other, promise, b"", at / 2)
    peer.tick(at / 2 + 5.0)
    return peer.proposal, ids


A, B = bytes([65]) * 32, bytes([66]) * 32


def test_differing_votes_adopt_result_of_the_majority():
    """No commit is possible; with a free choice the lying owner would cause the same split again."""
    proposal, ids = _split_votes(A, B, B, None)
    assert proposal.ballot.leader == ids[1] and proposal.adopted == B and proposal.sources == (ids[2], ids[3])


def test_votes_without_possible_verdict_leave_choice_free():
    proposal, ids = _split_votes(None, A, None, None)
    assert proposal.ballot.leader == ids[1] and proposal.adopted is None


def test_value_with_possible_verdict_is_adopted():
    proposal, ids = _split_votes(A, A, None, "silent")
    assert proposal.ballot.leader == ids[1] and proposal.adopted == A and proposal.sources == (ids[0], ids[2])


@pytest.mark.parametrize("opens", [False, True])
def test_ballots_that_a_peer_begins_without_a_proposal_do_not_extend_patience(opens):
    """A peer that begins one ballot after the other makes no progress; one that has made a proposal may need another one."""
    peer, ids = _led()
    for term in (2, 3):
        peer.on_message(ids[2], Prepare(5, 0, Ballot(term, ids[2])), b"", 1.5 * term)
        if opens:
            peer.on_message(ids[2], freely(_open(ids, ids[2], term), ids, sign), b"", 1.5 * term)
    begun = None
    for at in range(10, 40):
        peer.tick(at / 2)
        if begun is None and any(isinstance(message, Prepare) for _, message in peer.take()):
            begun = at / 2
    assert begun == 1.5 * (3 if opens else 2) + 4 * peer.terms.patience


def _begins(peer, now):
    """Return True if the peer begins a ballot."""
    peer.take()
    peer.tick(now)
    return any(isinstance(message, Prepare) for _, message in peer.take())


def test_patience_with_a_leader_grows_after_ballots_in_vain():
    peer, ids = _led()
    for term in range(2, 2 + BALLOTS + 1):
        leader = ids[2 + term % 2]
        peer.on_message(leader, Prepare(5, 0, Ballot(term, leader)), b"", 1.0)
    peer.on_message(leader, freely(_open(ids, leader, term), ids, sign), b"", 1.0)
    assert peer.proposal is not None
    due = 1.0 + 2.0 * peer.terms.patience * (2 + 2)  # twice the usual, as the third in the order of leaders
    assert not _begins(peer, due - 0.1) and _begins(peer, due)


@pytest.mark.parametrize("precedes", [True, False])
def test_member_with_precedence_replaces_a_stuck_leader_before_its_turn(precedes):
    peer, ids = _led(me=3)
    peer.on_message(ids[0], Propose(_open(ids, ids[0])), b"", 1.0)
    for other in ids[:3]:
        peer.on_message(other, ViewChange(5, 0, 3 if precedes else 0, Ballot(1, ids[0])), b"", 1.0)
    due = 1.0 + (3 if precedes else 2 + 3) * peer.terms.patience
    assert not _begins(peer, due - 0.1) and _begins(peer, due)


def test_leader_with_an_unjustified_ballot_is_replaced_in_half_the_time():
    peer, ids = _led()
    peer.on_message(ids[0], Propose(_open(ids, ids[0])), b"", 1.0)
    peer.on_message(ids[0], freely(_open(ids, ids[0], 2), ids[:1], sign), b"", 1.0)
    assert peer.proposal.ballot == Ballot(1, ids[0])
    assert not _begins(peer, 0.9 + peer.terms.patience) and _begins(peer, 1.0 + peer.terms.patience)


@pytest.mark.parametrize("ballots", [BALLOTS, BALLOTS + 1])
def test_ballot_of_a_leader_that_has_begun_many_is_no_progress(ballots):
    """It still has a patience for the promises. If it is gone, the others do not wait until that is over."""
    peer, ids = _led(me=2)
    for number in range(ballots):
        now = 10.0 * (1 + number)
        peer.on_message(ids[0], freely(_open(ids, ids[0], 2 + number), ids, sign), b"", now)
    assert not _begins(peer, now + 0.9 * peer.terms.patience)
    assert peer.proposal.ballot == Ballot(1 + ballots, ids[0])
    peer.on_link_down(ids[0], now + 0.9 * peer.terms.patience)
    assert bool([message for _, message in peer.take() if isinstance(message, Prepare)]) == (ballots > BALLOTS)


def test_leader_that_has_begun_many_ballots_is_replaced_after_one_patience_and_those_before_us():
    peer, ids = _led(me=2)
    for number in range(BALLOTS + 1):
        now = 10.0 * (1 + number)
        peer.on_message(ids[0], freely(_open(ids, ids[0], 2 + number), ids, sign), b"", now)
    due = now + (1 + 2) * peer.terms.patience
    assert not _begins(peer, due - 0.1) and _begins(peer, due)


def _promises(peer, leader, term, now):
    """Return True if the peer answers a ballot."""
    peer.on_message(leader, Prepare(5, 0, Ballot(term, leader)), b"", now)
    return any(isinstance(message, Promise) for _, message in peer.take())


@pytest.mark.parametrize("hasty", [(), (2,)])
def test_ballot_of_a_hasty_peer_does_not_stop_a_proposal_that_moves(hasty):
    peer, ids = _led(hasty=hasty)
    peer.on_message(ids[0], Propose(_open(ids, ids[0])), b"", 1.0)
    peer.progress(2.0)
    assert _promises(peer, ids[2], 2, 1.9 + peer.terms.patience) != bool(hasty)
    assert _promises(peer, ids[2], 3, 2.1 + peer.terms.patience), "the leader is stuck"


def test_hasty_leader_may_replace_its_own_proposal_at_once():
    """Otherwise a round in which a member departs would wait for a patience."""
    peer, ids = _led(hasty=(0,))
    peer.on_message(ids[0], Propose(_open(ids, ids[0])), b"", 1.0)
    assert _promises(peer, ids[0], 2, 1.0)


def test_ballot_of_a_hasty_peer_is_followed_if_the_leader_is_gone():
    peer, ids = _led(me=3, hasty=(2,))
    peer.on_message(ids[0], Propose(_open(ids, ids[0])), b"", 1.0)
    peer.on_link_down(ids[0], 1.0)
    assert not peer.take(), "it is not our turn"
    assert _promises(peer, ids[2], 2, 1.1)


def test_ballot_of_a_hasty_peer_does_not_forestall_the_first_proposal():
    peer, ids = _led(hasty=(2,))
    assert not _promises(peer, ids[2], 2, 1.0)
    assert not _promises(peer, ids[2], 2, peer.terms.grace + 0.9 * peer.terms.patience)
    assert _promises(peer, ids[2], 2, peer.terms.grace + 1.1 * peer.terms.patience)


@pytest.mark.parametrize(("members", "first"), [(4, True), (4, False), (7, True)])
def test_hasty_peer_may_begin_if_no_first_proposal_can_come(members, first):
    """We do not reach its leader, or no quorum: the hasty peer may be the only one that all others reach."""
    ids = [name(i) for i in range(members)]
    hasty = ids[-1]
    peer = agreement(ids[1], ids, [*ids[: 2 if first else 0], ids[1], ids[2], hasty], hasty=[hasty])
    if members > 4:
        peer.on_link_down(ids[2], 0.0)
    peer.announce(ready(), 0.0)
    peer.take()
    assert _promises(peer, hasty, 2, 1.0) == (members > 4 or not first)


def test_peer_is_hasty_once_another_ballot_has_followed_its_own():
    peer, ids = _led()
    peer.on_message(ids[0], Propose(_open(ids, ids[0])), b"", 1.0)
    assert _promises(peer, ids[2], 2, 1.0) and _promises(peer, ids[2], 3, 1.0), "nothing is open that could move"
    assert _promises(peer, ids[3], 4, 1.0)
    peer.on_message(ids[3], freely(_open(ids, ids[3], 4), ids, sign), b"", 1.0)
    assert not _promises(peer, ids[2], 5, 1.0) and _promises(peer, ids[3], 5, 1.0), "its leader may need another one"


def test_ballot_terms_never_exceed_their_bound():
    """However high a peer drives them, the next proposal fits into a message, or does not begin."""
    peer, ids = _led()
    for at in range(1, 600_000, 1000):
        for _ in range(3):
            term = min(2**32 - 1, peer.acceptor.promised.term + LEAP)
            peer.on_message(ids[3], Prepare(5, 0, Ballot(term, ids[3])), b"", float(at))
    store = MemoryVoteStore()
    store.save(VoteRecord(b"", 5, Ballot(LAST_TERM - 1, ids[3]), None, None))
    peer, _ = _led(store=store)
    peer.on_message(ids[3], Prepare(5, 0, Ballot(LAST_TERM + 1, ids[3])), b"", 0.5)
    assert peer.acceptor.promised.term == LAST_TERM - 1
    peer.on_link_down(ids[3], 1.0)
    for at in range(100):
        peer.tick(2.0 + 10 * at)
    begun = [message.ballot.term for _, message in peer.take() if isinstance(message, Prepare)]
    assert begun and max(begun) <= LAST_TERM < 2**32


def test_changed_votes_of_one_peer_do_not_extend_patience():
    ids = [name(i) for i in range(4)]
    peer = agreement(ids[0], ids, ids)
    for other in ids[1:]:
        peer.on_message(other, ready(), b"", 0.0)
    peer.announce(ready(), 0.0)
    peer.take()
    for at in range(100):
        vote = vote_for(peer.proposal, bytes([at]) * 32)
        peer.on_message(ids[1], vote, sign(ids[1], vote), at / 2)
    begun = [message for _, message in peer.take() if isinstance(message, Prepare)]
    assert begun, "its patience with its own ballot comes to an end"


# --- lies: each leaves the agreement as it was


def _led(me=1, n=4, store=None, hasty=()):
    """Peer `me` of n, all ready; 0 leads. `hasty`: numbers of peers."""
    ids = [name(i) for i in range(n)]
    peer = agreement(ids[me], ids, ids, store=store, hasty=[ids[one] for one in hasty])
    for other in ids:
        if other != peer.me:
            peer.on_message(other, ready(), b"", 0.0)
    peer.announce(ready(), 0.0)
    peer.take()
    return peer, ids


def _open(ids, leader, term=1, **changes):
    given = dict(
        round=5,
        fragment=0,
        ballot=Ballot(term, leader),
        group=tuple(ids),
        alive=tuple(ids),
        contributors=tuple(Contribution(peer, 1, 10) for peer in ids),
        excluded=(),
        adopted=None,
        sources=(),
        electorate=terms(ids).electorate,
    )
    return Proposal(**(given | changes))


def test_proposal_of_the_leader_is_followed():
    peer, ids = _led()
    proposal = _open(ids, ids[0])
    peer.on_message(ids[0], Propose(proposal), b"", 0.0)
    assert peer.proposal == proposal


def test_first_proposal_with_a_justification_is_refused():
    """No earlier ballot exists, so there is nothing to justify; it would only make the message longer."""
    peer, ids = _led()
    proposal = _open(ids, ids[0])
    for message in (Propose(proposal, earlier=(proposal,)), freely(proposal, ids, sign)):
        peer.on_message(ids[0], message, b"", 0.0)
        assert peer.proposal is None
    peer.on_message(ids[0], Propose(proposal), b"", 0.0)
    assert peer.proposal == proposal


@pytest.mark.parametrize(
    ("sender", "changes"),
    [
        (2, {}),  # claims that 0 leads, without being 0
        (2, {"ballot": Ballot(1, name(2))}),  # leads without being the first, without a first phase
        (0, {"round": 4}),
        (0, {"fragment": 1}),
        (0, {"lineage": b"l" * 16}),
        (0, {"electorate": b""}),
        (0, {"electorate": terms([name(0), name(1), name(2)]).electorate}),  # fewer members
        (0, {"electorate": terms([name(3), name(2), name(1), name(0)]).electorate}),  # another seniority
        (0, {"alive": ()}),
        (0, {"alive": (name(1), name(0))}),  # not sorted
        (0, {"group": (name(0), name(1), name(1))}),  # twice
        (0, {"alive": (name(0), name(9))}),  # not in the group
        (0, {"contributors": (Contribution(name(0), 1, 101),)}),  # more than the manifest allows
        (0, {"contributors": (Contribution(name(0), 1, 0),)}),
        (0, {"contributors": (Contribution(name(9), 1, 10),)}),  # takes no part
        (0, {"sources": (name(1),)}),  # without adopted results
        (0, {"adopted": bytes(32), "kept": (name(0), name(1), name(2), name(3))}),  # without sources
        (0, {"adopted": bytes(32), "sources": (name(1),)}),  # with which members?
        (0, {"kept": (name(0), name(1), name(2), name(3))}),  # without adopted results
        (0, {"adopted": bytes(32), "sources": (name(1),), "kept": (name(0), name(1), name(3), name(2))}),  # not sorted
        (0, {"adopted": bytes(32), "sources": (name(1),), "kept": (name(0), name(1), name(2), name(2))}),
        (0, {"adopted": bytes(32), "sources": (name(1),), "kept": (name(0), name(1), name(2))}),  # 3 contributes
        (0, {"contributors": (Contribution(name(0), 1, 10), Contribution(name(0), 2, 10))}),
    ],
)
def test_invalid_open_is_not_followed(sender, changes):
    peer, ids = _led()
    peer.on_message(ids[sender], Propose(_open(ids, ids[0], **changes)), b"", 0.0)
    assert peer.proposal is None


def test_ballot_below_promise_is_not_followed():
    peer, ids = _led()
    peer.on_message(ids[2], Prepare(5, 0, Ballot(3, ids[2])), b"", 0.0)
    peer.on_message(ids[0], Propose(_open(ids, ids[0])), b"", 0.0)
    assert peer.proposal is None
    # Nor does it vote for its earlier proposal.
    peer, ids = _led()
    proposal = _open(ids, ids[0])
    peer.on_message(ids[0], Propose(proposal), b"", 0.0)
    peer.on_message(ids[2], Prepare(5, 0, Ballot(3, ids[2])), b"", 0.0)
    peer.take()
    peer.complete(digest(proposal.contributors), 0.0)
    assert not [message for _, message in peer.take() if isinstance(message, Vote)]


@pytest.mark.parametrize(("term", "answers"), [(2, [ViewChange]), (3, []), (4, [Ready, Promise])])
def test_prepare_below_the_promise_is_refused_and_a_repeated_one_gets_no_answer(term, answers):
    peer, ids = _led()
    peer.on_message(ids[2], Prepare(5, 0, Ballot(3, ids[2])), b"", 0.0)
    peer.take()
    peer.on_message(ids[2], Prepare(5, 0, Ballot(term, ids[2])), b"", 0.0)
    assert [(to, type(message)) for to, message in peer.take()] == [(ids[2], kind) for kind in answers]


@pytest.mark.parametrize("leader", [0, 2])
def test_vote_goes_to_the_leader_only(leader):
    peer, ids = _led()
    proposal = _open(ids, ids[leader], 2)
    peer.on_message(ids[leader], freely(proposal, ids, sign), b"", 0.0)
    peer.take()
    peer.complete(digest(proposal.contributors), 0.0)
    assert peer.take() == [(ids[leader], vote_for(proposal, digest(proposal.contributors)))]


@pytest.mark.parametrize("promises", [True, False])
def test_leader_that_has_promised_another_ballot_counts_no_more_votes_for_its_own(promises):
    leader, ids = _led(me=0)
    if promises:
        leader.on_message(ids[3], Prepare(5, 0, Ballot(2, ids[3])), b"", 0.0)
    for voter in ids[1:]:
        vote = vote_for(leader.proposal, digest(leader.proposal.contributors))
        leader.on_message(voter, vote, sign(voter, vote), 0.0)
    assert (leader.commit is None) == promises


def _commit(proposal, voters, signers=None, about=None):
    verdict = digest(proposal.contributors)
    vote = vote_for(proposal, about or verdict)
    signers = voters if signers is None else signers
    proofs = tuple(Proof(peer, sign(signer, vote)) for peer, signer in zip(voters, signers, strict=True))
    return Commit(proposal, verdict, proofs)


def test_commit_with_quorum_of_votes_is_accepted_from_anyone():
    peer, ids = _led()
    commit = _commit(_open(ids, ids[0]), ids[:3])
    peer.on_message(ids[3], commit, b"", 0.0)
    assert peer.commit == commit


def test_commit_goes_without_its_proposal_to_peers_that_have_it():
    """Peer 3 has a new link since the proposal: it may not have got it, and gets the whole commit."""
    ids = [name(i) for i in range(4)]
    leader = agreement(ids[0], ids, ids[:3])
    for other in ids[1:3]:
        leader.on_message(other, ready(), b"", 0.0)
    leader.announce(ready(), 0.0)
    proposal = leader.proposal
    leader.reach(ids[3])
    leader.take()
    verdict = digest(proposal.contributors)
    leader.complete(verdict, 0.0)
    for voter in ids[1:3]:
        leader.on_message(voter, vote_for(proposal, verdict), sign(voter, vote_for(proposal, verdict)), 0.0)
    sent = dict(leader.take())
    assert sent == {ids[1]: compact(leader.commit), ids[2]: compact(leader.commit), ids[3]: leader.commit}
    follower, _ = _led(me=1)
    follower.on_message(ids[0], Propose(proposal), b"", 0.0)
    follower.on_message(ids[0], sent[ids[1]], b"", 0.0)
    assert follower.commit == leader.commit


@pytest.mark.parametrize("here", [None, 2])
def test_peer_without_the_proposal_of_a_commit_asks_for_all_of_it(here):
    peer, ids = _led()
    commit = _commit(_open(ids, ids[0]), ids[:3])
    if here is not None:  # Another proposal is here.
        peer.on_message(ids[2], freely(_open(ids, ids[2], here), ids, sign), b"", 0.0)
    peer.take()
    peer.on_message(ids[0], compact(commit), b"", 0.0)
    assert peer.commit is None and (ids[0], Ask(5, 0)) in peer.take()
    peer.on_message(ids[0], commit, b"", 0.0)
    assert peer.commit == commit
    peer.on_message(ids[0], compact(commit), b"", 0.0)
    assert not peer.take()
    other = _commit(_open(ids, ids[0], excluded=(Exclusion(name(9), "late"),)), ids[:3])
    peer.on_message(ids[0], compact(other), b"", 0.0)
    assert peer.take() == [(ids[0], Ask(5, 0))], "two proposals of one ballot are evidence"


@pytest.mark.parametrize(
    "change",
    [
        {"voters": b"\x01"},
        {"voters": b"\x0f"},
        {"signatures": bytes(192)},
        {"digest": bytes(32)},
        {"proposal_digest": bytes(32)},
    ]
    + [{"voters": b"\x07\x00"}, {"voters": b"\x17"}, {"signatures": b""}],
    ids=str,
)
def test_forged_commit_without_its_proposal_is_refused(change):
    peer, ids = _led()
    proposal = _open(ids, ids[0])
    peer.on_message(ids[0], Propose(proposal), b"", 0.0)
    true = compact(_commit(proposal, ids[:3]))
    peer.on_message(ids[0], msgspec.structs.replace(true, **change), b"", 0.0)
    assert peer.commit is None
    peer.on_message(ids[0], true, b"", peer.terms.patience)
    assert peer.commit is not None


@pytest.mark.parametrize("case", ["few", "forged", "of another digest", "one voter thrice", "of strangers", "gone"])
def test_forged_commit_is_refused(case):
    peer, ids = _led()
    proposal = _open(ids, ids[0])
    forged = {
        "few": _commit(proposal, ids[1:2]),
        "forged": _commit(proposal, ids[:3], signers=[ids[3]] * 3),
        "of another digest": _commit(proposal, ids[:3], about=bytes(32)),
        "one voter thrice": _commit(proposal, [ids[3]] * 3),
        "of strangers": _commit(proposal, [name(7), name(8), name(9)]),
        "gone": _commit(
            _open(ids, ids[3], 2, excluded=tuple(Exclusion(peer, "gone") for peer in ids[:3])), ids[3:]
        ),  # leaves members out of the quorum without farewells
    }[case]
    peer.on_message(ids[3], forged, b"", 0.0)
    peer.tick(5.0)
    assert peer.commit is None


def test_verdict_of_non_members_does_not_hide_the_real_one():
    """Four non-members commit with the same round number; then a commit with three members' votes arrives."""
    peer, ids = _led()
    strangers = [name(i) for i in (7, 8, 9, 10)]
    for electorate in (terms(strangers).electorate, terms(ids).electorate):
        proposal = _open(strangers, strangers[0], electorate=electorate)
        peer.on_message(strangers[0], _commit(proposal, strangers), b"", 0.0)
        assert peer.commit is None
    commit = _commit(_open(ids, ids[0]), ids[:3])
    peer.on_message(ids[0], commit, b"", 0.0)
    assert peer.commit == commit


def test_weights_are_capped_and_zero_weight_does_not_contribute():
    ids = [name(i) for i in range(3)]
    peer = agreement(ids[0], ids, ids)
    peer.on_message(ids[1], ready(weight=10_000), b"", 0.0)
    peer.on_message(ids[2], ready(weight=0), b"", 0.0)
    peer.announce(ready(), 0.0)
    assert [(entry.peer, entry.weight) for entry in peer.proposal.contributors] == [(ids[0], 10), (ids[1], 100)]
    assert peer.proposal.alive == tuple(ids)


def test_other_base_or_plan_is_excluded_with_reason():
    ids = [name(i) for i in range(4)]
    peer = agreement(ids[0], ids, ids)
    peer.on_message(ids[1], ready(base=bytes([9]) * 32), b"", 0.0)
    peer.on_message(ids[2], ready(plan=bytes([9]) * 32), b"", 0.0)
    peer.on_message(ids[3], ready(), b"", 0.0)
    peer.announce(ready(), 0.0)
    assert {entry.peer: entry.reason for entry in peer.proposal.excluded} == {ids[1]: "base digest", ids[2]: "plan"}
    assert peer.proposal.alive == (ids[0], ids[3]) and not peer.diverged


def test_peer_with_minority_base_knows_that_it_diverged():
    ids = [name(i) for i in range(4)]
    peer = agreement(ids[3], ids, ids)
    for other in ids[:2]:
        peer.on_message(other, ready(base=bytes([9]) * 32), b"", 0.0)
    assert not peer.diverged, "two of four may be wrong themselves"
    peer.on_message(ids[2], ready(base=bytes([9]) * 32), b"", 0.0)
    assert peer.diverged


def test_each_vote_counts_once_and_for_one_digest():
    ids = [name(i) for i in range(5)]
    peer = agreement(ids[0], ids, ids)
    for other in ids[1:]:
        peer.on_message(other, ready(), b"", 0.0)
    peer.announce(ready(), 0.0)
    right, wrong = digest(peer.proposal.contributors), bytes(32)
    for _ in range(3):
        vote = vote_for(peer.proposal, right)
        peer.on_message(ids[1], vote, sign(ids[1], vote), 0.0)
    for other in (ids[2], ids[3]):
        vote = vote_for(peer.proposal, wrong)
        peer.on_message(other, vote, sign(other, vote), 0.0)
    assert peer.commit is None
    peer.complete(right, 0.0)
    assert peer.commit is None
    vote = vote_for(peer.proposal, right)
    peer.on_message(ids[4], vote, sign(ids[4], vote), 0.0)
    assert peer.commit.digest == right and [proof.peer for proof in peer.commit.votes] == [ids[0], ids[1], ids[4]]


@pytest.mark.parametrize("why", ["voter", "life"])
def test_peer_without_a_vote_neither_votes_promises_nor_leads(why):
    ids = [name(i) for i in range(3)]
    lives = {} if why == "voter" else {ids[0]: bytes([7]) * 16}
    store = MemoryVoteStore(random.Random(1))
    peer = agreement(ids[0], ids, ids, voter=why != "voter", store=store, lives=lives)
    for other in ids[1:]:
        peer.on_message(other, ready(), b"", 0.0)
    announced = ready(voter=peer.voter, life=peer.use_number(1))
    peer.announce(announced, 0.0)
    peer.tick(100.0)
    assert peer.proposal is None and not peer.voter
    peer.on_message(ids[1], Prepare(5, 0, Ballot(2, ids[1])), b"", 100.0)
    peer.on_message(
        ids[1], freely(proposal := _open(ids, ids[1], 2, electorate=peer.terms.electorate), ids, sign), b"", 100.0
    )
    peer.complete(digest(proposal.contributors), 100.0)
    assert not [message for _, message in peer.take() if isinstance(message, Promise | Vote | Propose)]
    # The others wait for it no longer, and two of three members are still a quorum.
    other = agreement(ids[1], ids, ids, lives=lives)
    other.on_message(ids[0], announced, b"", 0.0)
    assert other.waiting_for() == (ids[1], ids[2]) and ids[0] in other.electorate.absent
    assert other.electorate.able


def test_restarted_peer_with_its_store_remembers_its_promise_and_vote():
    store = MemoryVoteStore()
    before, ids = _led(store=store)
    before.on_message(ids[0], Propose(proposal := _open(ids, ids[0])), b"", 0.0)
    before.complete(digest(proposal.contributors), 0.0)
    before.on_message(ids[2], Prepare(5, 0, Ballot(2, ids[2])), b"", 0.0)
    after, _ = _led(store=store)
    assert after.voter and after.acceptor.bound
    after.on_message(ids[0], Propose(proposal), b"", 0.0)
    assert after.proposal is None, "a lower ballot than the promised one"
    after.on_message(ids[3], Prepare(5, 0, Ballot(4, ids[3])), b"", 0.0)
    ((to, promise),) = [(to, message) for to, message in after.take() if isinstance(message, Promise)]
    assert to == ids[3] and promise.voted == proposal and promise.digest == digest(proposal.contributors)


def test_restarted_leader_does_not_begin_its_first_ballot_again():
    """It could propose another value under the same number."""
    store = MemoryVoteStore()
    before, ids = _led(me=0, store=store)
    assert before.proposal is not None and before.proposal.ballot == Ballot(1, ids[0])
    after, _ = _led(me=0, store=store)
    assert after.proposal is None
    begun = []
    for at in range(40):
        after.tick(at / 2)
        begun += [message for _, message in after.take() if isinstance(message, (Propose, Prepare))]
    assert begun and all(message.ballot.term > 1 for message in begun)


class BrokenStore(MemoryVoteStore):
    """Store on a disk that is full."""

    def save(self, record):
        raise OSError("no space left on device")


def test_peer_that_cannot_store_sends_no_promise_no_vote_and_no_proposal():
    peer, ids = _led(store=BrokenStore())
    peer.on_message(ids[0], Propose(proposal := _open(ids, ids[0])), b"", 0.0)
    assert peer.proposal == proposal, "it takes part, so that others get its data"
    peer.complete(digest(proposal.contributors), 0.0)
    peer.on_message(ids[2], Prepare(5, 0, Ballot(2, ids[2])), b"", 0.0)
    leader, _ = _led(me=0, store=BrokenStore())
    for at in range(100):
        peer.tick(float(at))
        leader.tick(float(at))
    leader.leave()
    kinds = Promise | Vote | Propose | Prepare | Leave
    assert not [message for one in (peer, leader) for _, message in one.take() if isinstance(message, kinds)]
    assert not peer.voter and not leader.voter


@pytest.mark.parametrize(("sender", "lineage"), [(2, b"l" * 16), (9, b"")])
def test_prepare_of_another_lineage_or_of_a_stranger_gets_no_promise(sender, lineage):
    peer, _ = _led()
    peer.on_message(name(sender), Prepare(5, 0, Ballot(2, name(sender)), lineage), b"", 0.0)
    assert not [message for _, message in peer.take() if isinstance(message, Promise)] and not peer.acceptor.bound


def test_withdrawn_peer_has_no_vote_and_a_barred_one_is_not_waited_for():
    peer, ids = _led(store=(store := MemoryVoteStore()))
    peer.electorate.nonvoters.add(ids[3])
    assert peer.electorate.able and set(peer.electorate.nonvoters) == {ids[3]} and peer.electorate.absent == (ids[3],)
    assert peer.abstain() and store.record.left
    assert not peer.voter and peer.electorate.able and set(peer.electorate.nonvoters) == {ids[1], ids[3]}
    peer.electorate.nonvoters.add(ids[0])
    assert not peer.electorate.able and peer.electorate.absent == (ids[0], ids[1], ids[3])
    peer.on_message(ids[2], Prepare(5, 0, Ballot(2, ids[2])), b"", 0.0)
    assert not [message for _, message in peer.take() if isinstance(message, Promise)]


def test_late_peer_gets_announcement_and_verdict():
    peer, ids = _led()
    peer.on_message(ids[2], Ask(5, 0), b"", 0.0)
    assert [(to, type(message)) for to, message in peer.take()] == [(ids[2], Ready)]
    commit = _commit(_open(ids, ids[0]), ids[:3])
    peer.on_message(ids[0], commit, b"", 0.0)
    peer.on_message(ids[2], Ask(5, 0), b"", 0.0)
    assert peer.take() == [(ids[2], commit)]


@pytest.mark.parametrize("member", [True, False])
def test_only_members_vote(member):
    """A newcomer in the ballot has the results, too. Its vote would not count, and it might forget the vote."""
    ids = [name(index) for index in range(4)]
    members = ids if member else ids[:3]
    peer = agreement(ids[3], members, ids)
    peer.on_message(ids[0], Propose(_open(ids, ids[0], electorate=terms(members).electorate)), b"", 0.0)
    assert peer.proposal is not None
    peer.complete(digest(peer.proposal.contributors), 0.0)
    votes = [to for to, message in peer.take() if isinstance(message, Vote)]
    assert votes == ([ids[0]] if member else [])


def test_newcomers_never_decide_after_all_members_are_unreachable():
    ids, strangers = [name(1), name(2)], [name(7), name(8), name(9)]
    peer = agreement(strangers[0], ids, strangers)
    for lost in ids:
        peer.on_link_down(lost, 0.0)
    for other in strangers[1:]:
        peer.on_message(other, ready(), b"", 0.0)
    peer.announce(ready(), 0.0)
    for at in range(200):
        peer.tick(float(at))
        for _, message in peer.take():
            assert not isinstance(message, (Propose, Prepare))
    assert peer.proposal is None and peer.electorate.absent == tuple(ids)


def test_grace_begins_again_with_a_quorum_that_was_lost():
    ids = [name(i) for i in range(4)]
    peer = agreement(ids[0], ids, ids)
    for other in ids[1:3]:
        peer.on_message(other, ready(), b"", 0.0)
    peer.announce(ready(), 0.0)
    for other in ids[1:3]:
        peer.on_link_down(other, 9.0)
    for other in ids[1:3]:
        peer.reach(other)
    peer.tick(11.0)
    peer.tick(10.9 + peer.terms.grace)
    assert peer.proposal is None
    peer.tick(11.0 + peer.terms.grace)
    assert peer.proposal is not None


def test_group_below_quorum_is_not_kept_for_next_ballot():
    """Only the group votes: a ballot that opened while most were away must not exclude them from the next."""
    ids = [name(i) for i in range(3)]
    peer = agreement(ids[0], ids, ids)
    peer.on_message(ids[2], ready(), b"", 0.0)
    only = (ids[2],)
    proposal = _open(ids, ids[2], 4, group=only, alive=only, contributors=(Contribution(ids[2], 1, 10),))
    peer.on_message(ids[2], freely(proposal, ids, sign), b"", 0.0)
    assert peer.proposal.alive == only
    peer.on_message(ids[1], ready(), b"", 0.0)
    peer.announce(ready(), 0.0)
    peer.take()
    for at in range(1, 40):
        peer.tick(float(at))
        for _, message in peer.take():
            if isinstance(message, Prepare):
                for other in ids[1:]:
                    peer.on_message(other, Promise(5, 0, message.ballot, None, None), b"", float(at))
    assert peer.proposal.alive == tuple(ids)


@pytest.mark.parametrize("leads", [True, False])
def test_follower_does_not_open_before_the_leader(leads):
    """Each peer computes its own grace, a newcomer a short one: it must not open before the leader would."""
    members = [name(index) for index in range(4)]
    me, others = (members[0], members[1:3]) if leads else (members[1], [members[0], members[2]])
    agreement = Agreement(FakeKeys(me, sign, verify), terms(members, grace=3.0, limit=60.0, patience=2.0), live=members)
    agreement.announce(ready(), 0.0)
    for peer in others:
        agreement.on_message(peer, ready(), sign(peer, ready()), 0.0)
    when = None
    for now in range(80):
        agreement.tick(float(now))
        if when is None and any(isinstance(message, (Propose, Prepare)) for _, message in agreement.take()):
            when = now
    assert when == (3 if leads else 62)


# --- what other parts ask about a round


def test_round_is_overdue_from_the_demand_for_another_leader_to_the_commit():
    peer, ids = _led()
    proposal = _open(ids, ids[0])
    peer.on_message(ids[0], Propose(proposal), b"", 0.0)
    peer.tick(0.1)
    assert not peer.overdue
    peer.tick(0.1 + 1.1 * VIEW * peer.terms.patience)
    assert peer.overdue
    peer.on_message(ids[0], _commit(proposal, ids[:3]), b"", 20.0)
    assert peer.commit is not None and not peer.overdue


def test_proposal_is_shown_to_each_peer_once_in_each_ballot():
    peer, ids = _led()
    peer.send_proposal(ids[2])
    assert peer.take() == []
    for term, leader in ((1, ids[0]), (2, ids[3])):
        proposal = _open(ids, leader, term)
        peer.on_message(leader, freely(proposal, ids, sign) if term > 1 else Propose(proposal), b"", 0.0)
        for other in (ids[2], ids[2], ids[0]):
            peer.send_proposal(other)
        assert peer.take() == [(other, Propose(proposal)) for other in (ids[2], ids[0])]
