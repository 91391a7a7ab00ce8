"""Contributions of this peer that members ask for after their announcement."""

import weakref
from types import SimpleNamespace

import blake3
import numpy as np
import pytest
from kit.rounds.round_harness import FakeSendQueue
from thinwire.collectives.state_sync.chunk_transfer import IN_FLIGHT
from thinwire.node.outer.verification.own_contributions import LENT, TIMES, OwnContributions, name_of
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Ask, Chunk, Fetch

MEMBER, STRANGER = b"m" * 32, b"s" * 32


def announcement(round, attempt=1):
    return SimpleNamespace(round=round, attempt=attempt, hashes=bytes([round]) * 64)


def request(round, *indices):
    return Frame(Fetch(round, 0, name_of(bytes([round]) * 64), indices))


@pytest.fixture
def scene():
    queue = FakeSendQueue()
    return OwnContributions(SimpleNamespace(members=(MEMBER,)), queue, 0, needed=True), queue


def sent(queue):
    return [(peer, message.round, message.index) for peer, message, _ in queue.of(Chunk)]


def test_lender_sends_each_requested_chunk_once_to_a_member(scene):
    own, queue = scene
    own.announced(announcement(3), (b"a", b"b"))
    assert own.takes(MEMBER, request(3, 1, 0, 1, 7)) and sent(queue) == [(MEMBER, 3, 1), (MEMBER, 3, 0)]
    assert own.takes(STRANGER, request(3, 0)) and sent(queue) == []
    assert not own.takes(MEMBER, request(4, 0)) and not own.takes(MEMBER, Frame(Ask(3, 0)))


def test_lender_takes_no_request_for_results_that_are_its_contribution(scene):
    """They are, if it was the sole contributor; the peer that is late needs them as results."""
    own, queue = scene
    own.announced(announcement(3), (b"a", b"b"))
    results = Fetch(3, 0, blake3.blake3(bytes([3]) * 64).digest(), (0,))
    assert not own.takes(MEMBER, Frame(results)) and sent(queue) == []


def test_lender_stores_the_last_contributions_only(scene):
    own, queue = scene
    for round in range(1, LENT + 2):
        own.announced(announcement(round), (bytes([round]),))
    assert own.of(1) == () and [own.of(round) for round in range(2, LENT + 2)] == [(b"\2",), (b"\3",)]
    own.announced(announcement(LENT + 1, 2), (b"again",))
    assert own.of(LENT + 1) == (b"again",)


def test_lender_has_only_the_last_contribution_while_another_is_encoded(scene):
    own, queue = scene
    first, last = (np.zeros(1),), (np.ones(1),)
    gone = weakref.ref(first[0])
    own.announced(announcement(1), first)
    own.announced(announcement(2), last)
    del first
    own.make_room()
    assert gone() is None and own.of(2) is last and own.takes(MEMBER, request(2, 0))
    assert not own.takes(MEMBER, request(1, 0))
    own.make_room()
    assert own.of(2) is last


def test_lender_does_not_answer_a_member_with_a_full_queue(scene):
    own, queue = scene
    own.announced(announcement(3), (b"a",))
    queue.waiting = 2 * IN_FLIGHT + 1
    assert own.takes(MEMBER, request(3, 0)) and sent(queue) == []


def test_lender_sends_a_chunk_to_each_member_at_most_twice(scene):
    own, queue = scene
    own.announced(announcement(3), (b"a", b"b"))
    for _ in range(5):
        assert own.takes(MEMBER, request(3, 0))
    assert sent(queue) == [(MEMBER, 3, 0)] * TIMES


def test_lender_stores_nothing_in_a_run_without_scores_and_audits():
    own = OwnContributions(SimpleNamespace(members=(MEMBER,)), FakeSendQueue(), 0, needed=False)
    own.announced(announcement(3), (b"a",))
    assert own.of(3) == () and not own.takes(MEMBER, request(3, 0))
