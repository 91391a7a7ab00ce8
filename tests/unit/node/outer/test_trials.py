"""Opinions about newcomers on trial."""

from __future__ import annotations

import math

import pytest
from thinwire.node.outer.trials import FAILURES, Candidate, copied
from thinwire.swarm.messages.registry import Ready


def judged(*deltas, required=5):
    candidate = Candidate()
    for assigned, other in deltas:
        candidate.judge(assigned, other, required)
    return candidate


GOOD, BAD, FLIPPED = (2.0, 1.0), (1.0, 2.0), (-1.0, -2.0)


def test_candidate_is_endorsed_after_the_required_rounds_with_good_scores():
    assert not judged(*[GOOD] * 4).endorsed and judged(*[GOOD] * 5).endorsed
    assert judged(*[GOOD] * 5).score == pytest.approx(1 - 0.95**5)


def test_candidate_that_trains_on_other_data_is_not_endorsed():
    assert not judged(*[GOOD, BAD] * 30).endorsed


@pytest.mark.parametrize("deltas", [(0.0, 0.0), FLIPPED, (math.nan, 1.0), (math.inf, 0.0)])
def test_candidate_without_progress_is_not_endorsed(deltas):
    candidate = judged(*[deltas] * 10)
    assert not candidate.endorsed and candidate.score < 0.0


def test_endorsement_ends_after_consecutive_failures_until_the_next_success():
    candidate = judged(*[GOOD] * 40, *[FLIPPED] * (FAILURES - 1))
    assert candidate.endorsed
    candidate.judge(*FLIPPED, 5)
    assert not candidate.endorsed and "does not lower" in candidate.told(5)
    candidate.judge(*GOOD, 5)
    assert candidate.endorsed and candidate.told(5).startswith("44 rounds scored")


def _said(**hashes):
    return {name.encode(): Ready(1, 0, 1, bytes(32), bytes(32), 1, one, True, 0.0, 0.0) for name, one in hashes.items()}


def test_copied_finds_a_chunk_that_another_peer_has_announced():
    said = _said(a=b"1" * 32 + b"2" * 32, b=b"3" * 32 + b"2" * 32, c=b"4" * 64)
    assert copied(b"a", said, [b"b"]) and copied(b"b", said, []) and not copied(b"c", said, [b"a", b"b"])


def test_chunks_that_several_members_have_are_no_copy():
    """A frozen part of the model is the same for all peers."""
    said = _said(a=bytes(32) + b"1" * 32, b=bytes(32) + b"2" * 32, c=bytes(32) + b"3" * 32)
    assert not copied(b"c", said, [b"a", b"b"]) and copied(b"c", said, [b"a"])
