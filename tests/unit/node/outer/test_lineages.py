"""Lineages of one peer: when it founds one, and to which one it gives way."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from kit.chains import certificate, sign, verify
from thinwire.collectives.consensus.chain import decode, encode, extended, founded, proven
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import RoundTerms
from thinwire.collectives.consensus.vote_store import MemoryVoteStore, VoteRecord
from thinwire.node.outer.lineages import PATIENCES, SETTLE, Lineages, continue_alone
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import verify_message
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.lineage import lineage_of, name_of_fork, newest_round, proved
from thinwire.swarm.messages.registry import (
    LIFE,
    Ballot,
    Era,
    Fork,
    Found,
    Head,
    Leave,
)

IDS = tuple(bytes([number]) * 32 for number in range(5))
ME, ANN, BEN, CAT, DAN = IDS
STRANGER = b"r" * 32
LAYOUT = b"l" * 32
PATIENCE, ORPHAN, ROUND = 2.0, 10.0, 3


def life(peer):
    return bytes([100 + peer[0]]) * LIFE


class Store(MemoryVoteStore):
    """Store of the life that a peer has in these tests. `full`: a save fails, and another life begins."""

    full = False

    def __init__(self, peer):
        super().__init__()
        self._lived = life(peer)

    @property
    def life(self):
        return self._lived

    def save(self, record):
        if self.full:
            self._lived = b"m" * LIFE
            raise OSError("no space left on device")
        super().save(record)


def lives(*peers):
    return b"".join(map(life, peers))


def step(replica, *voters, signer=None):
    """Make a round of a replica; all are members after it."""
    before = {peer: replica.known_lives.get(peer, bytes(LIFE)) for peer in replica.members}
    after = {peer: life(peer) for peer in IDS}
    proof = certificate(replica.round + 1, replica.lineage, before, voters or replica.members, after, signer=signer)
    replica.chain = extended(replica.chain, proof)
    replica.advance(IDS, lives(*IDS))


def replica_after(round, members=IDS):
    """Return a replica after rounds in which all of IDS were members."""
    replica = Replica(LAYOUT, np.zeros(10, np.float32), members)
    for _ in range(round):
        step(replica)
    return replica


class Scene:
    """Peer `me` after round ROUND, with links to `live`.

    `sent`: (peer, message); `told`: (peer, Head, chain); `events`: (name, fields).
    """

    def __init__(self, live=IDS, *, me=ME, orphan=ORPHAN, patience=PATIENCE, round=ROUND, founder=b""):
        self.now, self.sent, self.told, self.events, self.me, self.patience = 0.0, [], [], [], me, patience
        self.entered, self.waiting = True, 0
        self.replica, self.store, self.live = replica_after(round), Store(me), set(live) - {me}
        presence = SimpleNamespace(
            live=self.live,
            send_queue=SimpleNamespace(
                control=lambda to, message: self.sent.append((to, message)),
                bulk=lambda to, frame, later: self.told.append((to, frame.message, decode(frame.payload))),
                later=lambda to, kind, fragment: self.waiting,
            ),
            roster=SimpleNamespace(record=SimpleNamespace(peer_id=me)),
        )
        self.fly = self.next_round()
        self.lineages = Lineages(
            self.replica,
            presence,
            0,
            orphan=orphan,
            now=lambda: self.now,
            emit=lambda name, fields: self.events.append((name, fields)),
            sign=lambda message: sign(me, message),
            key_of=lambda peer: None,
            prove=partial(proven, fraction=0.5, verifier=lambda keys: verify),
            life=lambda: self.store.life,
            current=lambda: self.fly,
            entered=lambda: self.entered,
            founded=self.founded,
            founder=founder,
        )

    def next_round(self):
        replica = self.replica
        terms = RoundTerms(
            replica.round + 1,
            0,
            tuple(sorted(replica.members)),
            replica.digest,
            bytes(32),
            patience=self.patience,
            seniors=replica.members,
            lives=replica.known_lives,
            lineage=replica.lineage,
        )
        agreement = Agreement(
            self.me, terms, sign=lambda m: sign(self.me, m), verify=verify, live=set(self.live), store=self.store
        )
        return SimpleNamespace(agreement=agreement, complete=False, unobtainable=False, lacking=0, moved=self.now)

    def founded(self, fork):
        self.replica.found(fork)
        self.fly = self.next_round()
        self.lineages.advance()

    def lose(self, *peers):
        for peer in peers:
            self.live.discard(peer)
            self.fly.agreement.on_link_down(peer, self.now)
            self.lineages.on_link_down(peer)

    def link(self, *peers):
        for peer in peers:
            self.live.add(peer)
            self.fly.agreement.reach(peer)
            self.lineages.on_link_up(peer)

    def run(self, seconds):
        """Let time pass, with a tick every half second."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.5)
            self.lineages.on_tick()

    def take(self, kind):
        found = [(to, message) for to, message in self.sent if isinstance(message, kind)]
        self.sent = [entry for entry in self.sent if not isinstance(entry[1], kind)]
        return found

    def hear_found(self, peer, *members):
        message = Found(self.replica.round, 0, self.replica.digest, tuple(sorted(members)), life(peer))
        self.lineages.on_found(peer, message, sign(peer, message))

    def on_chain(self, peer, chain):
        """Deliver the Head of a peer with its chain, after the time in which its chains are not checked again."""
        self.now += PATIENCE
        self.lineages.on_head(peer, Head(newest_round(chain[-1]), 0, lineage_of(chain)), encode(chain))

    def chains(self):
        """Return (peer, chain) of the chains that were sent since the last call."""
        found, self.told = [(to, chain) for to, _, chain in self.told], []
        return found

    @property
    def forks(self):
        """Forks of the lineages after the first one."""
        return [era.fork for era in self.replica.chain[1:]]


