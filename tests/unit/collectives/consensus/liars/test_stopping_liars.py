"""Liars that begin ballots in order to stop a round. The first member lies, so its ballot ends without a commit.

Honest members are real agreements on a network with delays, in virtual time; a liar is a function that is called in each step.
"""

from __future__ import annotations

import heapq
import random

import pytest
from kit.rounds.agreements import agreement, digest, name, ready, sign
from thinwire.collectives.consensus.acceptor import LEAP
from thinwire.swarm.messages.registry import Ballot, Commit, CompactCommit, Prepare, ViewChange, Vote

STEP, LATENCY, COMPUTING = 0.05, 0.1, 0.5
"""Seconds of a step of the clock, of the way of a message (half as long to one and a half times), and to all results."""

TOLERATED = [(3, 1, 0.5), (7, 2, 0.5), (4, 1, 2 / 3), (7, 2, 2 / 3), (10, 3, 2 / 3)]
"""Members, liars, quorum. With plain majorities a liar could fork a round, but a third of the members must not stop it."""


class Network:
    """Members of one round. `liars` lead and promise, but never vote or commit; `attack` is what else they do."""

    def __init__(self, members, liars, fraction, seed, *, late=0.0):
        self.rng = random.Random(f"{members}/{seed}")
        self.ids = [name(index + 1) for index in range(members)]
        order = self.rng.sample(self.ids, members)
        self.liars = [order[0], *self.rng.sample(order[1:], liars - 1)]
        self.honest = [peer for peer in self.ids if peer not in self.liars]
        self.peers = {me: agreement(me, order, set(self.ids), fraction=fraction) for me in self.ids}
        self.starts = {me: self.rng.uniform(0.0, late) for me in self.ids}
        self.now, self._sent, self.way = 0.0, 0, []
        self._complete_at = {}

    @property
    def patience(self):
        return self.peers[self.ids[0]].terms.patience

    def promised(self, peer):
        return self.peers[peer].acceptor.promised

    def send(self, sender, to, message):
        self._sent += 1
        way = LATENCY * self.rng.uniform(0.5, 1.5)
        heapq.heappush(self.way, (self.now + way, self._sent, sender, to, message))

    def collect(self, me):
        for to, message in self.peers[me].take():
            if me in self.liars and isinstance(message, (Vote, Commit, CompactCommit)):
                continue
            for peer in self.ids if to is None else [to]:
                if peer != me:
                    self.send(me, peer, message)

    def step(self):
        self.now += STEP
        for me in [one for one, at in self.starts.items() if at <= self.now]:
            del self.starts[me]
            self.peers[me].announce(ready(), self.now)
            self.collect(me)
        while self.way and self.way[0][0] <= self.now:
            _, _, sender, to, message = heapq.heappop(self.way)
            deaf = to in self.liars and isinstance(message, (Vote, Commit, CompactCommit))
            if to not in self.starts and not deaf:
                self.peers[to].on_message(sender, message, sign(sender, message), self.now)
                self.collect(to)
        for me in self.honest:
            peer = self.peers[me]
            if peer.proposal is not None and peer.commit is None and me in peer.proposal.alive:
                if self.now >= self._complete_at.setdefault((me, peer.proposal.ballot), self.now + COMPUTING):
                    peer.complete(digest(peer.proposal.contributors), self.now)
            if me not in self.starts:
                peer.tick(self.now)
                self.collect(me)

    def play(self, attack, limit):
        """Return the seconds until all honest members have committed the same value, infinity after `limit` seconds."""
        while self.now < limit:
            self.step()
            attack(self)
            commits = [self.peers[me].commit for me in self.honest]
            if all(commits):
                assert len({(one.proposal.contributors, one.digest) for one in commits}) == 1
                return self.now
        return float("inf")


def strike_the_wait_for_promises(world):
    """Once all honest peers have promised a ballot of one of them, let one of them promise a ballot of a liar.

    The liar strikes before the proposal, with the smallest and the largest step of the term in turn, and hidden from the
    leader: without a report, the leader's next ballots would be too low.
    """
    for leader in world.honest:
        ballot = world.promised(leader)
        others = [peer for peer in world.honest if peer != leader and world.promised(peer) == ballot]
        waits = world.peers[leader].proposal is None or world.peers[leader].proposal.ballot != ballot
        if ballot.leader == leader and waits and len(others) == len(world.honest) - 1:
            victim, liar = world.rng.choice(others), world.rng.choice(world.liars)
            higher = Ballot(ballot.term + world.rng.choice((1, LEAP)), liar)
            world.peers[victim].on_message(liar, Prepare(5, 0, higher), bytes(64), world.now)
            world.collect(victim)


