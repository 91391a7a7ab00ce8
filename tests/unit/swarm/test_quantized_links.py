"""Quantized link measurements, and the link of two peers from both of their reports."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.swarm.messages.announcement import MAX_SPANS, MAX_STEP
from thinwire.swarm.messages.registry import Span
from thinwire.swarm.quantized_links import LEAST_RATE, LEAST_RTT, Measure, links, step, value
from thinwire.swarm.round_trip_times import NEAREST, Distances

IDS = [bytes([index]) * 32 for index in range(1, 60)]
A, B, C = IDS[:3]


@given(st.floats(LEAST_RTT, 100.0))
def test_quantized_value_is_near_the_original(seconds):
    assert value(step(seconds, LEAST_RTT), LEAST_RTT) == pytest.approx(seconds, rel=0.045)


@given(st.floats())
def test_every_value_has_a_quantized_step(seconds):
    found = step(seconds, LEAST_RTT)
    assert 0 <= found <= MAX_STEP and (found > 0) == (seconds > 0 and math.isfinite(seconds))
    assert (value(found, LEAST_RTT) > 0) == (found > 0)


@pytest.mark.parametrize(
    "wrong", [(b"short", 1, 1), (bytes(9), 1, 1), (bytes(8), MAX_STEP + 1, 0), (bytes(8), 0, -1), (bytes(8), 1)]
)
def test_invalid_span_is_no_message(wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=Span)


def test_rtt_is_the_shortest_of_recent_ones():
    known = Distances()
    assert known.rtt(A) == 0.0
    for seconds in (0.3, 0.1, 0.2):
        known.add(A, seconds)
    assert known.rtt(A) == 0.1
    for _ in range(8):
        known.add(A, 0.4)
    assert known.rtt(A) == 0.4, "a way that has become longer is longer, in the end"
    known.forget(A)
    assert known.rtt(A) == 0.0


def test_only_large_rtt_changes_are_announced():
    known = Distances()
    known.add(A, 0.1)
    first = known.spans([A], {})
    assert value(first[0].rtt, LEAST_RTT) == pytest.approx(0.1, rel=0.05)
    known.add(A, 0.085)
    assert known.spans([A], {}) == first
    known.add(A, 0.05)
    assert value(known.spans([A], {})[0].rtt, LEAST_RTT) == pytest.approx(0.05, rel=0.05)
    assert known.spans([A], {A: 1e6})[0].rate == step(1e6, LEAST_RATE) == known.spans([A], {A: 1.1e6})[0].rate
    assert known.spans([A], {})[0].rate == 0, "what is known no more is told no more"
    assert known.spans([B], {}) == () and known.spans([], {A: 1.0}) == ()


def test_spans_cover_nearest_peers_and_stay_stable():
    known, live = Distances(), IDS[:50]
    for index, peer in enumerate(live[:40]):
        known.add(peer, 0.5 * 0.9**index)
    first = known.spans(live, {})
    assert len(first) == MAX_SPANS
    nearest = {peer[:8] for peer in live[40 - NEAREST : 40]}
    assert nearest < {span.peer for span in first}
    for peer in live[40:]:
        known.add(peer, 0.45)
    assert known.spans(live, {}) == first, "nobody nearer, so nobody else"
    known.add(live[45], 0.001)
    later = known.spans(live, {})
    assert live[45][:8] in {span.peer for span in later} and len({s.peer for s in later} - {s.peer for s in first}) == 1


def test_link_of_two_peers_uses_the_smaller_rtt():
    said = {A: [Span(B[:8], 10, 200), Span(C[:8], 50, 0)], B: [Span(A[:8], 30, 0)], C: []}
    known = links(said)
    assert known(A, B) == Measure(value(30, LEAST_RTT), value(200, LEAST_RATE))
    assert known(B, A) == Measure(value(30, LEAST_RTT), 0.0), "of its own rate each speaks for itself"
    assert known(A, C) == known(C, A) == known(B, C) == known(A, IDS[9]) == Measure()