OTHER = b"o" * 32
"""Digest of a state that no peer has."""

FIRST = replica_after(ROUND).chain
"""Chain of the first lineage, after ROUND."""


def branch(*members, chain=FIRST, round=ROUND, base=None, before=IDS):
    """Return the chain of a lineage that these peers founded after `round`."""
    members = tuple(sorted(members))
    base = replica_after(ROUND).digest if base is None else base
    signatures = tuple(sign(peer, Found(round, 0, base, members, life(peer))) for peer in members)
    return founded(chain, Fork(round, base, before, members, lives(*members), signatures))


def later_chain(*voters, signer=None, rounds=1):
    """Return the chain of the first lineage some rounds later, with the votes of these peers."""
    replica = replica_after(ROUND)
    for _ in range(rounds):
        step(replica, *voters, signer=signer)
    return replica.chain


# --- the timer


def test_peer_without_a_quorum_founds_a_lineage_after_the_orphan_time():
    scene = Scene(live=())
    scene.run(ORPHAN)
    assert scene.lineages.until == pytest.approx(0.5 + ORPHAN) and not scene.forks
    assert scene.store.record is None
    scene.run(1.0)
    (fork,) = scene.forks
    assert (fork.round, fork.members, fork.before) == (ROUND, (ME,), IDS) and proved(fork, 0, verify)
    assert scene.lineages.until is None, "it is a quorum of its lineage"
    assert [name for name, _ in scene.events] == ["lineage", "alarm"]
    assert scene.events[1][1]["detail"].startswith("1 of 5 members continue as lineage ")


def test_timer_is_reset_when_a_quorum_is_back():
    scene = Scene(live=(ANN, BEN))
    for _ in range(10):
        scene.lose(ANN, BEN)
        scene.run(0.9 * ORPHAN)
        assert scene.lineages.until is not None
        scene.link(ANN, BEN)
        scene.run(0.5)
        assert scene.lineages.until is None
    assert not scene.forks and scene.store.record is None


def test_timer_is_reset_by_a_commit():
    scene = Scene(live=())
    scene.run(0.9 * ORPHAN)
    step(scene.replica)
    scene.fly = scene.next_round()
    scene.lineages.advance()
    scene.run(0.9 * ORPHAN)
    assert not scene.forks and scene.lineages.until > scene.now


