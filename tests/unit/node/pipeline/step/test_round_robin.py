"""Weighted round robin: load follows speed soon, and failed peers get nothing."""

from collections import Counter

import pytest
from thinwire.node.pipeline.step.round_robin import RoundRobin


def wired(peers):
    wiring = RoundRobin()
    for peer in peers:
        wiring.join(peer)
    return wiring


def give(wiring, speeds, tasks, size=4.0, **more):
    """So many tasks, each done at its peer's speed before the next is given."""
    taken = Counter()
    for _ in range(tasks):
        peer = wiring.choose(size, **more)
        weight = 2.5 if more.get("backward") else 1.0
        wiring.done(peer, size, size * weight / speeds[peer], **more)
        taken[peer] += 1
    return taken


def shares(taken):
    return {peer: count / taken.total() for peer, count in taken.items()}


@pytest.mark.parametrize("unit", [0.01, 1.0, 300.0])
def test_load_shares_follow_speeds(unit):
    speeds = {"a": unit, "b": 2 * unit, "c": 4 * unit}
    wiring = wired("abc")
    give(wiring, speeds, max(20, int(20 * unit)))
    found = shares(give(wiring, speeds, 7000))
    assert found == pytest.approx({"a": 1 / 7, "b": 2 / 7, "c": 4 / 7}, abs=0.01)


@pytest.mark.parametrize("speeds", [{"a": 2, "b": 2, "c": 4}, {"a": 1, "b": 1, "c": 4}, {"a": 1, "b": 2, "c": 2}])
def test_load_shares_adapt_within_thirty_tasks(speeds):
    before = {"a": 1, "b": 2, "c": 4}
    wiring = wired("abc")
    give(wiring, before, 700)
    changed = next(peer for peer in "abc" if before[peer] != speeds[peer])
    done = Counter()
    while done[changed] < 30:
        done += give(wiring, speeds, 1)
    total = sum(speeds.values())
    wanted = {peer: speed / total for peer, speed in speeds.items()}
    assert shares(give(wiring, speeds, 700)) == pytest.approx(wanted, abs=0.02)


def test_backward_costs_two_and_a_half_forwards():
    wiring = wired("ab")
    assert wiring.choose(1.0, backward=True) == "a"
    assert [wiring.choose(1.0) for _ in range(3)] == ["b", "b", "b"]
    assert wiring.choose(1.0) == "a"


def test_equal_peers_take_turns():
    wiring = wired("abc")
    assert [wiring.choose(1.0) for _ in range(6)] == list("abcabc")


def test_failed_peer_gets_nothing_until_it_has_a_new_record():
    wiring = wired("ab")
    wiring.ban("a")
    assert {wiring.choose(1.0) for _ in range(50)} == {"b"}
    wiring.refresh("a")
    # It does not get all missed work at once.
    taken = Counter(wiring.choose(1.0) for _ in range(20))
    assert abs(taken["a"] - taken["b"]) <= 2
    wiring.ban("a")
    assert wiring.choose(1.0, but=("b",)) is None
    wiring.ban("nobody")
    wiring.refresh("nobody")
    assert wiring.peers == {"a", "b"}


def test_newcomer_enters_at_least_virtual_time():
    wiring = wired("ab")
    give(wiring, {"a": 1.0, "b": 1.0}, 100)
    wiring.join("c")
    taken = Counter(wiring.choose(4.0) for _ in range(30))
    assert max(taken.values()) - min(taken.values()) <= 1
    wiring.leave("c")
    wiring.leave("c")
    wiring.done("c", 1.0, 1.0)
    assert {wiring.choose(1.0) for _ in range(9)} == {"a", "b"}


def test_speed_estimate_is_not_biased_by_its_start():
    wiring = wired("a")
    assert wiring.speed("a") == 1.0
    wiring.done("a", 8.0, 2.0)
    assert wiring.speed("a") == pytest.approx(4.0)
    wiring.done("a", 8.0, 0.0)
    assert wiring.speed("a") > 4.0


@pytest.mark.parametrize("speed", [0.01, 1.0, 300.0])
def test_unmeasured_peer_gets_its_share(speed):
    """Times of unmeasured peers are no evidence of slow or fast ones."""
    wiring = wired("ab")
    taken = Counter()
    for _ in range(40):
        peer = wiring.choose(1.0)
        taken[peer] += 1
        if peer == "b":
            wiring.done(peer, 1.0, 1.0 / speed)
    assert taken == {"a": 20, "b": 20}


def test_round_robin_without_peers_returns_none():
    assert RoundRobin().choose(1.0) is None
