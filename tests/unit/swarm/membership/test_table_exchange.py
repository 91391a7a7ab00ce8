"""Exchange of whole tables: times of requests, the peer to ask, and limits of answers."""

from __future__ import annotations

import random

import pytest
from thinwire.swarm.membership.gossip_intake import VERIFY_BURST
from thinwire.swarm.membership.presets import LAN
from thinwire.swarm.membership.table_exchange import TableExchange
from thinwire.swarm.membership.view import LivePeers

IDS = [bytes([i]) * 32 for i in range(6)]


def live_of(*peers):
    live = LivePeers(IDS[0])
    for peer in peers:
        live.add(peer)
    return live


@pytest.fixture
def tables():
    return TableExchange(LAN, random.Random(1), 100.0)


def test_first_request_comes_at_a_random_time_in_the_first_period():
    dues = {TableExchange(LAN, random.Random(seed), 100.0).due for seed in range(20)}
    assert len(dues) == 20 and all(100.0 <= due <= 100.0 + LAN.push_pull_period for due in dues)


def test_random_peer_is_asked_and_the_next_request_is_a_period_later(tables):
    live = live_of(*IDS[1:])
    assert {tables.begin(live, 200.0) for _ in range(100)} == set(IDS[1:])
    assert tables.due == 200.0 + LAN.push_pull(live.size)


def test_period_is_longer_in_a_large_swarm(tables):
    tables.begin(live_of(*(bytes([i]) * 32 for i in range(1, 64))), 200.0)
    assert tables.due == 200.0 + LAN.push_pull(64) > 200.0 + LAN.push_pull_period


def test_nobody_is_asked_while_this_peer_is_alone(tables):
    assert tables.begin(live_of(), 200.0) is None and tables.due > 200.0


def test_first_peer_that_is_found_is_asked_at_once(tables):
    tables.on_first_peer(100.5)
    assert tables.due == 100.5


@pytest.mark.parametrize("live", [True, False])
def test_peer_of_another_part_is_asked_next_if_it_is_still_live(tables, live):
    tables.on_admission(IDS[5], 150.0)
    assert tables.due == 150.0
    peers = live_of(*IDS[1:]) if live else live_of(IDS[1])
    assert tables.begin(peers, 150.0) == (IDS[5] if live else IDS[1])
    assert {tables.begin(peers, 200.0) for _ in range(100)} == set(peers.others()), "only once"


def test_other_part_is_not_asked_within_a_probe_period_of_the_last_request(tables):
    tables.begin(live_of(IDS[1]), 150.0)
    due = tables.due
    tables.on_admission(IDS[5], 150.0 + LAN.probe_period - 0.01)
    assert tables.due == due
    tables.on_admission(IDS[5], 150.0 + LAN.probe_period)
    assert tables.due == 150.0 + LAN.probe_period


def test_incomplete_table_is_continued_soon_but_never_later_than_planned(tables):
    tables.due = 1000.0
    tables.request_rest(200.0)
    assert tables.due == 200.0 + VERIFY_BURST
    tables.request_rest(300.0)
    assert tables.due == 200.0 + VERIFY_BURST


def test_each_peer_gets_one_answer_in_a_probe_period(tables):
    times = [200.0, 200.0 + LAN.probe_period - 0.01, 200.0 + LAN.probe_period]
    assert [tables.admits(IDS[1], now) for now in times] == [True, False, True]
    assert tables.admits(IDS[2], 200.0)


def test_own_request_forgets_the_answers_before_it(tables):
    assert tables.admits(IDS[1], 200.0)
    tables.begin(live_of(IDS[1]), 200.0)
    assert tables.admits(IDS[1], 200.0)