def test_peer_with_a_quorum_never_founds_a_lineage():
    scene = Scene(live=(ANN, BEN))
    scene.run(100 * ORPHAN)
    assert not scene.forks and not scene.take(Found) and scene.lineages.until is None


def test_peer_whose_results_are_unobtainable_founds_one_although_a_quorum_is_here():
    scene = Scene()
    scene.fly.unobtainable = True
    scene.run(ORPHAN + 1.0)
    assert {to for to, _ in scene.take(Found)} == set(IDS[1:]) and not scene.fly.agreement.witness


@pytest.mark.parametrize(
    ("orphan", "patience", "wait"), [(10.0, 2.0, 10.0), (1.0, 2.0, PATIENCES * 2.0), (0, 2.0, None)]
)
def test_orphan_time_is_at_least_three_patiences_and_zero_means_never(orphan, patience, wait):
    scene = Scene(live=(), orphan=orphan, patience=patience)
    scene.run(0.5)
    assert scene.lineages.until == (None if wait is None else 0.5 + wait)
    scene.run(1000.0)
    assert bool(scene.forks) == (wait is not None)


@pytest.mark.parametrize("orphan", [0, 1000.0])
def test_recover_founds_a_lineage_at_once(orphan):
    scene = Scene(live=(), orphan=orphan)
    scene.run(2.0)
    scene.lineages.recover()
    assert scene.lineages.until == scene.now
    scene.run(0.5)
    assert [fork.members for fork in scene.forks] == [(ME,)] and scene.lineages.until is None
    assert [name for name, _ in scene.events] == ["lineage", "alarm"]


def test_recover_with_a_quorum_has_no_effect_now_or_later():
    scene = Scene(live=(ANN, BEN), orphan=0)
    scene.run(1.0)
    scene.lineages.recover()
    scene.lose(ANN, BEN)
    scene.run(100.0)
    assert not scene.forks and scene.lineages.until is None


@pytest.mark.parametrize("how", ["quorum", "commit"])
def test_recover_has_no_effect_after_a_quorum_was_here_again(how):
    scene = Scene(live=(ANN,), orphan=0)
    scene.run(1.0)
    scene.lineages.recover()
    if how == "quorum":
        scene.link(BEN)
        scene.run(1.0)
        scene.lose(BEN)
    else:
        step(scene.replica)
        scene.fly = scene.next_round()
        scene.lineages.advance()
    scene.run(100.0)
    assert not scene.forks and not scene.take(Found)


@pytest.mark.parametrize("caller", [ANN, STRANGER])
def test_peer_that_waits_for_ever_joins_a_founding_that_a_member_has_begun(caller):
    scene = Scene(live=(caller,), orphan=0)
    scene.run(5.0)
    scene.hear_found(caller, ME, caller)
    scene.run(0.5)
    assert [fork.members for fork in scene.forks] == ([(ME, ANN)] if caller == ANN else [])


def test_founder_that_fetches_the_state_of_a_faster_one_reports_the_lineage_once():
    scene = Scene(live=(ANN,), orphan=0)
    scene.run(1.0)
    scene.lineages.recover()
    scene.run(0.5)
    assert scene.take(Found) and not scene.events
    fork = branch(ME, ANN)[-1].fork
    scene.replica.found(fork)
    scene.fly = scene.next_round()
    for _ in range(2):
        scene.lineages.advance()
    assert [name for name, _ in scene.events] == ["lineage", "alarm"]
    assert scene.events[0][1]["lineage"] == name_of_fork(fork).hex()


@pytest.mark.parametrize("why", ["no state", "complete", "diverged"])
def test_peer_with_nothing_to_continue_founds_no_lineage(why):
    scene = Scene(live=())
    if why == "no state":
        scene.replica.members = ()
    elif why == "complete":
        scene.fly.complete = True
    else:
        scene.fly.agreement.overtaken()
    scene.run(10 * ORPHAN)
    assert not scene.forks and not scene.take(Found)


def test_peer_whose_disk_is_full_founds_with_the_life_that_it_has_since():
    """Its former life may come back with the disk, without knowing that it has withdrawn."""
    scene = Scene(live=())
    scene.store.full = True
    scene.run(ORPHAN + 1.0)
    assert scene.store.life != life(ME) and scene.store.record is None
    assert scene.replica.known_lives == {ME: scene.store.life} and scene.fly.agreement.witness


