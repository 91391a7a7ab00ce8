"""Lineages: names, the order in which they prevail, and the proof of their forks."""

from __future__ import annotations

import itertools

import blake3
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.swarm.lineage import (
    by_strangers,
    contains,
    descends,
    founded_by,
    founders_of,
    later,
    lineage_of,
    name_of_fork,
    new_founders,
    newest_round,
    prevails,
    proved,
    shared,
)
from thinwire.swarm.messages.registry import LIFE, Ballot, Certificate, ChainEntry, Commit, Fork, Found, Proposal

IDS = tuple(bytes([number]) * 32 for number in range(6))
ANN, BEN, CAT, DAN, EVE, FAY = IDS
LIVES = {peer: bytes([100 + at]) * LIFE for at, peer in enumerate(IDS)}
BASE = b"b" * 32


def sign(peer, message):
    return blake3.blake3(peer + type(message).__name__.encode() + msgspec.msgpack.encode(message)).digest(64)


def verify(peer, message, signature):
    return signature == sign(peer, message)


def fork_of(round, *members, base=BASE, before=IDS[:4], fragment=0, lives=LIVES):
    members = tuple(sorted(members))
    signatures = tuple(sign(peer, Found(round, fragment, base, members, lives[peer])) for peer in members)
    fork = Fork(round, base, before, members, b"".join(lives[peer] for peer in members), signatures)
    return msgspec.structs.replace(fork, tokens=tuple(new_founders(fork)))


def admits(peer, token):
    """Admit a peer whose token is its id."""
    return token == peer


def entry(fork, *rounds):
    """Return a lineage with certificates of these rounds."""
    proposal = [Proposal(round, 0, Ballot(1, ANN), (), (), (), (), None, ()) for round in rounds]
    return ChainEntry(fork, tuple(Certificate((), b"", Commit(one, bytes(32), ()), ()) for one in proposal))


def root(*rounds, peer=ANN, **options):
    """Return the first lineage of a run."""
    return entry(fork_of(0, peer, before=(), **options), *rounds)


ROOT = root(3).fork
FIRST, SECOND, SIBLING = fork_of(3, ANN, BEN), fork_of(5, ANN), fork_of(3, CAT)
CHAIN = (root(3), entry(FIRST, 4, 5), entry(SECOND))
"""Chain of SECOND, founded in FIRST, founded in ROOT."""


# --- names


def test_lineage_of_a_chain_is_the_last_one():
    assert lineage_of(CHAIN) == name_of_fork(SECOND) and lineage_of(CHAIN[:1]) == name_of_fork(ROOT)


def test_lineage_of_a_peer_without_a_state_is_empty():
    assert lineage_of(()) == b""


def test_name_has_the_length_of_a_life_and_does_not_depend_on_signatures_and_keys():
    fork = fork_of(3, ANN, BEN)
    assert len(name_of_fork(fork)) == LIFE
    assert name_of_fork(msgspec.structs.replace(fork, signatures=(), keys=(ANN,))) == name_of_fork(fork)


@pytest.mark.parametrize(
    "other",
    [
        fork_of(4, ANN, BEN),
        fork_of(3, ANN),
        fork_of(3, ANN, BEN, base=b"c" * 32),
        fork_of(3, ANN, CAT),
        fork_of(3, ANN, CAT, lives={ANN: LIVES[ANN], CAT: LIVES[BEN]}),
    ],
    ids=["round", "fewer founders", "base", "another founder and life", "another founder"],
)
def test_name_depends_on_round_base_and_founders(other):
    assert name_of_fork(other) != name_of_fork(fork_of(3, ANN, BEN))


def test_name_depends_on_the_lives_of_the_founders():
    fork = fork_of(3, ANN)
    assert name_of_fork(msgspec.structs.replace(fork, lives=b"x" * LIFE)) != name_of_fork(fork)


def test_name_does_not_depend_on_later_rounds():
    assert lineage_of((root(),)) == lineage_of((root(3, 9),))


def test_founders_have_their_lives_in_order():
    assert founders_of(fork_of(3, CAT, ANN)) == [(ANN, LIVES[ANN]), (CAT, LIVES[CAT])]


# --- ancestors


def test_lineage_descends_from_those_in_which_it_was_founded():
    assert descends(CHAIN, name_of_fork(ROOT)) and descends(CHAIN, name_of_fork(FIRST))
    assert not descends(CHAIN, name_of_fork(SECOND)), "it is that lineage"
    assert not descends(CHAIN, name_of_fork(SIBLING)) and not descends(CHAIN[:2], name_of_fork(SECOND))


