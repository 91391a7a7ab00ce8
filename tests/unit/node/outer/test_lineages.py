"""Lineages of other peers: what they prove, and to which one a peer gives way."""

from __future__ import annotations

import msgspec
import pytest
from kit.outer.chains import sign, with_tokens
from kit.outer.lineage_scene import (
    ANN,
    BEN,
    CAT,
    DAN,
    FIRST,
    IDS,
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
    long_chain,
    replica_after,
    step,
)
from thinwire.collectives.blocking_work import BURST, RATE
from thinwire.collectives.consensus.chain import encode, founded
from thinwire.swarm.lineage import lineage_of, newest_round
from thinwire.swarm.messages.lineage import CHAIN_BYTES
from thinwire.swarm.messages.registry import (
    LIFE,
    ChainEntry,
    Fork,
    Found,
    Head,
)


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
        scene.advance()
    assert not scene.lineages.ahead()


def test_older_chain_is_answered_with_ours():
    scene = Scene()
    scene.on_chain(ANN, replica_after(ROUND - 1).chain)
    assert scene.chains() == [(ANN, FIRST)] and not scene.lineages.ahead()


def test_long_chain_is_checked_over_time_and_delays_no_other_peer():
    """Its sender gets no more by coming back, and the chain of another peer is checked between its parts."""
    scene = Scene()
    long = long_chain(120, 64)
    for _ in range(5):
        scene.link(DAN)
        scene.on_chain(DAN, long)
        assert scene.verified <= BURST + 64 + RATE * scene.now
        scene.lose(DAN)
    scene.link(DAN)
    scene.run(1.0)
    scene.on_chain(DAN, long)
    scene.on_chain(ANN, later_chain(ANN, BEN, CAT))
    scene.run(0.5)
    assert list(scene.lineages.ahead()) == [ANN]
    begun, spent = scene.now, scene.verified
    scene.run(3.0)
    assert list(scene.lineages.ahead()) == [ANN]
    assert scene.verified - spent <= RATE * (scene.now - begun) + BURST
    scene.run(10.0)
    assert sorted(scene.lineages.ahead()) == [ANN, DAN]


@pytest.mark.parametrize(
    "data", [bytes(CHAIN_BYTES), encode(long_chain(40, 64))[:-1]], ids=["zeros", "all but one byte"]
)
def test_large_frames_that_are_no_chain_do_not_delay_the_chain_of_another_peer(data):
    scene = Scene()
    for _ in range(5):
        scene.link(DAN)
        scene.lineages.on_head(DAN, Head(9, 0, b"l" * 16), data)
        scene.lose(DAN)
    scene.on_chain(ANN, later_chain(ANN, BEN, CAT))
    scene.run(0.2)
    assert list(scene.lineages.ahead()) == [ANN]


def test_long_chains_of_many_peers_delay_an_honest_one_by_seconds():
    """They come back with new ones all the time."""
    scene, long = Scene(), long_chain(60, 64)
    head, data = Head(newest_round(long[-1]), 0, lineage_of(long)), encode(long)
    for tick in range(100):
        scene.now += 0.1
        for liar in (BEN, CAT, DAN):
            if tick % 10 == 0:
                scene.lose(liar)
                scene.link(liar)
            scene.lineages.on_head(liar, head, data)
        if tick == 5:
            chain = later_chain(ANN, BEN, CAT)
            scene.lineages.on_head(ANN, Head(newest_round(chain[-1]), 0, lineage_of(chain)), encode(chain))
        scene.lineages.on_tick()
    assert ANN in scene.lineages.ahead()


def test_chain_that_waits_is_asked_for_when_the_last_one_is_checked():
    scene = Scene()
    scene.on_chain(ANN, long_chain(20, 64))
    later = later_chain(ANN, BEN, CAT, rounds=30)
    scene.on_chain(ANN, later)
    scene.take(Head)
    scene.run(10.0)
    assert ANN in [to for to, _ in scene.take(Head)]


def test_peer_with_a_quorum_does_not_give_way_to_a_lineage_founded_in_its_own():
    scene = Scene(live=(ANN, BEN))
    scene.link(CAT)
    scene.on_chain(CAT, branch(CAT, DAN))
    scene.on_chain(DAN, branch(CAT, DAN))
    assert not scene.lineages.prevailing()


def test_peer_of_a_lineage_gives_way_to_a_prevailing_one_although_it_has_a_quorum():
    scene = Scene(live=())
    scene.run(ORPHAN + 1.0)
    assert scene.current.agreement.electorate.able
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
        (*FIRST[:-1], ChainEntry(FIRST[-1].fork, (later_chain(ANN, BEN, CAT)[-1].certificates[-1],) * 2)),
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


