"""Diagnosis of unhealthy peers from made-up measurements."""

import pytest
from thinwire.collectives.health.diagnosis import Diagnosis, named

PEERS = [bytes([i]) * 32 for i in range(4)]


def rounds(diagnosis, count, *, first=1, speed=lambda peer, at: 100.0, gap=lambda peer, at: 0.01):
    """Play rounds with four chunks of 10 kB from each peer."""
    for at in range(first, first + count):
        for peer in PEERS:
            diagnosis.ready(peer, at, speed(peer, at))
        for peer in PEERS:
            for index in range(4):
                diagnosis.chunk(peer, at, 10_000, 100.0 * at + index * gap(peer, at))


def test_diagnosis_names_nobody_when_all_are_slow():
    diagnosis = Diagnosis()
    rounds(diagnosis, 30, speed=lambda peer, at: 100.0 / at, gap=lambda peer, at: 2.0)
    assert diagnosis.findings == {}


def test_slow_upload_is_named_until_it_recovers():
    diagnosis = Diagnosis()
    rounds(diagnosis, 6, gap=lambda peer, at: 0.5 if peer == PEERS[1] else 0.01)
    assert diagnosis.findings == {}, "six rounds are judged when the seventh begins"
    rounds(diagnosis, 1, first=7)
    assert set(diagnosis.findings) == {PEERS[1]}
    evidence = "slow upload: upload 20.0 kB/s, the others' median 1.0 MB/s, 6 of 6 rounds"
    assert named(diagnosis.findings, PEERS[1]) == evidence
    rounds(diagnosis, 7, first=8)
    assert diagnosis.findings == {} and named(diagnosis.findings, PEERS[1]) == ""


def test_peer_that_reconnects_repeatedly_is_still_named():
    diagnosis = Diagnosis()
    for at in range(1, 13):
        rounds(diagnosis, 1, first=at, gap=lambda peer, at: 0.5 if peer == PEERS[1] else 0.01)
        if at % 3 == 0:
            diagnosis.on_link_down(PEERS[1])
            assert diagnosis.chunk(PEERS[1], at, 10_000, 100.0 * at + 50) is None
    assert set(diagnosis.findings) == {PEERS[1]}


def test_departed_peer_is_forgotten_and_findings_are_bounded():
    diagnosis = Diagnosis()
    rounds(diagnosis, 8, gap=lambda peer, at: 0.5 if peer == PEERS[1] else 0.01)
    diagnosis.on_link_down(PEERS[1])
    diagnosis.on_link_down(PEERS[2])
    assert PEERS[2] not in diagnosis.marked and PEERS[1] in diagnosis.marked
    for at in range(9, 16):
        for peer in (PEERS[0], PEERS[2], PEERS[3]):
            diagnosis.ready(peer, at, 100.0)
    assert set(diagnosis.findings) == {PEERS[1]}
    for at in range(16, 18):
        for peer in (PEERS[0], PEERS[2], PEERS[3]):
            diagnosis.ready(peer, at, 100.0)
    assert diagnosis.findings == {} and PEERS[1] not in diagnosis.marked
    for peer in PEERS[2:]:
        diagnosis.on_clock(peer, 0.0)
    for index in range(100):
        stranger = bytes([index, 7]) * 16
        for _ in range(3):
            diagnosis.on_clock(stranger, 1e6)
        diagnosis.on_link_down(stranger)
    assert len(diagnosis.findings) == 64 and len(diagnosis.marked) <= 64 + len(PEERS)


def test_millisecond_gaps_on_fast_network_accuse_nobody():
    diagnosis = Diagnosis()
    rounds(diagnosis, 20, gap=lambda peer, at: 0.01 if peer == PEERS[1] else 0.0001)
    assert diagnosis.findings == {}