def test_nothing_descends_from_a_peer_without_a_state():
    assert not descends(CHAIN, b"") and not descends((), b"") and not descends((), name_of_fork(ROOT))


@pytest.mark.parametrize(
    ("parent", "peer", "life", "founder"),
    [
        (name_of_fork(ROOT), ANN, LIVES[ANN], True),
        (name_of_fork(ROOT), BEN, LIVES[BEN], True),
        (name_of_fork(ROOT), ANN, LIVES[BEN], False),
        (name_of_fork(ROOT), CAT, LIVES[CAT], False),
        (name_of_fork(FIRST), ANN, LIVES[ANN], True),
        (name_of_fork(FIRST), BEN, LIVES[BEN], False),
        (name_of_fork(SECOND), ANN, LIVES[ANN], False),
        (name_of_fork(SIBLING), ANN, LIVES[ANN], False),
        (b"", ANN, LIVES[ANN], False),
    ],
)
def test_founder_is_a_peer_with_the_life_that_the_fork_of_that_parent_names(parent, peer, life, founder):
    assert founded_by(CHAIN, parent, peer, life) == founder


def test_first_lineage_was_founded_in_no_other_one():
    assert not founded_by(CHAIN[:1], name_of_fork(ROOT), ANN, LIVES[ANN])
    assert not founded_by((), b"", ANN, LIVES[ANN])


def test_shared_lineages_are_the_first_ones_until_two_chains_part():
    again = entry(SECOND)  # founded in SIBLING here
    other = (root(2), entry(SIBLING), again)
    assert shared(CHAIN, CHAIN) == 3 and shared(CHAIN, CHAIN[:2]) == shared(CHAIN[:2], CHAIN) == 2
    assert shared(CHAIN, other) == shared(other, CHAIN) == 1, "they share the lineage, at whatever round"
    assert shared(CHAIN, ()) == shared((), CHAIN) == shared(CHAIN, (root(peer=BEN),)) == 0


@pytest.mark.parametrize(
    ("lineage", "last"),
    [(ROOT, 3), (FIRST, 5), (SECOND, 900), *((fork_of(3, CAT, base=bytes([at]) * 32), -1) for at in range(8))],
    ids=["first", "middle", "last", *(f"sibling {at}" for at in range(8))],
)
def test_history_contains_the_rounds_of_a_parent_until_the_fork_and_all_of_the_last_lineage(lineage, last):
    for round in (0, 2, 3, 4, 5, 6, 900):
        assert contains(CHAIN, name_of_fork(lineage), round) == (round <= last)


# --- progress


def test_newest_round_is_that_of_the_last_certificate_or_of_the_fork():
    assert (
        newest_round(entry(FIRST)) == 3 and newest_round(entry(FIRST, 4)) == 4 and newest_round(entry(FIRST, 4, 9)) == 9
    )


@pytest.mark.parametrize(
    ("chain", "other", "expected"),
    [
        ((root(4),), (root(3),), True),
        ((root(1),), (root(),), True),
        ((root(2, 4),), (root(3),), True),
        ((root(3),), (root(3),), False),
        ((root(3),), (root(4),), False),
        ((root(3), entry(FIRST, 9)), (root(3), entry(FIRST, 8)), True),
        ((root(3), entry(FIRST, 5)), (root(3), entry(FIRST, 6)), False),
        ((root(3, 9), entry(FIRST)), (root(3), entry(FIRST)), False),  # of the same round, with more of the parent
        ((root(9),), (root(3), entry(FIRST)), False),
        ((root(3), entry(FIRST, 9)), (root(4),), False),
        ((root(3), entry(FIRST, 9)), (root(3), entry(SIBLING)), False),
        ((root(3),), (), False),
        ((), (root(3),), False),
        ((), (), False),
    ],
)
def test_chain_is_later_only_at_a_later_round_of_the_same_lineage(chain, other, expected):
    assert later(chain, other) == expected


# --- order


def assert_prevails(better, worse):
    assert prevails(better, worse) and not prevails(worse, better)


def test_any_lineage_prevails_over_a_peer_without_a_state():
    for chain in (CHAIN[:1], CHAIN):
        assert_prevails(chain, ())
    assert not prevails((), ())


def test_lineage_that_continued_with_a_quorum_prevails_over_one_founded_from_an_earlier_round():
    for orphan in (entry(SIBLING), entry(SIBLING, 900)):
        assert_prevails((root(4),), (root(3), orphan))
    assert_prevails((root(3), entry(FIRST, 6)), (root(3), entry(FIRST, 5), entry(SECOND, 900)))


