"""Lineages: names, the order in which they prevail, and the proof of their forks."""

from __future__ import annotations

import itertools

import blake3
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.swarm.lineage import descends, forked, founded_by, lineage_of, name_of_fork, prevails, proved
from thinwire.swarm.messages.registry import LIFE, MAX_FORKS, Fork, Found

IDS = tuple(bytes([number]) * 32 for number in range(6))
ANN, BEN, CAT, DAN, EVE, FAY = IDS
LIVES = {peer: bytes([100 + at]) * LIFE for at, peer in enumerate(IDS)}
BASE = b"b" * 32


def sign(peer, message):
    return blake3.blake3(peer + type(message).__name__.encode() + msgspec.msgpack.encode(message)).digest(64)


def verify(peer, message, signature):
    return signature == sign(peer, message)


def fork_of(round, *members, base=BASE, before=IDS[:4], fragment=0):
    members = tuple(sorted(members))
    signatures = tuple(sign(peer, Found(round, fragment, base, members, LIVES[peer])) for peer in members)
    return Fork(round, base, before, members, b"".join(LIVES[peer] for peer in members), signatures)


def over(one, other):
    """Return True if head `one` prevails over head `other`; a head is (forks, round)."""
    return prevails(*one, *other)


# --- names


def test_first_lineage_of_a_run_has_an_empty_name():
    assert lineage_of(()) == b"" and lineage_of((fork_of(3, ANN),)) == name_of_fork(fork_of(3, ANN))


def test_name_has_the_length_of_a_life_and_does_not_depend_on_signatures():
    fork = fork_of(3, ANN, BEN)
    assert len(name_of_fork(fork)) == LIFE
    assert name_of_fork(msgspec.structs.replace(fork, signatures=())) == name_of_fork(fork)


@pytest.mark.parametrize(
    "other", [fork_of(4, ANN, BEN), fork_of(3, ANN), fork_of(3, ANN, BEN, base=b"c" * 32), fork_of(3, ANN, CAT)]
)
def test_name_depends_on_round_base_and_founders(other):
    assert name_of_fork(other) != name_of_fork(fork_of(3, ANN, BEN))


def test_name_depends_on_the_lives_of_the_founders():
    fork = fork_of(3, ANN)
    assert name_of_fork(msgspec.structs.replace(fork, lives=b"x" * LIFE)) != name_of_fork(fork)


def test_oldest_forks_of_a_lineage_are_forgotten():
    forks = ()
    for round in range(MAX_FORKS + 2):
        forks = forked(forks, fork_of(round, ANN))
    assert [fork.round for fork in forks] == list(range(2, MAX_FORKS + 2))
    assert forked((), fork_of(1, ANN)) == (fork_of(1, ANN),)


FIRST, SECOND, SIBLING = fork_of(3, ANN, BEN), fork_of(5, ANN), fork_of(3, CAT)


def test_lineage_descends_from_those_in_which_it_was_founded():
    forks = (FIRST, SECOND)
    assert descends(forks, b"") and descends(forks, name_of_fork(FIRST))
    assert not descends(forks, name_of_fork(SECOND)), "it is that lineage"
    assert not descends(forks, name_of_fork(SIBLING)) and not descends((FIRST,), name_of_fork(SECOND))
    assert not descends((), b"") and not descends((), name_of_fork(FIRST))


@pytest.mark.parametrize(
    ("parent", "peer", "life", "founder"),
    [
        (b"", ANN, LIVES[ANN], True),
        (b"", BEN, LIVES[BEN], True),
        (b"", ANN, LIVES[BEN], False),
        (b"", CAT, LIVES[CAT], False),
        (name_of_fork(FIRST), ANN, LIVES[ANN], True),
        (name_of_fork(FIRST), BEN, LIVES[BEN], False),
        (name_of_fork(SECOND), ANN, LIVES[ANN], False),
        (name_of_fork(SIBLING), ANN, LIVES[ANN], False),
    ],
)
def test_founder_is_a_peer_with_the_life_that_the_fork_of_that_parent_names(parent, peer, life, founder):
    assert founded_by((FIRST, SECOND), parent, peer, life) == founder


def test_first_lineage_was_founded_by_no_fork():
    assert not founded_by((), b"", ANN, LIVES[ANN])


# --- order


def test_lineage_that_went_on_with_a_quorum_prevails_over_one_founded_from_an_earlier_round():
    orphan = (fork_of(3, CAT, DAN),)
    assert over(((), 4), (orphan, 900)) and not over((orphan, 900), ((), 4))


