"""Lineages of one peer: when it founds one, and to which one it gives way."""

from __future__ import annotations

import random
from types import SimpleNamespace

import blake3
import msgspec
import numpy as np
import pytest
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import RoundTerms, name_of
from thinwire.collectives.consensus.vote_store import MemoryVoteStore, VoteRecord
from thinwire.node.outer.lineages import PATIENCES, SETTLE, Lineages, continue_alone
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import verify_message
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.lineage import lineage_of, name_of_fork, proved
from thinwire.swarm.messages.registry import (
    LIFE,
    Ballot,
    Commit,
    Contribution,
    Fork,
    Found,
    Head,
    Leave,
    Open,
    Proof,
    Vote,
)

IDS = tuple(bytes([number]) * 32 for number in range(5))
ME, ANN, BEN, CAT, DAN = IDS
STRANGER = b"r" * 32
LAYOUT = b"l" * 32
PATIENCE, ORPHAN, ROUND = 2.0, 10.0, 3


def sign(peer, message):
    return blake3.blake3(peer + type(message).__name__.encode() + msgspec.msgpack.encode(message)).digest(64)


def verify(peer, message, signature):
    return signature == sign(peer, message)


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


def replica_after(round, members=IDS):
    replica = Replica(LAYOUT, np.zeros(10, np.float32), members)
    for _ in range(round):
        replica.advance(members, b"".join(map(life, members)))
    return replica


class Scene:
    """Peer `me` after round ROUND, with links to `live`. `sent`: (peer, message); `events`: (name, fields)."""

    def __init__(self, live=IDS, *, me=ME, orphan=ORPHAN, patience=PATIENCE, round=ROUND):
        self.now, self.sent, self.events, self.me, self.patience = 0.0, [], [], me, patience
        self.replica, self.store, self.live = replica_after(round), Store(me), set(live) - {me}
        presence = SimpleNamespace(
            live=self.live,
            send_queue=SimpleNamespace(control=lambda to, message: self.sent.append((to, message))),
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
            verify=verify,
            life=lambda: self.store.life,
            current=lambda: self.fly,
            founded=self.founded,
            proof=lambda after, lineage: self.proofs.get((after, lineage)),
        )
        self.proofs = {}

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
            lineage=lineage_of(replica.forks),
        )
        agreement = Agreement(
            self.me, terms, sign=lambda m: sign(self.me, m), verify=verify, live=set(self.live), store=self.store
        )
        return SimpleNamespace(agreement=agreement, complete=False, unobtainable=False, moved=self.now)

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
            self.fly.agreement.reach(peer, self.now)
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

    @property
    def names(self):
        return [name_of_fork(fork) for fork in self.replica.forks]


def head(*members, round=ROUND, at=None, base=None, before=IDS, forks=()):
    """Return the head of a lineage that these peers founded after `round`, and that is now at round `at`."""
    members = tuple(sorted(members))
    base = replica_after(ROUND).digest if base is None else base
    signatures = tuple(sign(peer, Found(round, 0, base, members, life(peer))) for peer in members)
    fork = Fork(round, base, before, members, b"".join(map(life, members)), signatures)
    return Head(round if at is None else at, 0, (*forks, fork))


OTHER = b"o" * 32
"""Digest of a state that no peer has."""


def commit(round, *voters, signer=None):
    """Return the commit of a round of the first lineage, with the votes of these peers."""
    voters = tuple(sorted(voters))
    opened = Open(round, 0, Ballot(1, voters[0]), voters, voters, (Contribution(voters[0], 1, 1),), (), None, ())
    vote = Vote(round, 0, opened.ballot, name_of(opened), OTHER)
    return Commit(opened, OTHER, tuple(Proof(peer, sign(signer or peer, vote)) for peer in voters))


# --- the timer