def test_founder_is_muted_in_the_parent_lineage_and_votes_in_the_new_one():
    scene = Scene(live=())
    parent = scene.fly.agreement
    scene.run(ORPHAN + 1.0)
    assert not parent.witness and scene.fly.agreement.witness
    record = scene.store.record
    assert record.left and (record.lineage, record.round) == (lineage_of(FIRST), ROUND + 1)


# --- founding with others


def test_two_of_five_found_one_lineage_together():
    scenes = {me: Scene(live=(ME, ANN), me=me) for me in (ME, ANN)}
    for _ in range(60):
        for scene in scenes.values():
            scene.run(0.5)
        for me, scene in scenes.items():
            for to, message in scene.take(Found):
                scenes[to].lineages.on_found(me, message, sign(me, message))
            for to, message in scene.take(Head):
                scenes[to].lineages.on_head(me, message, b"")
            for to, chain in scene.chains():
                scenes[to].on_chain(me, chain)
    one, other = scenes[ME].replica, scenes[ANN].replica
    assert one.chain == other.chain and one.members == other.members == (ME, ANN) and one.digest == other.digest
    assert one.lives == life(ME) + life(ANN) and len(one.chain) == 2
    assert all(scene.fly.agreement.able for scene in scenes.values())


def test_silent_member_is_waited_for_during_the_settle_time_only():
    scene = Scene(live=(ANN, BEN))
    scene.lose(BEN)
    scene.run(ORPHAN + 0.5)
    assert [message.members for _, message in scene.take(Found)] == [(ME, ANN)]
    scene.run(SETTLE * PATIENCE - 0.5)
    assert not scene.forks
    scene.run(1.0)
    assert scene.replica.members == (ME,)


def test_founder_of_another_lineage_has_no_vote_in_our_round():
    scene = Scene()
    assert scene.fly.agreement.able
    for peer in (ANN, BEN):
        scene.hear_found(peer, ANN, BEN)
    assert set(scene.fly.agreement.silent) == {ANN, BEN} and scene.fly.agreement.able
    scene.hear_found(CAT, CAT)
    assert not scene.fly.agreement.able


def test_statement_about_another_state_changes_nothing():
    scene = Scene()
    message = Found(ROUND, 0, OTHER, (ANN, BEN), life(ANN))
    scene.lineages.on_found(ANN, message, sign(ANN, message))
    assert not scene.fly.agreement.silent


# --- lineages that meet


def test_linked_peer_learns_the_name_of_our_lineage_and_the_chain_if_it_has_another():
    scene = Scene(live=())
    scene.link(ANN)
    assert scene.take(Head) == [(ANN, Head(ROUND, 0, lineage_of(FIRST)))] and not scene.chains()
    for round, name, answered in (
        (ROUND, lineage_of(FIRST), False),
        (ROUND + 1, lineage_of(FIRST), False),
        (ROUND - 1, lineage_of(FIRST), True),
        (ROUND, b"x" * LIFE, True),
    ):
        scene.lineages.on_head(ANN, Head(round, 0, name), b"")
        assert scene.chains() == [(ANN, FIRST)] * answered


def test_peer_without_a_state_announces_no_lineage_and_follows_none():
    scene = Scene(live=(), round=0)
    scene.replica.chain = ()
    scene.link(ANN)
    scene.lineages.on_head(ANN, Head(9, 0, b"x" * LIFE), b"")
    scene.on_chain(ANN, FIRST)
    assert not scene.take(Head) and not scene.chains()
    assert not scene.lineages.prevailing() and not scene.lineages.ahead()


def test_founded_lineage_is_announced_to_all():
    scene = Scene(live=())
    scene.link(ANN)
    scene.take(Head)
    scene.lose(ANN)
    scene.run(ORPHAN + 1.0)
    scene.link(BEN)
    assert scene.take(Head) == [(BEN, Head(ROUND, 0, scene.replica.lineage))]


