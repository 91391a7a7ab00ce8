"""What an origin can know of others' pace and links from when it hears of them."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.node.pipeline.eventkernel import BACKWARD, LOSS
from thinwire.node.pipeline.survey import ME, NEWEST, Survey

A, B, C = (bytes([i]) * 32 for i in range(3))
WORK = {A: 2.0, B: 0.5}
LINKS = {(ME, A): 1.0, (A, B): 3.0, (B, ME): 0.25}
WORDS = {A: 0.7, B: 0.1}
"""Seconds that a peer's words need to the origin."""


class Time:
    now = 0.0

    def __call__(self):
        return self.now


def link(a, b):
    return LINKS.get((a, b), LINKS.get((b, a)))


def go(survey, now, micro, *, backward=False, waits=(), late=False):
    """A micro-batch over A and B, or its gradient back, each `waits[i]` seconds late because it is busy. All words in order."""
    peers = (B, A) if backward else (A, B)
    survey.sent(micro, backward=backward)
    words, at = [], now.now
    for (before, peer), wait in zip(pairwise((ME, *peers)), waits or (0.0, 0.0), strict=True):
        work = WORK[peer] * (BACKWARD if backward else 1.0)
        at += link(before, peer) + wait + work
        words.append((at + WORDS[peer], peer, work))
    arrival = at + link(peers[-1], ME)
    for heard, peer, work in sorted(words):
        if heard <= arrival or late:
            now.now = max(now.now, heard)
            survey.passed(peer, micro, work, backward=backward)
    now.now = max(now.now, arrival)
    survey.arrived(micro, peers, backward=backward)


def scene():
    now = Time()
    return Survey(now), now


def test_links_there_and_back_are_what_they_are_however_late_words_come():
    survey, now = scene()
    for micro in range(3):
        now.now += 100.0
        go(survey, now, micro)
        now.now += 100.0
        go(survey, now, micro, backward=True)
    for a, b in ((ME, A), (A, B), (B, ME)):
        assert survey.delay(a, b) == survey.delay(b, a) == pytest.approx(LINKS[a, b])
    assert survey.work(A) == pytest.approx(2.0) and survey.work(B) == pytest.approx(0.5)
    assert survey.delay(A, C) is None and survey.work(C) is None and survey.work(ME) is None


def test_who_was_busy_says_little_of_the_way_to_it():
    survey, now = scene()
    now.now = 10.0
    go(survey, now, 0, waits=(0.0, 0.0))
    alone = survey.delay(A, B)
    for micro in range(1, 4):  # two at a time: the second waits for the first
        now.now += 50.0
        survey.sent(micro, backward=False)
        survey.sent(micro + 10, backward=False)
        start = now.now
        for at, peer, number, work in (
            (3.7, A, micro, 2.0), (5.7, A, micro + 10, 2.0), (6.6, B, micro, 0.5), (40.0, B, micro + 10, 33.4),
        ):  # fmt: skip
            now.now = start + at
            survey.passed(peer, number, work, backward=False)
        survey.arrived(micro, (A, B), backward=False)
        survey.arrived(micro + 10, (A, B), backward=False)
    assert survey.delay(A, B) == pytest.approx(alone)
    assert survey.delay(ME, A) == pytest.approx(1.0 + WORDS[A]), "one way only: with the words' time"
    waited = survey.waited()
    assert waited[A] == pytest.approx(3 * (2.0 + 4.0) + 2.0) and survey.waited() == {}


def test_a_few_strange_measurements_do_not_count():
    survey, now = scene()
    for micro in range(NEWEST):
        now.now += 100.0
        go(survey, now, micro, waits=(0.0, 30.0) if micro in (2, 5) else ())
    assert survey.delay(A, B) == pytest.approx(3.0 + WORDS[B] - WORDS[A])


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=12), st.booleans())
def test_what_a_peer_says_is_kept_within_what_can_be(said, backward):
    survey, now = scene()
    for micro, seconds in enumerate(said):
        now.now += 1.0
        survey.sent(micro, backward=backward)
        now.now += 2.0
        survey.passed(A, micro, seconds, backward=backward)
        survey.passed(A, micro, 1.0, backward=backward)  # twice: the first counts
        survey.passed(B, micro + 1, 1.0, backward=backward)  # of what is not under way
        survey.arrived(micro, (A, C), backward=backward)
    assert survey.work(A) is None, "of one direction only"
    for micro in range(2):
        survey.sent(micro, backward=not backward)
        survey.passed(A, micro, 0.0, backward=not backward)
    assert 0 < survey.work(A) <= 2.0
    assert survey.delay(ME, A) is None or 0 <= survey.delay(ME, A) <= 2.0


def test_the_origins_own_parts_do_not_count_the_time_that_they_waited_for_each_other():
    survey, now = scene()
    for micro in range(3):
        start = now.now
        for part, seconds in (("begin", 1.0), ("turn", LOSS), ("finish", BACKWARD)):
            now.now += seconds
            survey.own(part, start)  # all were asked for at once
        now.now += 7.0 * micro
    assert survey.work(ME) == pytest.approx(1.0)


def test_what_nobody_knows_is_taken_to_be_as_good_as_what_is_known():
    survey, now = scene()
    options = {"length": 2, "paths": 4, "rounds": 3, "room": 5, "swaps": 1}
    blank = survey.instance([[A], [B, C]], **options)
    assert set(blank.work) == {1.0} and set(blank.delays[~np.eye(4, dtype=bool)]) == {1.0}
    assert blank.stages == ((0,), (1,), (2, 3)) and list(blank.memory) == [4, 5, 5, 5]
    assert (blank.length, blank.per_start, blank.rounds, blank.swaps, blank.gap) == (2, 4, 3, 1, 0.0)
    now.now = 10.0
    go(survey, now, 0)
    now.now += 50.0
    go(survey, now, 0, backward=True)
    known = survey.instance([[A], [B, C]], **options)
    assert known.delays[1, 2] == known.delays[2, 1] == pytest.approx(3.0)
    assert known.delays[0, 3] == pytest.approx(1.0) and known.delays[1, 3] == pytest.approx(1.0), "C: the median"
    assert known.work[3] == pytest.approx((2.0 + 0.5) / 2) and list(np.diag(known.delays)) == [0.0] * 4