def test_lineage_that_continued_prevails_over_descendants_of_those_founded_from_an_earlier_round():
    """The first of the forks after the common lineages counts, not the last one."""
    assert_prevails((root(4),), (root(3), entry(SIBLING, 8), entry(fork_of(8, CAT))))


def test_lineage_that_did_not_continue_gives_way_to_those_founded_from_it():
    for rounds in ((3,), (2,), ()):
        assert_prevails((root(3), entry(SIBLING)), (root(*rounds),))
    assert_prevails(CHAIN, CHAIN[:2])
    assert_prevails(CHAIN, CHAIN[:1])


def assert_prevails_with_the_same_parent(better, worse):
    """Compare two lineages founded in the first one, however far either continues."""
    for more, other in itertools.product(((), (50,)), repeat=2):
        assert_prevails((root(9), entry(better, *more)), (root(9), entry(worse, *other)))


def test_lineage_that_contains_more_of_the_parent_prevails():
    assert_prevails_with_the_same_parent(fork_of(4, FAY), fork_of(3, ANN, BEN, CAT))


def test_lineage_with_more_members_of_the_parent_prevails_if_the_rounds_are_equal():
    assert_prevails_with_the_same_parent(fork_of(3, ANN, BEN), fork_of(3, CAT, EVE, FAY))


@pytest.mark.parametrize("others", [(), (EVE,), (EVE, FAY)])
def test_lineage_with_the_most_senior_member_prevails_however_many_others_have_founded_the_other(others):
    """Keys and lives cost nothing: a member could make as many founders as it likes, also much later."""
    old = {**LIVES, CAT: bytes(LIFE), DAN: bytes(LIFE)}
    assert_prevails_with_the_same_parent(fork_of(3, ANN, DAN), fork_of(3, BEN, CAT, *others, lives=old))
    assert_prevails_with_the_same_parent(fork_of(3, BEN), fork_of(3, CAT, *others, lives=old))


def test_lineage_with_more_founders_prevails_if_no_founder_is_a_member():
    stranger = bytes([9]) * 32
    old = {**LIVES, stranger: bytes(LIFE)}
    assert_prevails_with_the_same_parent(fork_of(3, EVE, FAY), fork_of(3, stranger, lives=old))


def names_against(better, worse):
    """Return bases with which the name of the fork `worse` is above that of `better`, so that names do not help it."""
    for number in range(256):
        one, other = better(base=bytes([number]) * 32), worse(base=bytes([number]) * 32)
        if name_of_fork(one) < name_of_fork(other):
            return one, other
    raise AssertionError("no such name")


def test_run_that_its_founder_founded_first_prevails_over_its_second_foundation():
    """The founder has lost its folder; peers of the first foundation continue, and its own next life gives way."""
    times = [{ANN: wall.to_bytes(6) + bytes([wall]) * (LIFE - 6)} for wall in (7, 8)]
    first, second = names_against(
        lambda **more: root(lives=times[0], **more).fork, lambda **more: root(lives=times[1], **more).fork
    )
    for rounds, others in itertools.product(((), (90,)), repeat=2):
        assert_prevails((entry(first, *rounds),), (entry(second, *others),))
    assert_prevails((entry(first),), (entry(second, 3), entry(fork_of(3, ANN, BEN, CAT))))


def test_lineage_with_older_lives_prevails_if_all_else_is_equal():
    old, new = ((1000).to_bytes(6) + b"\xff" * (LIFE - 6), (1001).to_bytes(6) + bytes(LIFE - 6))
    assert_prevails_with_the_same_parent(
        *names_against(
            lambda **more: fork_of(3, ANN, BEN, lives={ANN: old, BEN: new}, **more),
            lambda **more: fork_of(3, ANN, BEN, lives={ANN: new, BEN: new}, **more),
        )
    )


def test_lineage_that_others_have_joined_prevails_over_one_that_its_founder_founded_again():
    """The founder came back with an old state; the first lineage has later rounds, also in lineages founded in it."""
    first, again = fork_of(3, ANN), fork_of(3, ANN, lives={ANN: bytes(LIFE)})
    proposal = Proposal(9, 0, Ballot(1, ANN), (ANN, BEN), (ANN, BEN), (), (), None, ())
    joined = ChainEntry(first, (Certificate((ANN,), LIVES[ANN], Commit(proposal, bytes(32), ()), ()),))
    assert_prevails((root(3), joined), (root(3), entry(again, 9)))
    assert_prevails((root(3), joined, entry(fork_of(9, BEN, before=(ANN, BEN)))), (root(3), entry(again, 9)))


