"""Requests for pieces of an all-gather: when, from which peer, and the part of a helper's stand-in."""

from __future__ import annotations

import pytest
from thinwire.collectives.topology.piece_requests import LATE, SOON, MissingPiece, PieceRequests
from thinwire.collectives.topology.relay_plan import RelayPlan, stand_in
from thinwire.swarm.messages.registry import Ballot, Contribution, Proposal

IDS = [bytes([i]) * 32 for i in range(5)]
SOURCE, HELPER = IDS[3], IDS[4]
PATIENCE = 2.0
OPENED = Proposal(
    1, 0, Ballot(1, IDS[0]), tuple(IDS), tuple(IDS), tuple(Contribution(peer, 1, 10) for peer in IDS), (), None, (), ()
)
DIRECT = MissingPiece(slot=6, piece=0, source=SOURCE, helper=None)
RELAYED = MissingPiece(slot=7, piece=1, source=SOURCE, helper=HELPER)


class Requests:
    """Requests of a peer; `ask` returns what it asks for at a time, with useful data at the time 10."""

    def __init__(self, me=IDS[0]):
        self.plan = RelayPlan(me)
        self.requests = PieceRequests(self.plan)

    def ask(self, now, *pieces, without=(), progressed_at=10.0):
        live = set(IDS).difference(without)
        return self.requests.plan(OPENED, pieces, live, progressed_at=progressed_at, now=now, patience=PATIENCE)


def asked(parts):
    return sorted(slot for part in parts.values() for slot in part)


def test_piece_of_a_reachable_sender_is_requested_when_it_is_late():
    one = Requests()
    assert one.ask(10.0 + LATE * PATIENCE - 0.01, DIRECT) == {}
    assert asked(one.ask(10.0 + LATE * PATIENCE, DIRECT)) == [6]
    assert one.ask(10.0 + LATE * PATIENCE + 0.5, DIRECT) == {}, "a request gets time for its answer"
    assert asked(one.ask(10.0 + 2 * LATE * PATIENCE, DIRECT)) == [6]


def test_piece_of_an_unreachable_contributor_is_requested_at_once_from_another_peer():
    parts = Requests().ask(10.0, DIRECT, without=[SOURCE])
    assert asked(parts) == [6] and not {SOURCE, IDS[0]} & parts.keys()


def test_nothing_is_requested_if_no_other_peer_is_reachable():
    assert Requests().ask(10.0, DIRECT, without=IDS[1:]) == {}


def test_requests_are_due_again_after_a_short_time():
    one = Requests()
    assert one.requests.due(10.0, PATIENCE)
    one.ask(10.0, DIRECT, without=[SOURCE])
    assert not one.requests.due(10.0 + SOON * PATIENCE - 0.01, PATIENCE)
    assert one.requests.due(10.0 + SOON * PATIENCE + 0.01, PATIENCE)


@pytest.mark.parametrize("me", IDS[:3])
def test_only_the_stand_in_of_an_unreachable_helper_asks_the_contributor_first(me):
    one, first = Requests(me), stand_in(OPENED, SOURCE, HELPER, RELAYED.piece)
    assert one.ask(10.0, RELAYED, without=[HELPER]) == ({SOURCE: [7]} if me == first else {})
    parts = one.ask(10.1, RELAYED, without=[HELPER])
    assert asked(parts) == [7] and me not in parts, "the stand-in has not passed it on"


def test_late_piece_is_left_to_the_stand_in_for_a_short_time():
    other = next(peer for peer in IDS[:3] if peer != stand_in(OPENED, SOURCE, HELPER, RELAYED.piece))
    one, now = Requests(other), 10.0 + LATE * PATIENCE
    assert one.ask(now, RELAYED) == {}
    assert one.ask(now + 2 * SOON * PATIENCE - 0.01, RELAYED) == {}
    assert asked(one.ask(now + 2 * SOON * PATIENCE + 0.01, RELAYED)) == [7]


def test_piece_whose_contributor_and_helper_are_unreachable_is_requested_from_the_others():
    parts = Requests().ask(10.0, RELAYED, without=[SOURCE, HELPER])
    assert asked(parts) == [7] and parts.keys() <= set(IDS[1:3])