def test_peer_without_a_quorum_founds_a_lineage_after_the_orphan_time():
    scene = Scene(live=())
    scene.run(ORPHAN)
    assert scene.lineages.until == pytest.approx(0.5 + ORPHAN) and not scene.replica.forks
    assert scene.store.record is None
    scene.run(1.0)
    (fork,) = scene.replica.forks
    assert (fork.round, fork.members, fork.before) == (ROUND, (ME,), IDS) and proved((fork,), 0, verify)
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
    assert not scene.replica.forks and scene.store.record is None


def test_timer_is_reset_by_a_commit():
    scene = Scene(live=())
    scene.run(0.9 * ORPHAN)
    scene.replica.advance(IDS, b"".join(map(life, IDS)))
    scene.fly = scene.next_round()
    scene.lineages.advance()
    scene.run(0.9 * ORPHAN)
    assert not scene.replica.forks and scene.lineages.until > scene.now


def test_peer_with_a_quorum_never_founds_a_lineage():
    scene = Scene(live=(ANN, BEN))
    scene.run(100 * ORPHAN)
    assert not scene.replica.forks and not scene.take(Found) and scene.lineages.until is None


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
    assert bool(scene.replica.forks) == (wait is not None)


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
    assert not scene.replica.forks and not scene.take(Found)


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
    assert record.left and (record.lineage, record.round) == (b"", ROUND + 1)


# --- founding with others


def test_two_of_five_found_one_lineage_together():
    scenes = {me: Scene(live=(ME, ANN), me=me) for me in (ME, ANN)}
    for _ in range(60):
        for scene in scenes.values():
            scene.run(0.5)
        for me, scene in scenes.items():
            for to, message in scene.take((Found, Head)):
                other = scenes[to].lineages
                if isinstance(message, Found):
                    other.on_found(me, message, sign(me, message))
                else:
                    other.on_head(me, message)
    one, other = scenes[ME].replica, scenes[ANN].replica
    assert one.forks == other.forks and one.members == other.members == (ME, ANN) and one.digest == other.digest
    assert one.lives == life(ME) + life(ANN) and len(one.forks) == 1
    assert all(scene.fly.agreement.able for scene in scenes.values())


def test_silent_member_is_waited_for_during_the_settle_time_only():
    scene = Scene(live=(ANN, BEN))
    scene.lose(BEN)
    scene.run(ORPHAN + 0.5)
    assert [message.members for _, message in scene.take(Found)] == [(ME, ANN)]
    scene.run(SETTLE * PATIENCE - 0.5)
    assert not scene.replica.forks
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


def test_first_lineage_is_not_announced_and_another_one_is():
    scene = Scene(live=())
    scene.link(ANN)
    assert not scene.take(Head)
    scene.lose(ANN)
    scene.run(ORPHAN + 1.0)
    scene.link(BEN)
    assert scene.take(Head) == [(BEN, Head(ROUND, 0, scene.replica.forks))]


def test_peer_with_a_quorum_does_not_give_way_to_a_lineage_founded_in_its_own():
    scene = Scene(live=(ANN, BEN))
    scene.link(CAT)
    scene.lineages.on_head(CAT, head(CAT, DAN))
    scene.lineages.on_head(DAN, head(CAT, DAN))
    assert not scene.lineages.prevailing()


def test_peer_without_a_quorum_takes_up_a_lineage_founded_with_its_state():
    scene = Scene(live=(CAT,))
    scene.run(1.0)
    scene.lineages.on_head(CAT, head(CAT, DAN))
    scene.run(0.5)
    assert scene.replica.members == (CAT, DAN) and not scene.lineages.prevailing()


def test_peer_of_a_lineage_gives_way_to_a_prevailing_one_although_it_has_a_quorum():
    scene = Scene(live=())
    scene.run(ORPHAN + 1.0)
    assert scene.fly.agreement.able
    scene.link(ANN, BEN, CAT)
    for peer in (ANN, BEN):
        scene.lineages.on_head(peer, head(ANN, BEN))
    assert sorted(scene.lineages.prevailing()) == [ANN, BEN], "two of the five members"
    scene.lineages.on_head(CAT, Head(ROUND + 1, 0, (), commit(ROUND + 1, CAT, DAN, ANN)))
    assert list(scene.lineages.prevailing()) == [CAT], "the parent lineage has continued with a quorum"


