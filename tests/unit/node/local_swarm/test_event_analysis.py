"""Facts derived from recorded events."""

import pytest
from thinwire.node.local_swarm.event_analysis import (
    EventAnalysis,
    bytes_sent,
    commits,
    compare_digests,
    recovery,
    round_at,
    saved_factor,
    usual_round,
)


def event(kind, wall, **fields):
    return {"at": wall - 1000.0, "wall": wall, "kind": kind, **fields}


def committed(number, wall, digest=None, up=0):
    digest = digest or f"{number:064x}"
    return event("round", wall, round=number, digest=digest, loss=2.0, bytes_up=up, bytes_down=0, factor=70.0)


def analysis(name, *events):
    return EventAnalysis(name, list(events))


def life(name, last, *, delay=0.0, end=True):
    """Return the events of a peer that commits a round every two seconds from second 1002 on."""
    rounds = [committed(n, 1000.0 + 2 * n + delay, up=100 * n) for n in range(1, last + 1)]
    ends = [event("left", 1001.0 + 2 * last, round=last, digest=f"{last:064x}")] if end else []
    return analysis(name, event("start", 1000.0, peer="ab" * 32, run="cd" * 32), *rounds, *ends)


def test_event_analysis_reads_peer_and_run_ids():
    assert life("a", 1).peer == b"\xab" * 32 and life("a", 1).run == b"\xcd" * 32
    assert analysis("b").peer == analysis("b").run == b"" and analysis("b").round == 0


def test_peer_round_is_that_of_its_newest_state():
    assert analysis("a", event("ready", 1.0, round=4), event("synced", 2.0, round=6, digest="")).round == 6
    assert life("a", 9).round == 9


def test_peer_end_is_that_of_its_last_start():
    one = life("a", 3)
    assert one.end["round"] == 3
    one.events.append(event("left", 1020.0, peer="cd" * 32, detail=""))
    assert one.end["round"] == 3
    one.events += [event("start", 1021.0, peer="ab" * 32, run="cd" * 32), committed(4, 1022.0)]
    assert one.end is None
    one.events.append(event("left", 1030.0, round=4, digest="ee" * 32))
    assert one.end["round"] == 4


def test_commit_time_is_that_of_the_first_peer():
    slow = analysis("b", event("phase", 1001.5, round=1, phase="commit"), event("phase", 1001.0, round=1, phase="open"))
    assert commits([life("a", 2), slow]) == {1: 1001.5, 2: 1004.0}
    assert usual_round(commits([life("a", 3)])) == 2.0
    assert usual_round({}) == usual_round({4: 1.0}) == 0.0


@pytest.mark.parametrize("wall, place", [(0.0, 0.0), (10.0, 1.0), (15.0, 2.0), (20.0, 3.0), (99.0, 3.0)])
def test_moment_is_placed_among_rounds(wall, place):
    assert round_at({1: 10.0, 3: 20.0}, wall) == place


def test_recovery_is_measured_from_kill_to_next_commit():
    survivors = [life("a", 6), life("b", 6, delay=0.5)]
    found = recovery(survivors, 1006.75)  # round 3 was committed at 1006 and 1006.5
    assert (found.round, found.first, found.last) == (4, 1.25, 1.75)
    assert recovery(survivors, 2000.0) is None


def test_round_decided_before_the_kill_is_no_recovery():
    decided = event("phase", 1007.9, round=4, phase="commit")  # and written down as committed at 1008
    survivor = life("a", 6)
    survivor.events.append(decided)
    assert recovery([survivor], 1007.95).round == 5


def test_equal_digests_prove_equality():
    a, b, killed = life("a", 5), life("b", 5), life("c", 3, end=False)
    found = compare_digests([a, b, killed], [a, b])
    assert found.holds and found.rounds == 5 and found.digests == 3 * 3 + 2 * 2 and found.live == 2
    assert (found.round, found.final) == (5, f"{5:064x}")


def test_differing_digest_is_named():
    a, b = life("a", 5), life("b", 5)
    b.events[2]["digest"] = "ee" * 32
    found = compare_digests([a, b], [a, b])
    assert not found.holds and found.differences == ("round 2 (00000000: a; eeeeeeee: b)",)


def test_dead_peer_counts_for_its_rounds():
    a, b, killed = life("a", 5), life("b", 5), life("c", 3, end=False)
    killed.events[1]["digest"] = "ee" * 32
    assert not compare_digests([a, b, killed], [a, b]).holds


@pytest.mark.parametrize("other", [life("b", 4), life("b", 5, end=False), analysis("b")])
def test_live_peers_must_end_in_one_round(other):
    a = life("a", 5)
    found = compare_digests([a, other], [a, other])
    assert not found.differences and not found.holds


def test_fetched_state_is_compared():
    late = analysis("d", event("synced", 1011.0, round=5, digest="ee" * 32))
    assert compare_digests([life("a", 5), late], [life("a", 5)]).differences


@pytest.mark.parametrize("live", [[], [life("a", 5)]])
def test_nothing_compared_proves_nothing(live):
    assert not compare_digests(live, live).holds


def test_departure_event_of_another_peer_has_no_digest():
    a, b = life("a", 5), life("b", 5)
    a.events.append(event("left", 1020.0, peer="cd" * 32, detail=""))
    assert compare_digests([a, b], [a, b]).holds


def test_byte_counts_are_those_of_the_newest_round():
    assert bytes_sent(life("a", 7)) == 700 and saved_factor(life("a", 7)) == 70.0
    assert bytes_sent(analysis("b")) == 0 and saved_factor(analysis("b")) == 0.0


def test_fragment_digests_are_compared_between_holders():
    def ended(name, round, **fragments):
        return analysis(
            name, committed(1, 1002.0), event("left", 1009.0, round=round, digest="ee" * 32, fragments=fragments)
        )

    whole, other = ended("a", 6, **{"0": "aa", "1": "bb"}), ended("b", 6, **{"0": "aa", "1": "bb"})
    host = ended("c", 5, **{"0": "aa"})
    found = compare_digests([whole, other, host], [whole, other, host])
    assert found.holds and found.round == 6 and found.final == "ee" * 32 and found.live == 3
    lone = ended("d", 5, **{"1": "cc"})
    assert not compare_digests([whole, host, lone], [whole, host, lone]).holds
    assert not compare_digests([whole, host], [whole, host, analysis("e", committed(1, 1002.0))]).holds
