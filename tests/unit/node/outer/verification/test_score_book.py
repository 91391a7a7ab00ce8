"""Scores of newcomers and of members."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.node.outer.verification.score_book import FAILURES, MOST, ScoreBook, copied, equal_step
from thinwire.swarm.messages.registry import Ready

PEER, OTHER, *MORE = [bytes([index]) * 32 for index in range(16)]
GOOD, BAD, FLIPPED = (2.0, 1.0), (1.0, 2.0), (-1.0, -2.0)
OURS = (1.0, 1.0)


def judged(*falls, required=5):
    """Return the opinion about a newcomer."""
    book = ScoreBook(required)
    for one in falls:
        book.judge_newcomer(PEER, one)
    return book.of(PEER)


def test_newcomer_is_endorsed_after_the_required_rounds_with_good_scores():
    assert not judged(*[GOOD] * 4).endorsed and judged(*[GOOD] * 5).endorsed
    assert judged(*[GOOD] * 5).score == pytest.approx(1 - 0.95**5)


def test_newcomer_that_trains_on_other_data_is_not_endorsed():
    assert not judged(*[GOOD, BAD] * 30).endorsed


@pytest.mark.parametrize("falls", [(0.0, 0.0), FLIPPED, (math.nan, 1.0), (math.inf, 0.0)])
def test_newcomer_without_progress_is_not_endorsed(falls):
    opinion = judged(*[falls] * 10)
    assert not opinion.endorsed and opinion.score < 0.0


def test_endorsement_ends_after_consecutive_failures_until_the_next_success():
    book = ScoreBook(5)
    for falls in [GOOD] * 40 + [FLIPPED] * (FAILURES - 1):
        book.judge_newcomer(PEER, falls)
    assert book.of(PEER).endorsed
    assert not book.judge_newcomer(PEER, FLIPPED).endorsed and "does not lower" in book.of(PEER).summary
    assert book.judge_newcomer(PEER, GOOD).endorsed and "after 44 contributions" in book.of(PEER).summary


def calibrated(evaluations=40):
    """Return a book that has seen many honest contributions, none of which has lost."""
    book = ScoreBook(5)
    for _ in range(evaluations):
        book.judge_member(OTHER, (1.0, 1.1), OURS)
    return book


@pytest.mark.parametrize("falls", [FLIPPED, (0.0, 0.0), (0.05, 0.0), (math.nan, 3.0)])
def test_member_is_distrusted_after_some_losses_and_trusted_after_one_good_contribution(falls):
    book, count = calibrated(), 0
    while not book.distrusts(PEER):
        book.judge_member(PEER, falls, OURS)
        count += 1
    assert FAILURES <= count <= 4 and book.of(PEER).score < 0.0 and not book.distrusts(OTHER)
    book.judge_member(PEER, (0.5, 0.5), OURS)
    assert not book.distrusts(PEER)


def test_member_with_a_small_part_of_our_progress_does_not_lose():
    book = calibrated()
    for _ in range(10):
        book.judge_member(PEER, (0.2, 0.1), OURS)
    assert not book.distrusts(PEER) and book.of(PEER).score > 0.3


def test_evaluation_in_which_neither_lowers_the_loss_says_nothing():
    book = calibrated()
    for _ in range(50):
        assert book.judge_member(PEER, FLIPPED, (-0.1, 0.0)) is None
    assert not book.of(PEER).rounds and not book.distrusts(PEER)


def test_new_book_needs_more_losses_than_one_that_knows_honest_peers():
    book, count = ScoreBook(5), 0
    while not book.distrusts(PEER):
        book.judge_member(PEER, FLIPPED, OURS)
        count += 1
    assert count > 6


def test_unsent_contributions_count_as_losses():
    book = calibrated()
    for _ in range(5):
        book.unsent(PEER)
    assert book.distrusts(PEER) and "not sent" in book.of(PEER).summary


@pytest.mark.parametrize("noise", [0.5, 1.0, 10.0])
def test_honest_members_are_hardly_ever_distrusted_at_any_level_of_noise(noise):
    """Their true progress is 1; with a noise of 10 every second evaluation is decided by chance."""
    rng, wrong, seen = np.random.default_rng(1), 0, 0
    for _ in range(20):
        book = ScoreBook(5)
        for turn in range(600):
            theirs, ours = (1.0 + noise * rng.standard_normal(2) for _ in range(2))
            book.judge_member(MORE[turn % 8], (theirs[0], theirs[1]), (ours[0], ours[1]))
            wrong, seen = wrong + sum(map(book.distrusts, MORE[:8])), seen + 8
    assert wrong < 0.004 * seen


def test_losses_of_liars_do_not_hide_how_often_honest_peers_lose():
    rng, found = np.random.default_rng(2), []
    for liars in (0, 5):
        book = ScoreBook(5)
        for turn in range(2000):
            theirs, ours = (float(1.0 + 3.0 * rng.standard_normal()) for _ in range(2))
            theirs = -1.0 if turn % 8 < liars else theirs
            book.judge_member(MORE[turn % 8], (theirs, theirs), (ours, ours))
        found.append(book.chance)
    assert 0.2 < found[0] and abs(found[0] - found[1]) < 0.15


def test_every_member_is_drawn_in_turn_and_newcomers_half_of_the_time():
    book, drawn = ScoreBook(5), []
    for round in range(300):
        drawn.append(book.choose(b"secret" + round.to_bytes(4, "big"), MORE[:10], [PEER]))
    assert 110 < drawn.count(PEER) < 190
    members = [peer for peer in drawn if peer != PEER]
    gaps = [members[at + 1 :].index(peer) for at, peer in enumerate(members[:-60])]
    assert max(gaps) < 50 and set(members[:40]) == {*MORE[:10]}


def test_draws_depend_on_the_secret():
    drawn = {ScoreBook(5).choose(bytes([secret]), MORE, []) for secret in range(50)}
    assert len(drawn) >= len(MORE) // 2


def test_member_that_lost_is_drawn_again_until_its_case_is_clear():
    book = calibrated()
    while not book.distrusts(PEER):
        book.judge_member(PEER, FLIPPED, OURS)
        if not book.distrusts(PEER):
            assert book.choose(bytes(8), [PEER, OTHER, *MORE], []) == PEER
    assert {book.choose(bytes([one]), [PEER, *MORE], []) for one in range(9)} != {PEER}


@pytest.mark.parametrize(("liars", "most"), [(0, 40), (8, 90), (63, 500)])
def test_honest_newcomer_passes_soon_whatever_the_number_of_liars(liars, most):
    """If all newcomers were drawn equally often, it would take some 16 · (liars + 1) rounds."""
    taken = []
    for seed in range(5):
        book, newcomers = ScoreBook(8), [PEER, *(bytes([1, number]) * 16 for number in range(liars))]
        for round in itertools.count(1):
            peer = book.choose(bytes([seed]) + round.to_bytes(4, "big"), MORE[:10], newcomers)
            if peer in newcomers:
                book.judge_newcomer(peer, GOOD if peer == PEER else FLIPPED)
            if book.of(PEER).endorsed:
                break
        taken.append(round)
    assert sorted(taken)[2] < most


def test_newcomers_that_copy_do_not_keep_an_honest_one_from_passing():
    """A copy lowers the loss on both batches alike: its score is a random walk."""
    rng, book, copies = random.Random(1), ScoreBook(8), [bytes([1, number]) * 16 for number in range(63)]
    for round in itertools.count(1):
        peer = book.choose(round.to_bytes(4, "big"), MORE[:10], [PEER, *copies])
        if peer in (PEER, *copies):
            book.judge_newcomer(peer, GOOD if peer == PEER or rng.random() < 0.5 else BAD)
        if book.of(PEER).endorsed:
            break
    assert round < 700


def test_newcomer_that_has_passed_here_takes_no_draws_from_others():
    book = ScoreBook(3)
    for _ in range(3):
        book.judge_newcomer(PEER, GOOD)
    drawn = Counter(book.choose(round.to_bytes(4, "big"), [], [PEER, OTHER]) for round in range(200))
    assert book.of(PEER).endorsed and 120 < drawn[OTHER] < 180  # a half, and a half of the rest


def test_newcomer_fails_after_some_bad_evaluations_until_its_score_is_good():
    book = ScoreBook(8)
    assert not book.failed(PEER)
    for number, good in enumerate((False, False, False, True, True, True), 1):
        book.judge_newcomer(PEER, GOOD if good else FLIPPED)
        assert book.failed(PEER) == (number == 3)


def test_book_is_bounded_and_keeps_members_before_newcomers():
    book = calibrated(5)
    for number in range(MOST + 50):
        book.judge_newcomer(number.to_bytes(32, "little"), BAD)
    assert len(book.opinions) == MOST and book.of(OTHER).rounds == 5


@given(st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4), st.floats(0.01, 1e6))
def test_equal_step_has_our_length_and_their_direction(theirs, scale):
    theirs, ours = np.array(theirs, np.float32), np.array([3, 0, 4, 0], np.float32)
    step = equal_step(theirs * np.float32(scale), ours)
    if np.linalg.norm(theirs) > 1e-6:
        assert np.linalg.norm(step) == pytest.approx(5.0, rel=1e-4)
        assert np.dot(step, theirs) > 0
    assert not equal_step(np.array([math.nan, 1, 0, 0], np.float32), ours).any()
    assert not equal_step(np.array([math.inf, 1, 0, 0], np.float32), ours).any()


def _said(**hashes):
    return {name.encode(): Ready(1, 0, 1, bytes(32), bytes(32), 1, one, True, 0.0, 0.0) for name, one in hashes.items()}


def test_copied_finds_a_chunk_that_another_peer_has_announced():
    said = _said(a=b"1" * 32 + b"2" * 32, b=b"3" * 32 + b"2" * 32, c=b"4" * 64)
    assert copied(b"a", said, [b"b"]) and copied(b"b", said, []) and not copied(b"c", said, [b"a", b"b"])


def test_chunks_that_several_members_have_are_no_copy():
    """A frozen part of the model is the same for all peers."""
    said = _said(a=bytes(32) + b"1" * 32, b=bytes(32) + b"2" * 32, c=bytes(32) + b"3" * 32)
    assert not copied(b"c", said, [b"a", b"b"]) and copied(b"c", said, [b"a"])