def test_peer_that_proves_a_later_round_is_ahead():
    scene = Scene()
    scene.on_chain(ANN, FIRST)
    assert not scene.lineages.ahead() and not scene.chains()
    scene.on_chain(ANN, later_chain(ANN, BEN, CAT))
    assert list(scene.lineages.ahead()) == [ANN] and not scene.lineages.prevailing()
    scene.on_chain(BEN, later_chain(ANN, BEN, CAT, rounds=2))
    assert sorted(scene.lineages.ahead()) == [ANN, BEN]
    scene.lose(ANN)
    assert list(scene.lineages.ahead()) == [BEN]
    for _ in range(2):
        step(scene.replica)
        scene.lineages.advance()
    assert not scene.lineages.ahead()


def test_older_chain_is_answered_with_ours():
    scene = Scene()
    scene.on_chain(ANN, replica_after(ROUND - 1).chain)
    assert scene.chains() == [(ANN, FIRST)] and not scene.lineages.ahead()


def test_chains_of_one_peer_are_checked_now_and_then():
    scene = Scene()
    chain = later_chain(ANN, BEN, CAT)
    scene.on_chain(ANN, FIRST)
    scene.lineages.on_head(ANN, Head(ROUND + 1, 0, lineage_of(chain)), encode(chain))
    assert not scene.lineages.ahead()
    scene.on_chain(ANN, chain)
    assert list(scene.lineages.ahead()) == [ANN]


def test_peer_with_a_quorum_does_not_give_way_to_a_lineage_founded_in_its_own():
    scene = Scene(live=(ANN, BEN))
    scene.link(CAT)
    scene.on_chain(CAT, branch(CAT, DAN))
    scene.on_chain(DAN, branch(CAT, DAN))
    assert not scene.lineages.prevailing()


def test_peer_without_a_quorum_takes_up_a_lineage_founded_with_its_state():
    scene = Scene(live=(CAT,))
    scene.run(1.0)
    scene.on_chain(CAT, branch(CAT, DAN))
    assert not scene.forks, "not before the next tick, because a commit may be in progress"
    scene.run(0.5)
    assert scene.replica.chain == branch(CAT, DAN) and scene.replica.members == (CAT, DAN)
    assert not scene.lineages.prevailing(), "it is ours now"


def test_peer_of_a_lineage_gives_way_to_a_prevailing_one_although_it_has_a_quorum():
    scene = Scene(live=())
    scene.run(ORPHAN + 1.0)
    assert scene.fly.agreement.able
    scene.link(ANN, BEN, CAT)
    for peer in (ANN, BEN):
        scene.on_chain(peer, branch(ANN, BEN))
    assert sorted(scene.lineages.prevailing()) == [ANN, BEN], "two of the five members"
    scene.on_chain(CAT, later_chain(CAT, DAN, ANN))
    assert list(scene.lineages.prevailing()) == [CAT], "the parent lineage has continued with a quorum"


@pytest.mark.parametrize(
    "chain",
    [
        FIRST,
        later_chain(CAT, DAN),
        later_chain(ANN, BEN, CAT, signer=CAT),
        later_chain(ANN, BEN, CAT)[:-1],
        (*FIRST[:-1], Era(FIRST[-1].fork, (later_chain(ANN, BEN, CAT)[-1].certificates[-1],) * 2)),
    ],
    ids=["of the parent's round", "two of five", "forged", "empty", "twice"],
)
def test_parent_lineage_that_does_not_prove_its_rounds_is_ignored(chain):
    scene = Scene(live=())
    scene.run(ORPHAN + 1.0)
    scene.link(CAT)
    scene.now += PATIENCE
    scene.lineages.on_head(CAT, Head(ROUND + 1000, 0, lineage_of(FIRST)), encode(chain))
    assert not scene.lineages.prevailing() and not scene.lineages.ahead()