@pytest.mark.parametrize(
    "proof",
    [
        commit(ROUND, ANN, BEN, CAT),
        commit(ROUND + 1, CAT, DAN),
        commit(ROUND + 1, ANN, BEN, CAT, signer=CAT),
        commit(ROUND + 1, *(bytes([200 + n]) * 32 for n in range(5))),
    ],
    ids=["of the parent's round", "two of five", "forged", "of strangers"],
)
def test_parent_lineage_that_does_not_prove_its_rounds_is_ignored(proof):
    scene = Scene(live=())
    scene.run(ORPHAN + 1.0)
    scene.link(CAT)
    scene.lineages.on_head(CAT, Head(ROUND + 1000, 0, (), proof))
    assert not scene.lineages.prevailing()
    scene.link(STRANGER)
    scene.lineages.on_head(STRANGER, Head(ROUND + 1000, 0, ()))
    assert not scene.lineages.prevailing(), "without a proof only members count"


@pytest.mark.parametrize("changes", [{"base": OTHER}, {"before": (CAT,)}])
def test_lineage_that_claims_another_state_of_a_known_round_is_ignored(changes):
    """One peer can sign any fork; its state and its members count only where we know them."""
    for founds in (False, True):
        scene = Scene(live=())
        scene.run(ORPHAN + 1.0 if founds else 1.0)
        scene.link(CAT)
        scene.lineages.on_head(CAT, head(CAT, **changes))
        assert not scene.lineages.prevailing()


def test_lineage_of_strangers_at_an_unknown_round_is_ignored_unless_many_are_in_it():
    scene = Scene(live=())
    scene.run(ORPHAN + 1.0)
    scene.link(STRANGER, CAT)
    scene.lineages.on_head(STRANGER, head(STRANGER, base=OTHER, round=ROUND + 9))
    assert not scene.lineages.prevailing()
    scene.lineages.on_head(CAT, head(CAT, base=OTHER, round=ROUND + 9))
    assert list(scene.lineages.prevailing()) == [CAT], "a member may know a later round"


def test_peer_tells_and_proves_to_peers_of_weaker_lineages_that_its_own_has_continued():
    scene = Scene(live=(ANN, BEN))
    scene.lineages.advance()
    scene.proofs[ROUND, b""] = proof = commit(ROUND + 1, ME, ANN, BEN)
    for round in (ROUND + 1, ROUND + 2):
        scene.replica.advance(IDS, b"".join(map(life, IDS)))
        scene.lineages.advance()
        if round == ROUND + 1:
            scene.link(DAN)
            scene.lineages.on_head(DAN, head(DAN))
        assert scene.take(Head) == [(DAN, Head(round, 0, (), proof))], "again after each round"
        assert not scene.lineages.prevailing()


def test_peer_that_has_not_gone_on_tells_a_descendant_nothing():
    scene = Scene(live=(ANN, BEN))
    scene.lineages.on_head(DAN, head(DAN))
    assert not scene.take(Head)


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
    honest = head(ANN, BEN)
    scene.lineages.on_head(ANN, msgspec.structs.replace(honest, forks=(forged(honest.forks[0]),)))
    assert not scene.lineages.prevailing() and not scene.take(Head)
    scene.run(1.0)
    assert not scene.replica.forks
    scene.lineages.on_head(ANN, honest)
    scene.run(0.5)
    assert scene.replica.forks == honest.forks


