"""Founding of a lineage: the peers that see each other agree on exactly who continues."""

from __future__ import annotations

import itertools
import random

import pytest
from thinwire.swarm.lineage import proved
from thinwire.swarm.lineage_founding import Founding
from thinwire.swarm.messages.registry import LIFE, Found

IDS = tuple(bytes([number]) * 32 for number in range(6))
ANN, BEN, CAT, DAN, EVE, FAY = IDS
BASE = b"b" * 32
SETTLE = 2.0


def sign(peer, message):
    return repr((peer, message)).encode()


def key_of(peer):
    return peer[::-1]


def token_of(peer):
    return b"token of " + peer


def admits(peer, token):
    return token == token_of(peer)


def founding(me, base, before):
    return Founding(me, 7, 0, base, before, life(me), lambda message: sign(me, message), key_of, token_of)


class Group:
    """Peers that found a lineage. `links`: pairs that see each other. `silent`: peers that state nothing."""

    def __init__(self, peers, *, before=IDS, links=None, silent=(), bases=None, seed=0):
        self.peers = [peer for peer in peers if peer not in silent]
        pairs = itertools.combinations(peers, 2) if links is None else links
        self.links = {frozenset(pair) for pair in pairs}
        self.rng, self.now, self.bag = random.Random(seed), 0.0, []
        self.begun = {}
        """Forks of the peers that have begun a lineage."""
        self.parts = {me: founding(me, (bases or {}).get(me, BASE), before) for me in self.peers}

    def live(self, me):
        return {peer for pair in self.links if me in pair for peer in pair if peer != me}

    def step(self, me):
        """Let a peer state the founders that it sees, unless its lineage has begun."""
        if me in self.begun:
            return
        if (found := self.parts[me].update(self.now, self.live(me), (), SETTLE)) is not None:
            self.bag += [(me, to, found) for to in self.live(me) if to in self.parts]
        if (fork := self.parts[me].fork) is not None:
            self.begun[me] = fork

    def run(self, seconds=3 * SETTLE):
        """Let time pass; messages arrive late and in any order, but those of one peer to another in theirs."""
        until = self.now + seconds
        while self.now < until or self.bag:
            if self.now < until:
                self.step(self.rng.choice(self.peers))
            for _ in range(self.rng.randrange(3)):
                links = sorted({entry[:2] for entry in self.bag})
                if links:
                    link = self.rng.choice(links)
                    place = next(at for at, entry in enumerate(self.bag) if entry[:2] == link)
                    sender, to, message = self.bag.pop(place)
                    self.parts[to].on_message(sender, message, sign(sender, message))
            self.now += SETTLE / 20
        for _ in range(5):
            for me in self.peers:
                self.step(me)
            while self.bag:
                sender, to, message = self.bag.pop(0)
                self.parts[to].on_message(sender, message, sign(sender, message))
        return {me: self.begun.get(me) for me in self.peers}


def life(peer):
    return peer[:LIFE]


def groups(forks):
    return sorted({fork.members for fork in forks.values() if fork is not None})


def verify(peer, message, signature):
    return signature == sign(peer, message)


@pytest.mark.parametrize("seed", range(10))
def test_peers_that_see_each_other_found_one_lineage(seed):
    forks = Group((ANN, BEN, EVE), seed=seed).run()
    fork = forks[ANN]
    assert forks == dict.fromkeys((ANN, BEN, EVE), fork) and proved(fork, 0, verify, admits)
    assert fork.keys == tuple(map(key_of, fork.members))
    assert (fork.round, fork.base, fork.before, fork.members) == (7, BASE, IDS, (ANN, BEN, EVE))
    assert fork.lives == life(ANN) + life(BEN) + life(EVE)


def test_peer_that_sees_nobody_founds_a_lineage_alone_at_once():
    group = Group((ANN,))
    group.step(ANN)
    assert group.parts[ANN].fork.members == (ANN,)


def test_founders_need_not_be_members_of_the_parent():
    assert groups(Group((EVE, FAY), before=(ANN, EVE)).run()) == [(EVE, FAY)]


def test_founders_without_a_member_learn_of_each_other_before_they_begin():
    """None of them names others before it has their statements, so each would found a lineage alone."""
    peers, live = (CAT, DAN, EVE, FAY), {CAT, DAN, EVE, FAY}
    parts = {me: founding(me, BASE, (ANN,)) for me in peers}
    for tick in range(5):
        said = {me: part.update(tick * SETTLE / 4, live - {me}, (), SETTLE) for me, part in parts.items()}
        assert tick == 4 or not any(part.fork for part in parts.values())
        for me, found in said.items():
            for part in parts.values():
                if found is not None:
                    part.on_message(me, found, sign(me, found))
    assert groups({me: part.fork for me, part in parts.items()}) == [peers]


def test_lone_founder_that_is_no_member_begins_after_the_settle_time():
    group = Group((CAT,), before=(ANN,))
    group.step(CAT)
    assert group.parts[CAT].fork is None
    assert groups(group.run()) == [(CAT,)]


