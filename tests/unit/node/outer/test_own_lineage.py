"""Lineage of one peer: when and with whom it founds another one."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from kit.outer.chains import admits, certificate, sign, verify
from kit.outer.lineage_scene import (
    ANN,
    BEN,
    CAT,
    DAN,
    FIRST,
    IDS,
    LAYOUT,
    ME,
    ORPHAN,
    OTHER,
    PATIENCE,
    ROUND,
    STRANGER,
    Scene,
    branch,
    later_chain,
    life,
    replica_after,
    step,
)
from thinwire.collectives.consensus.chain import extended, founded
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore, VoteRecord
from thinwire.collectives.state_sync.chunk_transfer import LATEST
from thinwire.node.outer.own_lineage import SETTLE, continue_alone
from thinwire.node.outer.quorum_wait import PATIENCES
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import verify_message
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.lineage import lineage_of, name_of_fork, proved
from thinwire.swarm.messages.registry import (
    LIFE,
    Ballot,
    ChainEntry,
    Fork,
    Found,
    Head,
    Leave,
)

# --- the timer


def test_peer_without_a_quorum_founds_a_lineage_after_the_orphan_time():
    scene = Scene(live=())
    scene.run(ORPHAN)
    assert scene.quorum_wait.until == pytest.approx(0.5 + ORPHAN) and not scene.forks
    assert scene.store.record is None
    scene.run(1.0)
    (fork,) = scene.forks
    assert (fork.round, fork.members, fork.before) == (ROUND, (ME,), IDS) and proved(fork, 0, verify, admits)
    assert scene.quorum_wait.until is None, "it is a quorum of its lineage"
    assert [name for name, _ in scene.events] == ["lineage", "alarm"]
    assert scene.events[1][1]["detail"].startswith("1 of 5 members continue as lineage ")


def test_timer_is_reset_when_a_quorum_is_back():
    scene = Scene(live=(ANN, BEN))
    for _ in range(10):
        scene.lose(ANN, BEN)
        scene.run(0.9 * ORPHAN)
        assert scene.quorum_wait.until is not None
        scene.link(ANN, BEN)
        scene.run(0.5)
        assert scene.quorum_wait.until is None
    assert not scene.forks and scene.store.record is None


def test_timer_is_reset_by_a_commit():
    scene = Scene(live=())
    scene.run(0.9 * ORPHAN)
    step(scene.replica)
    scene.current = scene.next_round()
    scene.advance()
    scene.run(0.9 * ORPHAN)
    assert not scene.forks and scene.quorum_wait.until > scene.now


def test_peer_with_a_quorum_never_founds_a_lineage():
    scene = Scene(live=(ANN, BEN))
    scene.run(100 * ORPHAN)
    assert not scene.forks and not scene.take(Found) and scene.quorum_wait.until is None


def test_peer_whose_results_are_unobtainable_founds_one_although_a_quorum_is_here():
    scene = Scene()
    scene.current.missing_results, scene.current.unobtainable = 1, lambda without: True
    scene.run(ORPHAN + 1.0)
    assert {to for to, _ in scene.take(Found)} == set(IDS[1:]) and not scene.current.agreement.voter


def test_peer_whose_results_only_a_founder_had_voted_for_joins_it_at_once():
    """The founder has restarted without them: it begins before this round."""
    scene = Scene()
    scene.current.missing_results, scene.current.unobtainable = 1, lambda without: ANN in without
    scene.run(1.0)
    assert not scene.take(Found)
    scene.hear_found(ANN, ANN)
    scene.run(1.0)
    assert scene.take(Found)


@pytest.mark.parametrize(
    ("orphan", "patience", "wait"), [(10.0, 2.0, 10.0), (1.0, 2.0, PATIENCES * 2.0), (0, 2.0, None)]
)
def test_orphan_time_is_at_least_three_patiences_and_zero_means_never(orphan, patience, wait):
    scene = Scene(live=(), orphan=orphan, patience=patience)
    scene.run(0.5)
    assert scene.quorum_wait.until == (None if wait is None else 0.5 + wait)
    scene.run(1000.0)
    assert bool(scene.forks) == (wait is not None)


@pytest.mark.parametrize("orphan", [0, 1000.0])
def test_recover_founds_a_lineage_at_once(orphan):
    scene = Scene(live=(), orphan=orphan)
    scene.run(2.0)
    scene.quorum_wait.recover()
    assert scene.quorum_wait.until == scene.now
    scene.run(0.5)
    assert [fork.members for fork in scene.forks] == [(ME,)] and scene.quorum_wait.until is None
    assert [name for name, _ in scene.events] == ["lineage", "alarm"]


def test_recover_with_a_quorum_has_no_effect_now_or_later():
    scene = Scene(live=(ANN, BEN), orphan=0)
    scene.run(1.0)
    scene.quorum_wait.recover()
    scene.lose(ANN, BEN)
    scene.run(100.0)
    assert not scene.forks and scene.quorum_wait.until is None


@pytest.mark.parametrize("how", ["quorum", "commit"])
def test_recover_has_no_effect_after_a_quorum_was_here_again(how):
    scene = Scene(live=(ANN,), orphan=0)
    scene.run(1.0)
    scene.quorum_wait.recover()
    if how == "quorum":
        scene.link(BEN)
        scene.run(1.0)
        scene.lose(BEN)
    else:
        step(scene.replica)
        scene.current = scene.next_round()
        scene.advance()
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
    scene.quorum_wait.recover()
    scene.run(0.5)
    assert scene.take(Found) and not scene.events
    fork = branch(ME, ANN)[-1].fork
    scene.replica.found(fork)
    scene.current = scene.next_round()
    for _ in range(2):
        scene.advance()
    assert [name for name, _ in scene.events] == ["lineage", "alarm"]
    assert scene.events[0][1]["lineage"] == name_of_fork(fork).hex()


@pytest.mark.parametrize("why", ["no state", "complete", "diverged"])
def test_peer_with_nothing_to_continue_founds_no_lineage(why):
    scene = Scene(live=())
    if why == "no state":
        scene.replica.members = ()
    elif why == "complete":
        scene.current.complete = True
    else:
        scene.current.agreement.overtaken()
    scene.run(10 * ORPHAN)
    assert not scene.forks and not scene.take(Found)


def test_peer_whose_disk_is_full_founds_with_the_life_that_it_has_since():
    """Its former life may come back with the disk, without knowing that it has withdrawn."""
    scene = Scene(live=())
    scene.store.full = True
    scene.run(ORPHAN + 1.0)
    assert scene.store.life != life(ME) and scene.store.record is None
    assert scene.replica.known_lives == {ME: scene.store.life} and scene.current.agreement.voter


def test_founder_is_muted_in_the_parent_lineage_and_votes_in_the_new_one():
    scene = Scene(live=())
    parent = scene.current.agreement
    scene.run(ORPHAN + 1.0)
    assert not parent.voter and scene.current.agreement.voter
    record = scene.store.record
    assert record.left and (record.lineage, record.round) == (lineage_of(FIRST), ROUND + 1)


def test_peer_with_a_commit_founds_no_lineage_while_its_results_can_be_had():
    scene = Scene(live=())
    scene.current.agreement.decision.commit = later_chain(ANN, BEN, CAT)[-1].certificates[-1].commit
    for left in range(20, 0, -1):
        scene.current.missing_results = left
        scene.run(PATIENCE)
    assert not scene.forks
    scene.run(ORPHAN + PATIENCES * PATIENCE)
    assert scene.forks, "nothing arrives any more"


def wait_begins_after(scene, seconds):
    """Let time pass; return True if the wait for a quorum begins within a second after `seconds`, and not before."""
    scene.run(seconds)
    early = scene.quorum_wait.begun.is_set()
    scene.run(1.0)
    return scene.quorum_wait.begun.is_set() and not early


@pytest.mark.parametrize(("exhausted", "seconds"), [(False, LATEST), (True, PATIENCES * PATIENCE)])
def test_peer_that_follows_a_round_waits_longer_for_its_results_while_a_source_has_them(exhausted, seconds):
    """A source sends them with pauses. All links are up, and the members have a quorum."""
    scene = Scene(live=(ANN, BEN))
    scene.current.follows, scene.current.exhausted, scene.current.missing_results = True, exhausted, 1
    scene.current.agreement.decision.commit = later_chain(ANN, BEN, CAT)[-1].certificates[-1].commit
    assert wait_begins_after(scene, seconds)


def test_wait_for_claims_begins_when_the_last_result_has_come():
    scene = Scene(live=(ANN, BEN))
    scene.current.missing_results = 1
    scene.run(PATIENCES * PATIENCE - 0.5)
    scene.current.unclaimed = True  # It counts as one, like the result before.
    assert wait_begins_after(scene, PATIENCES * PATIENCE)


def test_peer_founds_one_if_the_voters_for_the_results_of_its_round_do_not_send_them():
    """They have restarted: they are reachable, but have lost the results that they voted for."""
    scene = Scene(live=(ANN, BEN))
    scene.current.missing_results = 1
    scene.run(PATIENCES * PATIENCE - 0.5)
    assert scene.quorum_wait.since is None and not scene.quorum_wait.begun.is_set()
    scene.run(1.5)
    assert scene.quorum_wait.begun.is_set()
    assert scene.quorum_wait.since == 0.5, "from the beginning: no round could commit"
    scene.run(ORPHAN)
    assert scene.take(Found)


# --- founding with others


def test_two_of_five_found_one_lineage_together():
    scenes = {me: Scene(live=(ME, ANN), me=me) for me in (ME, ANN)}
    for _ in range(60):
        for scene in scenes.values():
            scene.run(0.5)
        for me, scene in scenes.items():
            for to, message in scene.take(Found):
                scenes[to].own_lineage.on_found(me, message, sign(me, message))
            for to, message in scene.take(Head):
                scenes[to].lineages.on_head(me, message, b"")
            for to, chain in scene.chains():
                scenes[to].on_chain(me, chain)
    one, other = scenes[ME].replica, scenes[ANN].replica
    assert one.chain == other.chain and one.members == other.members == (ME, ANN) and one.digest == other.digest
    assert one.lives == life(ME) + life(ANN) and len(one.chain) == 2
    assert all(scene.current.agreement.electorate.able for scene in scenes.values())


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
    assert scene.current.agreement.electorate.able
    for peer in (ANN, BEN):
        scene.hear_found(peer, ANN, BEN)
    assert set(scene.current.agreement.electorate.nonvoters) == {ANN, BEN} and scene.current.agreement.electorate.able
    scene.hear_found(CAT, CAT)
    assert not scene.current.agreement.electorate.able


def test_statement_about_another_state_changes_nothing():
    scene = Scene()
    message = Found(ROUND, 0, OTHER, (ANN, BEN), life(ANN))
    scene.own_lineage.on_found(ANN, message, sign(ANN, message))
    assert not scene.current.agreement.electorate.nonvoters


def test_farewell_is_no_part_of_founding():
    """A founder withdraws silently: its farewell would let a quorum of the others shrink."""
    scene = Scene(live=(ANN,))
    scene.run(ORPHAN + 5.0)
    assert not scene.take(Leave) and not [m for _, m in scene.current.agreement.take() if isinstance(m, Leave)]


def test_peer_without_a_quorum_takes_up_a_lineage_founded_with_its_state():
    scene = Scene(live=(CAT,))
    scene.run(1.0)
    scene.on_chain(CAT, branch(CAT, DAN))
    assert not scene.forks, "not before the next tick, because a commit may be in progress"
    scene.run(0.5)
    assert scene.replica.chain == branch(CAT, DAN) and scene.replica.members == (CAT, DAN)
    assert not scene.lineages.prevailing(), "it is ours now"


@pytest.mark.parametrize("admitted", [False, True])
def test_lineage_is_taken_up_if_the_run_admits_its_founders(admitted):
    """A liar can make any number of keys, and found a lineage with them."""
    stranger = bytes([50]) * 32
    scene = Scene(live=(CAT,))
    scene.run(1.0)
    chain = branch(CAT, stranger)
    fork = chain[-1].fork if admitted else msgspec.structs.replace(chain[-1].fork, tokens=(b"",))
    scene.on_chain(CAT, founded(FIRST, fork))
    scene.run(0.5)
    assert (scene.replica.members == (CAT, stranger)) == admitted


def test_lineage_with_a_founder_that_is_excluded_here_is_not_taken_up():
    """Its chain is valid: other peers may not know the revocation."""
    stranger = bytes([50]) * 32
    scene = Scene(live=(CAT,))
    scene.excluded.add(stranger)
    scene.run(1.0)
    scene.on_chain(CAT, branch(CAT, stranger))
    scene.run(0.5)
    assert scene.replica.members == IDS


@pytest.mark.parametrize("later", ["fork", "round"])
def test_only_a_lineage_that_begins_with_our_state_is_adopted_at_once(later):
    """A later fork of it, or one of a later round, may name our digest, too; it is not ours to continue."""
    scene = Scene(live=())
    scene.run(1.0)
    again = branch(CAT, round=ROUND + 1, base=scene.replica.digest)
    if later == "fork":
        again = branch(CAT, chain=branch(ANN), before=(ANN,), base=scene.replica.digest)
    scene.link(CAT)
    scene.on_chain(CAT, again)
    scene.run(0.5)
    assert scene.replica.members == IDS


# --- alone


KEY = Identity.generate(b"k" * 32)
RUN = b"r" * 32
RING = Keyring(KEY, RUN, lambda peer: None)
TOKEN = b"token"


def admitted(peer, token):
    return (peer, token) == (KEY.peer_id, TOKEN)


def check(peer, message, signature):
    return verify_message(message, signature, KEY.public_key, RUN)


def alone(replica, votes=None):
    return continue_alone(replica, 0, votes or MemoryVoteStore(random.Random(1)), RING, TOKEN)


def test_founder_of_a_run_founds_its_first_lineage():
    replica, votes = Replica(LAYOUT, np.zeros(10, np.float32), ()), MemoryVoteStore(random.Random(1))
    base = replica.digest
    assert alone(replica, votes) is None, "nothing to report"
    fork = Fork(0, base, (), (KEY.peer_id,), votes.life, replica.chain[0].fork.signatures, (KEY.public_key,), (TOKEN,))
    assert replica.chain == (ChainEntry(fork),) and replica.lineage == name_of_fork(fork)
    assert proved(fork, 0, check, admitted)
    assert replica.members == (KEY.peer_id,) and replica.known_lives == {KEY.peer_id: votes.life}


def test_peer_that_continues_alone_founds_a_lineage_that_others_can_check():
    replica, votes = replica_after(ROUND), MemoryVoteStore(random.Random(1))
    base = replica.digest
    fork = alone(replica, votes)
    assert (fork.round, fork.base, fork.before, fork.members) == (ROUND, base, IDS, (KEY.peer_id,))
    assert fork.lives == votes.life and replica.chain == (*FIRST, ChainEntry(fork)) and replica.digest != base
    assert fork.keys == (KEY.public_key,)
    assert proved(fork, 0, check, admitted) and not proved(fork, 1, check, admitted)


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