@pytest.mark.parametrize(
    "chain",
    [
        branch(CAT, before=(CAT,)),
        branch(CAT, round=ROUND + 9),
        branch(CAT, round=ROUND - 1),
        branch(CAT, DAN, chain=()),
    ],
    ids=["members", "later round", "earlier round", "another run"],
)
@pytest.mark.parametrize("founds", [False, True])
def test_lineage_that_does_not_continue_what_its_chain_proves_is_ignored(chain, founds):
    """One peer can sign any fork; round and members count only as its chain proves them."""
    scene = Scene(live=())
    scene.run(ORPHAN + 1.0 if founds else 1.0)
    scene.link(CAT)
    scene.on_chain(CAT, chain)
    assert not scene.lineages.prevailing()


@pytest.mark.parametrize("since", [0.0, 1.0, ORPHAN + 1.0])
def test_member_does_not_give_way_to_a_lineage_of_strangers(since):
    """Otherwise any peer that has seen the state could take over a member that is cut off."""
    scene = Scene(live=())
    scene.run(since)
    scene.link(CAT)
    scene.on_chain(CAT, branch(STRANGER, before=IDS))
    assert not scene.lineages.prevailing()


def test_peer_that_is_no_member_gives_way_to_a_lineage_of_strangers():
    scene = Scene(live=(), me=STRANGER)
    scene.run(1.0)
    scene.link(CAT)
    scene.on_chain(CAT, branch(b"s" * 32, before=IDS))
    assert list(scene.lineages.prevailing()) == [CAT]


@pytest.mark.parametrize(("round", "gives_way"), [(ROUND, False), (0, True)])
def test_returning_member_gives_way_to_strangers_only_if_its_run_has_no_round(round, gives_way):
    """They had the state of the founder, which died before the first round."""
    scene = Scene(live=(CAT,), round=round)
    scene.entered = False
    base = scene.replica.digest
    scene.on_chain(
        CAT, branch(STRANGER, chain=scene.replica.chain, round=round, base=base, before=scene.replica.members)
    )
    assert bool(scene.lineages.prevailing()) == gives_way


def test_newest_known_round_of_our_lineage_counts_against_others():
    """A lineage founded before that round does not prevail, although we are not there yet."""
    scene = Scene(live=(CAT, DAN))
    scene.run(1.0)
    scene.on_chain(CAT, later_chain(ANN, BEN, CAT))
    scene.on_chain(DAN, branch(DAN))
    assert list(scene.lineages.ahead()) == [CAT] and not scene.lineages.prevailing()


def test_only_a_lineage_that_begins_with_our_state_is_adopted_at_once():
    """A later fork of it may name our digest, too; it is not ours to continue."""
    scene = Scene(live=())
    scene.run(1.0)
    chain = branch(ANN)
    again = branch(CAT, chain=chain, before=(ANN,), base=scene.replica.digest)
    scene.link(CAT)
    scene.on_chain(CAT, again)
    scene.run(0.5)
    assert scene.replica.members == IDS


def test_chain_is_sent_once_while_one_waits_for_the_peer():
    """A peer that asks again and again costs no memory."""
    scene = Scene(live=(CAT,))
    scene.lineages.on_head(CAT, Head(0, 0, scene.replica.lineage), b"")
    scene.waiting = 1
    for _ in range(5):
        scene.lineages.on_head(CAT, Head(0, 0, scene.replica.lineage), b"")
    assert len(scene.told) == 1


def test_chain_that_came_too_early_is_asked_for_again():
    scene = Scene(live=(CAT,))
    scene.run(1.0)
    chain = branch(CAT, DAN)
    scene.on_chain(CAT, later_chain(ANN, BEN, CAT))
    scene.lineages.on_head(CAT, Head(ROUND, 0, lineage_of(chain)), encode(chain))
    assert not scene.lineages.prevailing()
    scene.take(Head)
    scene.run(PATIENCE)
    assert [to for to, _ in scene.take(Head)] == [CAT]


@pytest.mark.parametrize("garbage", [b"\0", b"\x91", bytes(1000), encode(FIRST)[:-1]])
def test_garbage_instead_of_a_chain_is_ignored(garbage):
    scene = Scene(live=(CAT,))
    scene.run(1.0)
    scene.on_chain(CAT, branch(CAT, DAN))
    scene.now += PATIENCE
    scene.lineages.on_head(CAT, Head(ROUND, 0, lineage_of(branch(CAT, DAN))), garbage)
    assert list(scene.lineages.prevailing()) == [CAT], "the last valid chain counts"


