"""Rates per link, measured only while nothing else uses the uplink."""

from __future__ import annotations

import pytest
from thinwire.collectives.transport.sending.link_rates import FADES, KEPT, LEAST, LinkRates

A, B = bytes([1]) * 32, bytes([2]) * 32


def flow(ways, peer, began, seconds, nbytes, pieces=8):
    """Frames wait for a peer for so long, and so much leaves."""
    ways.wait(peer, began)
    for piece in range(pieces):
        ways.sent(peer, nbytes // pieces, began + (piece + 1) * seconds / pieces)
    ways.over(peer, began + seconds)
    return began + seconds


def test_link_rate_is_measured_while_frames_wait_for_one_peer():
    ways = LinkRates()
    now = flow(ways, A, 5.0, 2.0, 2_000_000)
    assert ways.rates(now) == {A: 1e6}
    now = flow(ways, A, now + 100.0, 1.0, 2_000_000)
    assert ways.rates(now) == {A: pytest.approx(1.3e6)}


def test_short_or_small_transfers_give_no_link_rate():
    ways = LinkRates()
    flow(ways, A, 0.0, 0.1, 10 * LEAST)
    flow(ways, A, 1.0, 5.0, LEAST // 2)
    assert ways.rates(10.0) == {}


def test_concurrent_transfers_do_not_count_for_link_rate():
    ways = LinkRates()
    ways.wait(A, 0.0)
    ways.wait(B, 0.0)
    for second in range(1, 5):
        ways.sent(A, 500_000, float(second))
        ways.sent(B, 500_000, float(second))
    ways.over(B, 4.0)
    assert ways.rates(4.0) == {}
    ways.sent(A, 1_000_000, 5.0)
    ways.over(A, 5.0)
    assert ways.rates(5.0) == {A: 1e6}


def test_immediate_sends_to_others_do_not_count_for_link_rate():
    ways = LinkRates()
    ways.wait(A, 0.0)
    ways.sent(A, 1_000_000, 1.0)
    ways.sent(B, 1_000_000, 2.0)
    ways.sent(A, LEAST, 2.5)
    ways.over(A, 2.5)
    assert ways.rates(2.5) == {A: LEAST / 0.5}


def test_link_rates_expire_and_are_bounded():
    ways, now = LinkRates(), 0.0
    for index in range(KEPT + 5):
        now = flow(ways, index.to_bytes(32, "big"), now, 1.0, LEAST)
    assert len(ways.rates(now)) == KEPT and bytes(32) not in ways.rates(now)
    assert ways.rates(now + FADES) == {}