def test_run_with_other_members_prevails_over_one_that_its_founder_founded_alone_with_an_older_life():
    """A clock that was set back must not end a run of others."""
    alone = root(9, lives={ANN: bytes(LIFE)})
    joined = root()
    proposal = Proposal(9, 0, Ballot(1, ANN), (ANN, BEN), (ANN, BEN), (), (), None, ())
    certificate = Certificate((ANN,), LIVES[ANN], Commit(proposal, bytes(32), ()), ())
    assert_prevails((ChainEntry(joined.fork, (certificate,)),), (alone,))
    assert_prevails((alone,), (joined,))


def test_lineages_that_differ_only_in_their_base_are_ordered_by_their_names():
    forks = [fork_of(3, ANN, base=bytes([number]) * 32) for number in range(8)]
    worse, better = sorted(forks, key=name_of_fork)[0], sorted(forks, key=name_of_fork)[-1]
    assert_prevails_with_the_same_parent(better, worse)


def test_no_lineage_prevails_over_itself_at_another_round():
    for chain in ((root(9),), (root(9), entry(FIRST, 9)), CHAIN):
        earlier = (*chain[:-1], ChainEntry(chain[-1].fork))
        assert not prevails(chain, chain) and not prevails(chain, earlier) and not prevails(earlier, chain)


def test_order_is_decided_where_two_lineages_part():
    """Later forks of one of them do not count."""
    strong, weak = fork_of(3, ANN, BEN), fork_of(3, CAT)
    again = fork_of(9, CAT, DAN, EVE, before=(CAT, DAN, EVE))
    assert_prevails((root(3), entry(strong)), (root(3), entry(weak, 9), entry(again, 50)))
    assert_prevails((root(3), entry(strong, 4), entry(fork_of(4, FAY))), (root(3), entry(weak, 9), entry(again, 50)))


ROUNDS = st.integers(0, 3)


@st.composite
def trees(draw, chains=1):
    """Return `chains` chains of each lineage in a random tree of forks, with one or two first lineages.

    The chains of a lineage prove different rounds of it. A base is never that of another fork, because it covers the
    parent lineage.
    """
    paths = []  # (ancestors, fork)
    for number in range(draw(st.integers(1, 2))):
        paths.append(((), root(lives={ANN: bytes([draw(ROUNDS)]) * LIFE}, base=bytes([200 + number]) * 32).fork))
    for number in range(draw(st.integers(1, 6))):
        ancestors, parent = draw(st.sampled_from(paths))
        round = parent.round + draw(ROUNDS)
        members = draw(st.sets(st.sampled_from(IDS), min_size=1, max_size=3))
        lives = {peer: bytes([draw(st.integers(0, 1))]) * LIFE for peer in sorted(members)}
        fork = fork_of(round, *members, base=bytes([draw(st.integers(0, 1)), number]) * 16, lives=lives)
        proofs = (round,) if round > parent.round else ()
        paths.append(((*ancestors, entry(parent, *proofs)), fork))
    found = []
    for ancestors, fork in paths:
        for step in draw(st.lists(ROUNDS, min_size=chains, max_size=chains, unique=True)):
            found.append((*ancestors, entry(fork, *((fork.round + step,) if step else ()))))
    return found


@given(trees())
def test_order_of_lineages_is_total_and_antisymmetric(chains):
    for one, other in itertools.combinations([(), *chains], 2):
        assert prevails(one, other) != prevails(other, one)


@given(trees())
def test_order_of_lineages_is_transitive(chains):
    for one, two, three in itertools.permutations([(), *chains], 3):
        if prevails(one, two) and prevails(two, three):
            assert prevails(one, three)


@given(trees(chains=2))
def test_order_of_lineages_and_their_rounds_is_total_and_transitive(chains):
    """Peers may know a lineage at different rounds; then `prevails` and `later` together order what they know."""

    def above(one, other):
        return prevails(one, other) or later(one, other)

    for one, other in itertools.combinations(chains, 2):
        assert above(one, other) != above(other, one)
        assert not (prevails(one, other) and later(one, other))
    for one, two, three in itertools.permutations(chains, 3):
        if above(one, two) and above(two, three):
            assert above(one, three)


@given(trees())
def test_one_lineage_prevails_over_all_others_of_a_run(chains):
    assert sum(all(prevails(one, other) for other in chains if other is not one) for one in chains) == 1