def outrun_a_ballot(world):
    """Let one peer promise a slightly higher ballot of a liar just before an honest leader's Prepare reaches it."""
    for _, _, leader, to, message in list(world.way):
        if isinstance(message, Prepare) and leader in world.honest and to in world.honest:
            if world.promised(to) < message.ballot and to not in world.starts:
                liar = world.rng.choice(world.liars)
                higher = Prepare(5, 0, Ballot(message.ballot.term + 1, liar))
                world.peers[to].on_message(liar, higher, bytes(64), world.now)
                world.collect(to)
                if world.promised(to) == higher.ballot:
                    return


def begin_ballots_at_random(world):
    """Ten messages a second to random peers: ballots with random terms, false promises, and demands for any view."""
    if world.rng.random() < 10 * STEP:
        liar, victims = world.rng.choice(world.liars), world.rng.sample(world.honest, world.rng.randint(1, 2))
        term = max(map(world.promised, world.honest)).term + world.rng.choice((1, 5, LEAP // 2, LEAP, 2**31))
        if world.rng.random() < 0.5:
            message = Prepare(5, 0, Ballot(term, liar))
        else:
            message = ViewChange(5, 0, world.rng.choice((0, 1, 2, 5, 2**31)), Ballot(term, world.rng.choice(world.ids)))
        for victim in victims:
            world.send(liar, victim, message)


def lead_without_end(world):
    """Lead as often as honest peers follow, and never commit."""
    for liar in world.liars:
        peer = world.peers[liar]
        if liar not in world.starts and peer.proposal is not None and world.rng.random() < STEP:
            for to in world.honest:
                world.send(liar, to, Prepare(5, 0, Ballot(max(peer.acceptor.promised.term, 1) + 1, liar)))
            peer.tick(world.now)
            world.collect(liar)


def demand_a_distant_view(world):
    """Let all liars demand one view, long after the present one, in which a liar has precedence for many patiences."""
    if world.rng.random() < STEP:
        order = world.peers[world.ids[0]].terms.members
        view = 64 * len(order) + order.index(world.liars[-1])
        for liar in world.liars:
            for victim in world.honest:
                world.send(liar, victim, ViewChange(5, 0, view, Ballot(1, order[0])))


ATTACKS = [
    strike_the_wait_for_promises,
    outrun_a_ballot,
    begin_ballots_at_random,
    lead_without_end,
    demand_a_distant_view,
]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("members", "liars", "fraction"), TOLERATED)
def test_liars_that_begin_ballots_delay_a_round_by_a_rotation_and_do_not_stop_it(members, liars, fraction, attack):
    for seed in range(2):
        world = Network(members, liars, fraction, seed)
        assert world.play(attack, 100.0 * world.patience) < 4.0 * (liars + 2) * world.patience


@pytest.mark.parametrize("attack", ATTACKS)
def test_liars_do_not_stop_a_round_that_its_members_begin_at_different_times(attack):
    """Late members reach the leader view of the others."""
    world = Network(4, 1, 2 / 3, 1, late=60.0)
    assert world.play(attack, 400.0) < 60.0 + 4 * 16.0 * world.patience


def test_only_the_member_with_precedence_begins_ballots_in_its_view_while_it_is_reachable():
    """The others ignore ballots of other members late in the view, too, and of the leader of the open proposal."""
    members = ann, ben, cat, dan = [name(index) for index in range(1, 5)]
    peer = agreement(ann, [cat, *(one for one in members if one != cat)], set(members), fraction=2 / 3)
    patience, entered = peer.terms.patience, 1.0

    def promises_to(sender, term, now):
        peer.on_message(sender, Prepare(5, 0, Ballot(term, sender)), bytes(64), now)
        return peer.acceptor.promised == Ballot(term, sender)

    peer.announce(ready(), 0.0)
    assert promises_to(dan, 2, 0.0), "no member has precedence in the first view"
    for sender in (ben, cat, dan):
        peer.on_message(sender, ViewChange(5, 0, 2, Ballot(2, dan)), bytes(64), entered)
    late = entered + 3.9 * patience
    assert not any(promises_to(sender, 5, at) for sender in (cat, dan) for at in (entered, entered + patience, late))
    assert promises_to(ben, 3, late)
    assert not promises_to(dan, 6, late + 9.0 * patience), "the view lasts until a quorum asks for the next one"
    peer.on_link_down(ben, late + 9.0 * patience)
    assert promises_to(dan, 7, late + 9.0 * patience)