def test_lineage_that_did_not_go_on_gives_way_to_those_founded_from_it():
    orphan = (fork_of(3, CAT, DAN),)
    assert over((orphan, 3), ((), 3)) and not over(((), 3), (orphan, 3))
    assert over((orphan, 3), ((), 2))


def test_lineages_with_the_same_parent_are_ordered_by_what_they_contain_of_it():
    for better, worse in (
        (fork_of(4, DAN), fork_of(3, ANN, BEN, CAT)),  # more of the parent
        (fork_of(3, ANN, BEN), fork_of(3, CAT, EVE, FAY)),  # more of its members
        (fork_of(3, ANN, BEN, EVE), fork_of(3, CAT, DAN)),  # more founders
    ):
        assert over(((better,), 9), ((worse,), 99)) and not over(((worse,), 99), ((better,), 9))


def test_equal_lineages_are_ordered_by_their_names():
    one, other = sorted((fork_of(3, ANN), fork_of(3, BEN)), key=name_of_fork)
    assert over(((one,), 3), ((other,), 3)) and not over(((other,), 3), ((one,), 3))


def test_no_lineage_prevails_over_itself():
    for forks in ((), (FIRST,), (FIRST, SECOND)):
        assert not over((forks, 9), (forks, 5)) and not over((forks, 5), (forks, 9))


def test_order_is_decided_where_two_lineages_part():
    """Later forks of one of them do not count."""
    strong, weak = fork_of(3, ANN, BEN), fork_of(3, CAT)
    later = fork_of(9, CAT, DAN, EVE, before=(CAT, DAN, EVE))
    assert over(((strong,), 3), ((weak, later), 50)) and not over(((weak, later), 50), ((strong,), 3))


@st.composite
def trees(draw):
    """Return heads of all lineages in a random tree of forks; each is (forks, round)."""
    forks, lineages = st.integers(1, 7), [((), 0)]
    for number in range(draw(forks)):
        parent, least = draw(st.sampled_from(lineages))
        members = draw(st.sets(st.sampled_from(IDS), min_size=1))
        round = draw(st.integers(least, least + 3))
        fork = fork_of(round, *members, base=bytes([draw(st.integers(0, 1)), number]) * 16)
        lineages.append(((*parent, fork), round))
    return [(path, draw(st.integers(least, least + 4))) for path, least in lineages]


@given(trees())
def test_order_of_lineages_is_total_and_antisymmetric(heads):
    for one, other in itertools.combinations(heads, 2):
        assert over(one, other) != over(other, one)


@given(trees())
def test_order_of_lineages_is_transitive(heads):
    for one, two, three in itertools.permutations(heads, 3):
        if over(one, two) and over(two, three):
            assert over(one, three)


@given(trees())
def test_one_lineage_prevails_over_all_others_of_a_run(heads):
    assert sum(all(over(one, other) for other in heads if other is not one) for one in heads) == 1


# --- proof


def test_signed_forks_in_order_are_proved():
    for forks in ((), (FIRST,), (FIRST, SECOND), (FIRST, fork_of(3, ANN))):
        assert proved(forks, 0, verify)


def altered(**changes):
    return msgspec.structs.replace(FIRST, **changes)


@pytest.mark.parametrize(
    "forks",
    [
        (altered(round=4),),
        (altered(base=b"c" * 32),),
        (altered(members=(ANN, CAT)),),
        (altered(members=(BEN, ANN)),),
        (altered(members=(ANN, ANN)),),
        (altered(members=(ANN,), lives=LIVES[ANN], signatures=FIRST.signatures[:1]),),
        (altered(lives=FIRST.lives[::-1]),),
        (altered(lives=FIRST.lives[:-1]),),
        (altered(lives=FIRST.lives + LIVES[CAT]),),
        (altered(signatures=FIRST.signatures[:1]),),
        (altered(signatures=FIRST.signatures[::-1]),),
        (altered(signatures=(*FIRST.signatures, b"")),),
        (altered(signatures=(b"", b"")),),
        (SECOND, FIRST),
        (FIRST, altered(signatures=(b"", b""))),
    ],
    ids=[
        *("round", "base", "another founder", "unsorted", "twice", "founder left out", "lives swapped", "life cut"),
        *("life added", "signature missing", "signatures swapped", "signature added", "unsigned"),
        *("rounds fall", "second fork"),
    ],
)
def test_forged_fork_is_not_proved(forks):
    assert not proved(forks, 0, verify)


def test_fork_of_another_fragment_is_not_proved():
    assert proved((fork_of(3, ANN, fragment=1),), 1, verify) and not proved((fork_of(3, ANN, fragment=1),), 0, verify)