@pytest.mark.parametrize(("stalls", "found"), [(9, set()), (11, set()), (13, {PEERS[0]})])
def test_lossy_link_stalls_more_often_than_by_chance(stalls, found):
    """The others stall in two of twenty rounds each: of equal links, one may well stall in nine."""
    diagnosis = Diagnosis()
    stalled = {PEERS[0]: range(stalls), PEERS[1]: (3, 9), PEERS[2]: (5, 13), PEERS[3]: (11, 17)}
    for at in range(21):
        for peer in PEERS:
            diagnosis.ready(peer, at + 1, 100.0)
        for peer in PEERS:
            for index in range(4):
                late = 0.2 if at in stalled[peer] and index == 3 else 0.0
                diagnosis.chunk(peer, at + 1, 10_000, 100.0 * at + 0.01 * index + late)
    assert set(diagnosis.findings) == found


def test_slow_compute_is_distinguished_from_throttling():
    diagnosis = Diagnosis()
    rounds(
        diagnosis, 30, speed=lambda peer, at: {PEERS[0]: 30.0, PEERS[1]: 100.0 if at < 15 else 35.0}.get(peer, 100.0)
    )
    found = {peer: finding.cause for peer, finding in diagnosis.findings.items()}
    assert found == {PEERS[0]: "slow compute", PEERS[1]: "thermal throttling"}
    assert "fell to 35 % of its own best, the others kept 100 %" in named(diagnosis.findings, PEERS[1])


def test_one_peer_cannot_set_the_diagnosed_round():
    diagnosis = Diagnosis()
    diagnosis.ready(PEERS[3], 2**32 - 1, 1.0)
    peers = PEERS[:3]
    for at in range(1, 9):
        for peer in peers:
            diagnosis.ready(peer, at, 10.0 if peer == PEERS[0] else 100.0)
    assert set(diagnosis.findings) == {PEERS[0]}


def test_diagnosis_with_fewer_than_two_others_names_nobody():
    diagnosis = Diagnosis()
    for at in range(1, 30):
        for peer, speed in zip(PEERS[:2], (1.0, 100.0), strict=True):
            diagnosis.ready(peer, at, speed)
            diagnosis.on_clock(peer, 0.0)
    assert diagnosis.findings == {}


def test_own_wrong_clock_accuses_nobody_else():
    diagnosis = Diagnosis()
    for _ in range(9):
        for peer in PEERS:
            diagnosis.on_clock(peer, -500.0)
    assert diagnosis.findings == {}
    for _ in range(3):
        diagnosis.on_clock(PEERS[2], 0.0)
    assert named(diagnosis.findings, PEERS[2]).startswith("clock skew: its clock is 500 s ahead of most others'")
    diagnosis.on_link_down(PEERS[2])
    assert set(diagnosis.findings) == {PEERS[2]}
    for _ in range(8):
        diagnosis.on_clock(PEERS[2], -500.0)
    assert diagnosis.findings == {}


def test_one_fast_peer_makes_nobody_sick():
    for fast in (6.0, 1e300):
        diagnosis = Diagnosis()
        for at in range(1, 12):
            for peer in PEERS[:3]:
                diagnosis.ready(peer, at, fast if peer == PEERS[0] else 1.0)
            for peer in PEERS[:3]:
                for index in range(10):
                    diagnosis.chunk(peer, at, 1 << 18, 10.0 * at + index * (0.002 if peer == PEERS[0] else 0.05))
        assert diagnosis.findings == {}


def test_only_the_peer_with_wrong_clock_is_named():
    diagnosis = Diagnosis()
    for _ in range(5):
        diagnosis.on_clock(PEERS[0], 100.0)
        diagnosis.on_clock(PEERS[1], 0.0)
    assert set(diagnosis.findings) == {PEERS[0]}


def test_diagnosed_round_is_that_of_the_majority():
    diagnosis = Diagnosis()
    rounds(diagnosis, 2)
    for liar in PEERS[:2]:
        diagnosis.ready(liar, 2**30, 100.0)
    diagnosis.ready(PEERS[2], 2**30, 100.0)
    for liar in PEERS[:3]:
        diagnosis.on_link_down(liar)
    rounds(diagnosis, 8, first=3, gap=lambda peer, at: 0.5 if peer == PEERS[1] else 0.01)
    assert set(diagnosis.findings) == {PEERS[1]}