@pytest.mark.parametrize(("live", "gives_way"), [((BEN, DAN), False), ((), True)])
def test_member_gives_way_to_a_lineage_of_strangers_without_a_quorum_only(live, gives_way):
    """Otherwise it would found another one that prevails over theirs, and their rounds would be lost."""
    scene = Scene(live=live)
    scene.run(1.0)
    scene.link(CAT)
    scene.on_chain(CAT, branch(STRANGER, before=IDS))
    assert list(scene.lineages.prevailing()) == [CAT] * gives_way


def test_member_gives_way_to_a_lineage_of_strangers_that_began_at_a_later_round_than_it_has():
    """It contains rounds of the parent lineage that this member lacks."""
    scene = Scene(live=())
    scene.run(1.0)
    scene.link(CAT)
    parent = later_chain(ANN, BEN, CAT)
    scene.on_chain(CAT, branch(STRANGER, chain=parent, round=newest_round(parent[-1]), before=IDS))
    assert list(scene.lineages.prevailing()) == [CAT]


def test_peer_that_is_no_member_gives_way_to_a_lineage_of_strangers():
    scene = Scene(live=(), me=STRANGER)
    scene.run(1.0)
    scene.link(CAT)
    scene.on_chain(CAT, branch(b"s" * 32, before=IDS))
    assert list(scene.lineages.prevailing()) == [CAT]


@pytest.mark.parametrize("round", [ROUND, 0])
def test_returning_member_gives_way_to_a_lineage_of_strangers(round):
    """They had the state, and no member was there."""
    scene = Scene(live=(CAT,), round=round)
    scene.states.entered = False
    base = scene.replica.digest
    scene.on_chain(
        CAT, branch(STRANGER, chain=scene.replica.chain, round=round, base=base, before=scene.replica.members)
    )
    assert list(scene.lineages.prevailing()) == [CAT]


def test_newest_known_round_of_our_lineage_counts_against_others():
    """A lineage founded before that round does not prevail, although we are not there yet."""
    scene = Scene(live=(CAT, DAN))
    scene.run(1.0)
    scene.on_chain(CAT, later_chain(ANN, BEN, CAT))
    scene.on_chain(DAN, branch(DAN))
    assert list(scene.lineages.ahead()) == [CAT] and not scene.lineages.prevailing()


def test_chain_is_sent_once_while_one_waits_for_the_peer():
    """A peer that asks again and again costs no memory."""
    scene = Scene(live=(CAT,))
    scene.lineages.on_head(CAT, Head(0, 0, scene.replica.lineage), b"")
    scene.waiting = 1
    for _ in range(5):
        scene.lineages.on_head(CAT, Head(0, 0, scene.replica.lineage), b"")
    assert len(scene.told) == 1


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
        return founded((), with_tokens(Fork(0, OTHER, (), (peer,), life, (sign(peer, found),))))

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


def test_peer_without_a_state_trusts_no_beginning_with_a_second_founder():
    scene = Scene(founder=CAT, round=0)
    scene.replica.chain = ()
    assert not scene.lineages.trusted(Fork(0, OTHER, (), (CAT, DAN), life(CAT) + life(DAN), ()))


def test_peer_tells_and_proves_to_peers_of_weaker_lineages_that_its_own_has_continued():
    scene = Scene(live=(ANN, BEN))
    scene.advance()
    for round in (ROUND + 1, ROUND + 2):
        step(scene.replica, ME, ANN, BEN)
        scene.advance()
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
    scene.on_chain(ANN, (*honest[:-1], ChainEntry(forged(honest[-1].fork))))
    assert not scene.lineages.prevailing() and not scene.chains()
    scene.run(1.0)
    assert not scene.forks
    scene.on_chain(ANN, honest)
    scene.run(0.5)
    assert scene.replica.chain == honest


@pytest.mark.parametrize("admitted", [False, True])
def test_peer_gives_way_to_more_founders_only_if_the_run_admits_them(admitted):
    """Where no founder is a member, their number decides. A liar could otherwise replace the history of others at any time."""
    made_up = [bytes([50 + number]) * 32 for number in range(9)]
    scene = Scene(live=(b"s" * 32,), me=STRANGER)
    theirs = branch(b"z" * 32, *made_up)[-1].fork
    if not admitted:
        theirs = msgspec.structs.replace(theirs, tokens=tuple(b"" if one in made_up else one for one in theirs.tokens))
    scene.founded(branch(STRANGER, b"s" * 32)[-1].fork)
    scene.link(CAT)
    scene.on_chain(CAT, founded(FIRST, theirs))
    assert list(scene.lineages.prevailing()) == [CAT] * admitted


def test_linked_member_in_another_lineage_has_no_vote_in_ours():
    """Links alone are no quorum: two of five with a link to a third one found a lineage, or join that of the third."""
    scene = Scene(live=(ANN, CAT))
    parent = scene.current.agreement
    assert parent.electorate.able
    scene.on_chain(CAT, branch(CAT))
    scene.run(0.5)
    assert not parent.electorate.able and scene.replica.members == (CAT,)
