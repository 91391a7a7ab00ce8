"""Diagnosis from data of one sender per round, or in a single piece."""

import random

import pytest
from thinwire.collectives.health.diagnosis import Diagnosis, named

PEERS = [bytes([i]) * 32 for i in range(5)]


def exchanges(
    diagnosis, count, *, seed=0, rate=lambda peer, at: 1e6, speed=lambda peer, at: 100.0, stall=lambda peer, at: 0
):
    """Play rounds of pairs with eight chunks of 20 kB from one partner each."""
    rng, own = random.Random(seed), dict.fromkeys(PEERS, 0)
    for at in range(count):
        peer = rng.choice(PEERS)
        own[peer] += rng.randrange(1, 4)  # round numbers of peers are independent
        diagnosis.ready(peer, own[peer], speed(peer, at))
        now = 100.0 * at
        for index in range(8):
            diagnosis.chunk(peer, own[peer], 20_000, now)
            now += 20_000 / rate(peer, at) + (stall(peer, at) if index == 4 else 0)


def gathered(diagnosis, count, *, first=0, delay=lambda peer, at: 0.02, trip=0.0):
    """Play rounds with one piece of 50 kB from each peer."""
    for at in range(first, first + count):
        for peer in PEERS:
            diagnosis.ready(peer, at, 100.0)
        diagnosis.opened(at, 100.0 * at)
        for peer in PEERS:
            diagnosis.chunk(peer, at, 50_000, 100.0 * at + delay(peer, at), trip=trip)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("cause", "unhealthy"),
    [
        ("slow upload", {"rate": lambda peer, at: 1e5 if peer == PEERS[2] else 1e6}),
        ("slow compute", {"speed": lambda peer, at: 20.0 if peer == PEERS[2] else 100.0}),
        ("lossy link", {"stall": lambda peer, at: 0.6 * (peer == PEERS[2] and at % 3 > 0)}),
    ],
)
def test_partner_is_compared_with_earlier_partners(seed, cause, unhealthy):
    diagnosis = Diagnosis(paired=True)
    exchanges(diagnosis, 120, seed=seed, **unhealthy)
    assert {peer: found.cause for peer, found in diagnosis.findings.items()} == {PEERS[2]: cause}


@pytest.mark.parametrize("seed", range(30))
def test_healthy_partners_are_not_named(seed):
    """Not when our own link or machine is now slow and now not, nor when all lose a little."""
    rng, diagnosis = random.Random(seed), Diagnosis(paired=True)
    own = [rng.choice([1e5, 1e6]) for _ in range(10)]
    exchanges(
        diagnosis,
        300,
        seed=seed,
        rate=lambda peer, at: own[at // 30] * rng.uniform(0.6, 1.0),
        speed=lambda peer, at: 100.0 * rng.uniform(0.6, 1.0),
        stall=lambda peer, at: 0.5 * (rng.random() < 0.1),
    )
    assert diagnosis.findings == {}


def test_with_two_partners_nobody_is_named():
    diagnosis = Diagnosis(paired=True)
    for at in range(60):
        peer = PEERS[at % 2]
        diagnosis.ready(peer, at, 10.0 + 90.0 * (at % 2))
        for index in range(4):
            diagnosis.chunk(peer, at, 10_000, 100.0 * at + index * (0.5 if at % 2 else 0.01))
    assert diagnosis.findings == {}


def test_single_piece_is_timed_from_the_opening():
    diagnosis = Diagnosis()
    gathered(diagnosis, 7, delay=lambda peer, at: 0.5 if peer == PEERS[1] else 0.02)
    told = "slow upload: upload 0.1 MB/s, the others' median 2.5 MB/s, 6 of 6 rounds"
    assert named(diagnosis.findings, PEERS[1]) == told and set(diagnosis.findings) == {PEERS[1]}
    gathered(diagnosis, 8, first=7)
    assert diagnosis.findings == {}


def test_single_piece_over_long_latency_is_not_slow():
    far = Diagnosis()
    for at in range(20):
        for peer in PEERS:
            far.ready(peer, at, 100.0)
        far.opened(at, 100.0 * at)
        for peer in PEERS:
            away = peer == PEERS[1]
            far.chunk(peer, at, 50_000, 100.0 * at + (0.9 if away else 0.02), trip=0.3 if away else 0.002)
    assert far.findings == {}


@pytest.mark.parametrize("seed", range(5))
def test_pieces_that_are_sometimes_late_mean_a_lossy_link(seed):
    rng, diagnosis = random.Random(seed), Diagnosis()
    gathered(diagnosis, 200, delay=lambda peer, at: 0.02 + 0.4 * (rng.random() < (0.25 if peer == PEERS[3] else 0.01)))
    assert {peer: found.cause for peer, found in diagnosis.findings.items()} == {PEERS[3]: "lossy link"}
    assert (
        "chunks that usually arrive within 20 ms of the round came after 0.4 s" in diagnosis.findings[PEERS[3]].evidence
    )


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_healthy_peers_accuse_nobody(seed):
    """All lose some, or we do; a round opens late for us."""
    rng, diagnosis = random.Random(seed), Diagnosis()
    ours = [0.4 * (rng.random() < 0.2) for _ in range(300)]
    gathered(
        diagnosis,
        300,
        delay=lambda peer, at: rng.uniform(0.01, 0.03) + ours[at] + 0.4 * (rng.random() < 0.03),
        trip=0.01,
    )
    assert diagnosis.findings == {}


def test_ring_forwarder_is_compared_with_senders_of_other_rounds():
    """As in a ring: one sender a round, the same for some rounds."""
    rng, diagnosis = random.Random(1), Diagnosis()
    for at in range(60):
        for peer in PEERS:
            diagnosis.ready(peer, at, 100.0)
        peer = rng.choice(PEERS)
        for index in range(4):
            diagnosis.chunk(peer, at, 20_000, 100.0 * at + index * (0.5 if peer == PEERS[0] else 0.01))
    assert {peer: found.cause for peer, found in diagnosis.findings.items()} == {PEERS[0]: "slow upload"}


def test_in_unchanged_ring_nobody_is_named():
    diagnosis = Diagnosis()
    for at in range(60):
        for peer in PEERS:
            diagnosis.ready(peer, at, 100.0)
        for index in range(4):
            diagnosis.chunk(PEERS[0], at, 20_000, 100.0 * at + index * 0.5)
    assert diagnosis.findings == {}