@given(trees(chains=2))
def test_order_changes_only_when_a_lineage_continues_that_others_were_founded_in(chains):
    """It then prevails over them, and does not give way again."""
    for one, further in itertools.permutations(chains, 2):
        if not later(further, one):
            continue
        for other in chains:
            if lineage_of(other) == lineage_of(one):
                continue
            if descends(other, lineage_of(one)):
                assert prevails(further, other) or not prevails(one, other)
            else:
                assert prevails(further, other) == prevails(one, other)
                assert prevails(other, further) == prevails(other, one)


# --- proof


def test_signed_fork_is_proved():
    for fork in (ROOT, FIRST, SECOND, fork_of(3, *IDS)):
        assert proved(fork, 0, verify, admits)


def altered(**changes):
    return msgspec.structs.replace(FIRST, **changes)


@pytest.mark.parametrize(
    "fork",
    [
        altered(round=4),
        altered(base=b"c" * 32),
        altered(members=(ANN, CAT)),
        altered(members=(BEN, ANN)),
        altered(members=(ANN, ANN)),
        altered(members=(ANN,), lives=LIVES[ANN], signatures=FIRST.signatures[:1]),
        altered(lives=FIRST.lives[::-1]),
        altered(lives=FIRST.lives[:-1]),
        altered(lives=FIRST.lives + LIVES[CAT]),
        altered(lives=b""),
        altered(signatures=FIRST.signatures[:1]),
        altered(signatures=FIRST.signatures[::-1]),
        altered(signatures=(*FIRST.signatures, b"")),
        altered(signatures=(b"", b"")),
        altered(signatures=(FIRST.signatures[0], b"")),
        altered(signatures=()),
    ],
    ids=[
        *("round", "base", "another founder", "unsorted", "twice", "founder left out", "lives swapped", "life cut"),
        *("life added", "no lives", "signature missing", "signatures swapped", "signature added", "unsigned"),
        *("one unsigned", "no signatures"),
    ],
)
def test_forged_fork_is_not_proved(fork):
    assert not proved(fork, 0, verify, admits)


@pytest.mark.parametrize(
    "members", [(BEN, ANN), (ANN, ANN), (ANN, ANN, BEN)], ids=["unsorted", "twice", "twice and another"]
)
def test_signed_fork_with_unsorted_or_repeated_founders_is_not_proved(members):
    signatures = tuple(sign(peer, Found(3, 0, BASE, members, LIVES[peer])) for peer in members)
    lives = b"".join(LIVES[peer] for peer in members)
    assert not proved(Fork(3, BASE, IDS, members, lives, signatures), 0, verify, admits)


def test_fork_whose_founder_has_signed_a_shorter_life_is_not_proved():
    life = LIVES[ANN][:-1]
    fork = Fork(3, BASE, IDS, (ANN,), life, (sign(ANN, Found(3, 0, BASE, (ANN,), life)),))
    assert not proved(fork, 0, verify, admits)


@pytest.mark.parametrize("tokens", [(), (EVE,), (EVE, b""), (b"", FAY), (FAY, EVE), (EVE, FAY, FAY), (ANN, EVE, FAY)])
def test_fork_without_the_tokens_of_its_new_founders_is_not_proved(tokens):
    fork = fork_of(3, ANN, EVE, FAY)
    assert fork.tokens == (EVE, FAY) and proved(fork, 0, verify, admits)
    assert not proved(msgspec.structs.replace(fork, tokens=tokens), 0, verify, admits)


def test_fork_of_another_fragment_is_not_proved():
    fork = fork_of(3, ANN, fragment=1)
    assert proved(fork, 1, verify, admits) and not proved(fork, 0, verify, admits)


@pytest.mark.parametrize(
    ("parent", "fork", "strangers"),
    [
        (root(1, 3), fork_of(3, EVE, FAY), True),
        (root(1), fork_of(1, EVE, FAY), True),
        (root(1, 3), fork_of(3, ANN, FAY), False),  # one founder is a member
        (root(1, 3), fork_of(2, EVE, FAY), False),  # not its newest round
        (root(1, 3), fork_of(4, EVE, FAY), False),  # a lost stage made again
        (root(), fork_of(0, EVE, FAY), False),  # the parent has no round
    ],
)
def test_lineage_of_strangers_is_founded_in_the_newest_round_without_its_members(parent, fork, strangers):
    assert by_strangers(parent, entry(fork)) is strangers