def test_lineage_begins_only_when_all_founders_have_stated_the_same():
    one = founding(ANN, BASE, IDS)
    assert one.fork is None
    one.update(0.0, {BEN, CAT}, (), SETTLE)
    for peer, members, complete in (
        (BEN, (ANN, BEN, CAT), False),
        (CAT, (ANN, CAT), False),
        (CAT, (ANN, BEN, CAT, DAN), False),
        (CAT, (ANN, BEN, CAT), True),
        (BEN, (ANN, BEN), False),
    ):
        assert one.on_message(peer, Found(7, 0, BASE, members, life(peer)), b"s")
        assert (one.fork is not None) == complete


def test_statement_is_repeated_only_if_it_changes():
    one = founding(ANN, BASE, (ANN, BEN))
    assert one.update(0.0, {BEN}, (), SETTLE) == Found(7, 0, BASE, (ANN, BEN), life(ANN))
    assert one.update(0.1, {BEN}, (), SETTLE) is None
    assert one.update(0.2, {BEN, CAT}, (), SETTLE) is None, "no member, and has stated nothing"
    one.on_message(CAT, Found(7, 0, BASE, (CAT,), life(CAT)), b"s")
    assert one.update(0.3, {BEN, CAT}, (), SETTLE) == Found(7, 0, BASE, (ANN, BEN, CAT), life(ANN))


@pytest.mark.parametrize("seed", range(10))
def test_silent_member_is_dropped_after_the_settle_time(seed):
    group = Group((ANN, BEN, CAT), silent=(CAT,), seed=seed)
    group.run(0.8 * SETTLE)
    forks = {me: part.fork for me, part in group.parts.items()}
    assert not groups(forks), "it is waited for"
    assert groups(group.run()) == [(ANN, BEN)]


def test_member_that_is_known_to_be_silent_is_not_waited_for():
    one = founding(ANN, BASE, (ANN, BEN))
    assert one.update(0.0, {BEN}, {BEN}, SETTLE).members == (ANN,)


@pytest.mark.parametrize("seed", range(10))
def test_peer_with_another_base_is_not_counted(seed):
    forks = Group((ANN, BEN, CAT), bases={CAT: b"c" * 32}, seed=seed).run()
    assert groups(forks) == [(ANN, BEN), (CAT,)]


@pytest.mark.parametrize(
    "message",
    [
        Found(6, 0, BASE, (ANN, BEN), life(BEN)),
        Found(7, 1, BASE, (ANN, BEN), life(BEN)),
        Found(7, 0, b"c" * 32, (ANN, BEN), life(BEN)),
        Found(7, 0, BASE, (ANN,), life(BEN)),
        Found(7, 0, BASE, (ANN, BEN), b"short"),
    ],
    ids=["round", "fragment", "base", "not in its own list", "life"],
)
def test_statement_about_something_else_is_ignored(message):
    one = founding(ANN, BASE, IDS)
    assert not one.on_message(BEN, message, b"s") and not one.stated


@pytest.mark.parametrize("seed", range(30))
def test_non_transitive_visibility_converges_to_disjoint_groups(seed):
    """A chain of links: a peer founds a lineage with peers that all see each other."""
    forks = Group(IDS[:5], links=list(itertools.pairwise(IDS[:5])), seed=seed).run(20 * SETTLE)
    found = groups(forks)
    assert all(len(members) <= 2 for members in found)
    assert sum(map(len, found)) == len(set(itertools.chain(*found))), "no peer is in two of them"
    assert all(fork is None or me in fork.members for me, fork in forks.items())


@pytest.mark.parametrize("seed", range(30))
def test_random_visibility_gives_groups_that_see_each_other_and_leaves_nobody_out(seed):
    """Two groups may name the same peer: it stated the second one after others had begun the first. It is in one of them."""
    rng = random.Random(seed)
    links = [pair for pair in itertools.combinations(IDS, 2) if rng.random() < 0.6]
    group = Group(IDS, links=links, seed=seed)
    forks = group.run(20 * SETTLE)
    found = groups(forks)
    assert {peer for members in found for peer in members} == set(IDS)
    assert all(fork is None or me in fork.members for me, fork in forks.items())
    for members in found:
        assert all(pair in links for pair in itertools.combinations(members, 2))


@pytest.mark.parametrize("seed", range(5))
def test_peer_that_never_states_the_same_as_others_is_left_out(seed):
    """It names all the others, so each of them names it, but it also names a peer that does not exist."""
    group, other = Group((ANN, BEN, FAY), silent=(FAY,), seed=seed), b"x" * 32
    members = tuple(sorted((ANN, BEN, FAY, other)))
    for part in group.parts.values():
        part.on_message(FAY, Found(7, 0, BASE, members, life(FAY)), b"")
    group.run(2 * SETTLE)
    assert not group.begun
    found = group.run(8 * SETTLE)
    assert found[ANN] is not None and found[ANN] == found[BEN] and found[ANN].members == (ANN, BEN)