def _fragments(diagnosis, count, slow):
    """Play so many rounds of three fragments; `slow` names those in which PEERS[1] sends slowly."""
    for at in range(1, count + 1):
        for fragment in range(3):
            for peer in PEERS:
                diagnosis.ready(peer, at, 100.0, fragment=fragment)
            for peer in PEERS:
                for index in range(4):
                    gap = 0.5 if peer == PEERS[1] and slow(at, fragment) else 0.01
                    diagnosis.chunk(peer, at, 10_000, 100.0 * (3 * at + fragment) + index * gap, fragment=fragment)
    for fragment in range(3):
        for peer in PEERS:
            diagnosis.ready(peer, count + 1, 100.0, fragment=fragment)


@pytest.mark.parametrize(("slow", "named"), [(range(3), {PEERS[1]}), (range(2, 3), set())])
def test_slow_upload_in_all_fragments_is_named_after_as_many_rounds(slow, named):
    diagnosis = Diagnosis()
    _fragments(diagnosis, 7, lambda at, fragment: fragment in slow)
    assert set(diagnosis.findings) == named


def test_one_slow_period_of_all_fragments_is_one_mark():
    diagnosis = Diagnosis()
    _fragments(diagnosis, 12, lambda at, fragment: at in (3, 4))
    assert diagnosis.findings == {}


def test_early_announcement_of_one_peer_does_not_end_the_observed_round():
    diagnosis = Diagnosis()
    for at in range(1, 8):
        for peer in PEERS:
            diagnosis.ready(peer, at, 100.0)
        diagnosis.ready(PEERS[0], 2**30, 100.0)
        for peer in PEERS:
            for index in range(4):
                diagnosis.chunk(peer, at, 10_000, 100.0 * at + index * (0.5 if peer == PEERS[1] else 0.01))
    assert set(diagnosis.findings) == {PEERS[1]}


def test_peer_that_rounds_go_on_without_is_slow():
    diagnosis = Diagnosis()
    for late in (True, False, True):
        diagnosis.on_attendance(PEERS[0], late=late, seconds=10.0 if late else 0.0)
        diagnosis.on_attendance(PEERS[1], late=False, seconds=0.0)
    assert not diagnosis.findings
    diagnosis.on_attendance(PEERS[0], late=True, seconds=0.2)
    assert {peer: str(found.cause) for peer, found in diagnosis.findings.items()} == {PEERS[0]: "slow"}
    assert diagnosis.findings[PEERS[0]].evidence == "late by 10 s or more, 3 of 4 rounds"
    for _ in range(7):
        diagnosis.on_attendance(PEERS[0], late=False, seconds=0.0)
    assert not diagnosis.findings


def test_evidence_of_a_slow_peer_has_its_speed_if_known():
    diagnosis = Diagnosis()
    rounds(diagnosis, 2, speed=lambda peer, at: 60.0 if peer == PEERS[0] else 100.0)
    for _ in range(3):
        diagnosis.on_attendance(PEERS[0], late=True, seconds=12.0)
    assert "speed 60/s, the others' median 100/s" in diagnosis.findings[PEERS[0]].evidence


def test_contributor_far_above_the_median_is_named_until_it_is_not() -> None:
    diagnosis = Diagnosis()
    loud, calm = bytes([1]) * 32, bytes([2]) * 32
    for number in range(1, 6):
        diagnosis.on_norms({loud: 10.0, calm: 1.0}, number)
        assert not diagnosis.findings
        diagnosis.on_norms({loud: 10.0, calm: 1.0}, number)  # another fragment, or the same round again
    diagnosis.on_norms({loud: 12.0, calm: 4.9}, 6)
    assert set(diagnosis.findings) == {loud}
    assert named(diagnosis.findings, loud) == "clipped: its contribution was 12 times the median, 6 of 6 rounds"
    for number in range(7, 13):
        diagnosis.on_norms({loud: 1.0, calm: 1.0}, number)
    assert not diagnosis.findings