def test_run_founded_again_by_its_founder_is_trusted_and_by_another_peer_is_not():
    def begun(peer, life):
        found = Found(0, 0, OTHER, (peer,), life)
        return founded((), Fork(0, OTHER, (), (peer,), life, (sign(peer, found),)))

    young, old = b"\2" * LIFE, b"\1" * LIFE
    scene = Scene(live=(CAT, DAN), round=0)
    scene.replica.chain = begun(CAT, young)
    for peer, chain, given_way in ((DAN, begun(DAN, old), False), (CAT, begun(CAT, old), True)):
        scene.on_chain(peer, chain)
        assert bool(scene.lineages.prevailing()) == given_way
    scene.replica.chain = begun(CAT, old)
    scene.on_chain(CAT, begun(CAT, young))
    assert not scene.lineages.prevailing(), "the older one counts"


@pytest.mark.parametrize(("founder", "trusts"), [(b"", True), (CAT, True), (DAN, False)])
def test_peer_without_a_state_trusts_a_run_that_the_author_of_its_manifest_began(founder, trusts):
    scene = Scene(founder=founder, round=0)
    scene.replica.chain = ()
    assert scene.lineages.trusted(Fork(0, OTHER, (), (CAT,), life(CAT), ())) == trusts


@pytest.mark.parametrize(
    "fork", [Fork(0, OTHER, (), (CAT,), b"", ()), Fork(0, OTHER, (), (CAT, DAN), life(CAT) + life(DAN), ())]
)
def test_peer_without_a_state_trusts_no_beginning_without_a_life_or_with_a_second_founder(fork):
    scene = Scene(founder=CAT, round=0)
    scene.replica.chain = ()
    assert not scene.lineages.trusted(fork)


def test_peer_tells_and_proves_to_peers_of_weaker_lineages_that_its_own_has_continued():
    scene = Scene(live=(ANN, BEN))
    scene.lineages.advance()
    for round in (ROUND + 1, ROUND + 2):
        step(scene.replica, ME, ANN, BEN)
        scene.lineages.advance()
        if round == ROUND + 1:
            scene.link(DAN)
            scene.on_chain(DAN, branch(DAN))
            assert scene.chains() == [(DAN, scene.replica.chain)]
        else:
            assert (DAN, Head(round, 0, scene.replica.lineage)) in scene.take(Head), "it is told of each round"
        assert not scene.lineages.prevailing()


def test_peer_that_has_not_continued_tells_a_descendant_nothing():
    scene = Scene(live=(ANN, BEN))
    scene.on_chain(DAN, branch(DAN))
    assert not scene.chains()


@pytest.mark.parametrize(
    "forged",
    [
        lambda fork: msgspec.structs.replace(fork, round=fork.round + 5),
        lambda fork: msgspec.structs.replace(fork, base=b"x" * 32),
        lambda fork: msgspec.structs.replace(fork, signatures=fork.signatures[::-1]),
        lambda fork: msgspec.structs.replace(fork, members=(ANN, CAT)),
    ],
)
def test_lineage_without_proof_is_ignored(forged):
    scene = Scene(live=(ANN,))
    scene.run(1.0)
    honest = branch(ANN, BEN)
    scene.on_chain(ANN, (*honest[:-1], Era(forged(honest[-1].fork))))
    assert not scene.lineages.prevailing() and not scene.chains()
    scene.run(1.0)
    assert not scene.forks
    scene.on_chain(ANN, honest)
    scene.run(0.5)
    assert scene.replica.chain == honest


def test_linked_member_in_another_lineage_has_no_vote_in_ours():
    """Links alone are no quorum: two of five with a link to a third one found a lineage, or join that of the third."""
    scene = Scene(live=(ANN, CAT))
    parent = scene.fly.agreement
    assert parent.able
    scene.on_chain(CAT, branch(CAT))
    scene.run(0.5)
    assert not parent.able and scene.replica.members == (CAT,)