def test_lineage_that_was_founded_with_our_state_is_continued_without_a_fetch():
    scene = Scene(live=(CAT,))
    scene.run(1.0)
    found = head(CAT, DAN)
    scene.lineages.on_head(CAT, found)
    assert not scene.replica.forks, "not before the next tick, because a commit may be in progress"
    scene.run(0.5)
    assert scene.replica.forks == found.forks and scene.replica.members == (CAT, DAN)
    assert not scene.lineages.prevailing(), "it is ours now"


def test_linked_member_in_another_lineage_has_no_vote_in_ours():
    """Links alone are no quorum: two of five with a link to a third one found a lineage, or join that of the third."""
    scene = Scene(live=(ANN, CAT))
    parent = scene.fly.agreement
    assert parent.able
    scene.lineages.on_head(CAT, head(CAT))
    scene.run(0.5)
    assert not parent.able and scene.replica.members == (CAT,)


def test_peer_with_a_commit_founds_no_lineage_while_its_results_can_be_had():
    scene = Scene(live=())
    scene.fly.agreement.commit = commit(ROUND + 1, ANN, BEN, CAT)
    for _ in range(20):
        scene.fly.moved = scene.now
        scene.run(PATIENCE)
    assert not scene.replica.forks
    scene.run(PATIENCES * PATIENCE + ORPHAN + 1.0)
    assert scene.replica.forks, "nothing arrives any more"


def test_larger_lineage_prevails_after_a_while_if_the_forks_do_not_decide():
    """A peer that restarted does not know the state at which the other lineage began."""
    scene = Scene(live=())
    scene.run(ORPHAN + 1.0)
    strangers = tuple(bytes([120 + n]) * 32 for n in range(3))
    scene.link(ANN, BEN, *strangers)
    for group in ((ANN, BEN), strangers):
        for peer in group:
            scene.lineages.on_head(peer, head(*group, base=OTHER))
    assert not scene.lineages.prevailing()
    scene.run(ORPHAN + 1.0)
    assert sorted(scene.lineages.prevailing()) == [ANN, BEN], "two members; we are alone, and strangers do not count"


# --- alone


KEY = Identity.generate(b"k" * 32)
RUN = b"r" * 32


def alone(replica, votes=None):
    return continue_alone(replica, 0, votes or MemoryVoteStore(random.Random(1)), KEY, RUN)


def test_founder_of_a_run_needs_no_lineage_before_the_first_round():
    replica, votes = replica_after(0, (KEY.peer_id,)), MemoryVoteStore(random.Random(1))
    assert alone(replica, votes) is None and not replica.forks
    assert replica.members == (KEY.peer_id,) and replica.known_lives == {KEY.peer_id: votes.life}
    same = replica_after(0, (KEY.peer_id,))
    same.hold_alone(KEY.peer_id, votes.life)
    assert replica.digest == same.digest


def test_peer_that_continues_alone_founds_a_lineage_that_others_can_check():
    replica, votes = replica_after(ROUND), MemoryVoteStore(random.Random(1))
    base = replica.digest
    fork = alone(replica, votes)
    assert (fork.round, fork.base, fork.before, fork.members) == (ROUND, base, IDS, (KEY.peer_id,))
    assert fork.lives == votes.life and replica.forks == (fork,) and replica.digest != base
    check = lambda peer, message, signature: verify_message(message, signature, KEY.public_key, RUN)  # noqa: E731
    assert proved(replica.forks, 0, check) and not proved(replica.forks, 1, check)


def sole(votes):
    replica = Replica(LAYOUT, np.zeros(10, np.float32), (KEY.peer_id,))
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
    votes.save(VoteRecord(b"", round, Ballot(1, KEY.peer_id), None, None))
    assert (alone(replica, votes) is not None) == founds


def test_farewell_is_no_part_of_founding():
    """A founder withdraws silently: its farewell would let a quorum of the others shrink."""
    scene = Scene(live=(ANN,))
    scene.run(ORPHAN + 5.0)
    assert not scene.take(Leave) and not [m for _, m in scene.fly.agreement.take() if isinstance(m, Leave)]