def test_peer_with_a_commit_founds_no_lineage_while_its_results_can_be_had():
    scene = Scene(live=())
    scene.fly.agreement.commit = later_chain(ANN, BEN, CAT)[-1].certificates[-1].commit
    for left in range(20, 0, -1):
        scene.fly.lacking = left
        scene.run(PATIENCE)
    assert not scene.forks
    scene.run(ORPHAN + PATIENCES * PATIENCE)
    assert scene.forks, "nothing arrives any more"


def test_peer_founds_one_if_the_voters_for_the_results_of_its_round_do_not_send_them():
    """They have restarted: they are reachable, but have lost the results that they voted for."""
    scene = Scene(live=(ANN, BEN))
    scene.fly.lacking = 1
    scene.run(PATIENCES * PATIENCE - 0.5)
    assert scene.lineages.since is None
    scene.run(1.5)
    assert scene.lineages.since == 0.5, "from the beginning: no round could commit"
    scene.run(ORPHAN)
    assert scene.take(Found)


# --- alone


KEY = Identity.generate(b"k" * 32)
RUN = b"r" * 32


def check(peer, message, signature):
    return verify_message(message, signature, KEY.public_key, RUN)


def alone(replica, votes=None):
    return continue_alone(replica, 0, votes or MemoryVoteStore(random.Random(1)), KEY, RUN)


def test_founder_of_a_run_founds_its_first_lineage():
    replica, votes = Replica(LAYOUT, np.zeros(10, np.float32), ()), MemoryVoteStore(random.Random(1))
    base = replica.digest
    assert alone(replica, votes) is None, "nothing to report"
    fork = Fork(0, base, (), (KEY.peer_id,), votes.life, replica.chain[0].fork.signatures, (KEY.public_key,))
    assert replica.chain == (Era(fork),) and replica.lineage == name_of_fork(fork) and proved(fork, 0, check)
    assert replica.members == (KEY.peer_id,) and replica.known_lives == {KEY.peer_id: votes.life}


def test_peer_that_continues_alone_founds_a_lineage_that_others_can_check():
    replica, votes = replica_after(ROUND), MemoryVoteStore(random.Random(1))
    base = replica.digest
    fork = alone(replica, votes)
    assert (fork.round, fork.base, fork.before, fork.members) == (ROUND, base, IDS, (KEY.peer_id,))
    assert fork.lives == votes.life and replica.chain == (*FIRST, Era(fork)) and replica.digest != base
    assert fork.keys == (KEY.public_key,) and proved(fork, 0, check) and not proved(fork, 1, check)


def sole(votes):
    replica = Replica(LAYOUT, np.zeros(10, np.float32), (KEY.peer_id,))
    before, after = {KEY.peer_id: bytes(LIFE)}, {KEY.peer_id: votes.life}
    replica.chain = extended(replica.chain, certificate(1, replica.lineage, before, before, after))
    replica.advance((KEY.peer_id,), votes.life)
    return replica


def test_only_member_continues_in_its_lineage():
    votes = MemoryVoteStore(random.Random(1))
    assert alone(sole(votes), votes) is None


def test_only_member_that_has_lost_its_votes_founds_a_lineage():
    votes = MemoryVoteStore(random.Random(1))
    replica = sole(votes)
    votes.renew()
    assert alone(replica, votes) is not None and replica.known_lives == {KEY.peer_id: votes.life}


@pytest.mark.parametrize(("round", "founds"), [(1, False), (2, False), (3, True)])
def test_only_member_that_returns_with_an_older_state_founds_a_lineage(round, founds):
    """It may have told others of the rounds that it has lost; their digests would not be those of its next rounds."""
    votes = MemoryVoteStore(random.Random(1))
    replica = sole(votes)
    votes.save(VoteRecord(replica.lineage, round, Ballot(1, KEY.peer_id), None, None))
    assert (alone(replica, votes) is not None) == founds


def test_farewell_is_no_part_of_founding():
    """A founder withdraws silently: its farewell would let a quorum of the others shrink."""
    scene = Scene(live=(ANN,))
    scene.run(ORPHAN + 5.0)
    assert not scene.take(Leave) and not [m for _, m in scene.fly.agreement.take() if isinstance(m, Leave)]
