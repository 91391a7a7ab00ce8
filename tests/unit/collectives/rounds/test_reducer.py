"""Claims of owners and their audit, without rounds."""

from __future__ import annotations

import blake3
import numpy as np
import pytest
from kit.round_harness import CODEC, DENSE, FIRST, GRID, PEERS, dense_payloads, hashes_of, mean, opening, ready
from thinwire.collectives.consensus.proposal import names
from thinwire.collectives.rounds.reducer import Claims, Reducer, audit_data
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.swarm.messages.registry import Commit, Contribution, Record

ANN, BEN, CAT = IDS = PEERS[:3]
SOURCES = {peer: dense_payloads(seed) for seed, peer in enumerate(IDS)}
READY = {peer: ready(SOURCES[peer]) for peer in IDS}
OPENED = opening(IDS, contributors=tuple(Contribution(peer, 1, 10, READY[peer].digest) for peer in IDS))
RESULTS = [mean([SOURCES[peer][index] for peer in IDS], [10.0] * 3) for index in range(len(GRID))]
MINE = (2, 3)


def record(results=RESULTS, *, own=True):
    return Record(1, 0, FIRST, MINE, hashes_of(results[index] for index in MINE), b"", own)


def settled(one, *, committed=RESULTS, again=False):
    claims = Claims()
    for index in MINE:
        claims.note(index, BEN, one, again=again)
    return claims.settle(hashes_of(committed))


def made(claims, *, opened=OPENED, announced=READY):
    tools = Reducer(CODEC, DENSE["rule"], BufferPool()), CODEC, GRID

    def known(entry):
        return announced[entry.peer] if names(entry, announced[entry.peer]) else None

    return audit_data(Commit(opened, bytes(32), ()), known, claims, *tools)


def payloads(index, **others):
    found = [SOURCES[peer][index] for peer in IDS]
    return {blake3.blake3(one).digest(): one for one in found}


def test_true_result_is_confirmed():
    claims = settled(record())
    assert set(claims) == set(MINE) and claims[2][0] == BEN
    assert all(made(claims).confirms(index, payloads(index)) for index in MINE)


@pytest.mark.parametrize(
    "change",
    [
        lambda values: 2 * values,
        lambda values: values + np.float32(1e-3),
        lambda values: np.nextafter(values, np.float32(9)),
    ],
)
def test_false_result_is_not_confirmed(change):
    false = [change(np.frombuffer(one, np.float32)).tobytes() for one in RESULTS]
    claims = settled(record(false), committed=false)
    assert not any(made(claims).confirms(index, payloads(index)) for index in MINE)


def test_result_without_one_contribution_is_not_confirmed():
    false = [mean([SOURCES[peer][index] for peer in (ANN, BEN)], [10.0] * 2) for index in range(len(GRID))]
    claims = settled(record(false), committed=false)
    assert not made(claims).confirms(2, payloads(2))


def test_owner_that_includes_an_invalid_contribution_is_not_confirmed():
    broken = np.full(GRID.size(2), np.nan, np.float32).tobytes()
    announced = {**READY, CAT: ready([*SOURCES[CAT][:2], broken, *SOURCES[CAT][3:]])}
    opened = opening(IDS, contributors=tuple(Contribution(peer, 1, 10, announced[peer].digest) for peer in IDS))
    one = made(settled(record()), opened=opened, announced=announced)
    assert not one.confirms(2, {**payloads(2), blake3.blake3(broken).digest(): broken})


def test_owner_that_uses_other_contributions_than_the_decided_ones_is_not_confirmed():
    """The decided proposal names the announcements, so an owner cannot claim that it was told other data."""
    told = {**SOURCES, CAT: dense_payloads(9)}
    false = [mean([told[peer][index] for peer in IDS], [10.0] * 3) for index in range(len(GRID))]
    for own in (True, False):
        one = made(settled(record(false, own=own), committed=false))
        assert set(one.claims) == set(MINE) and not any(one.confirms(index, payloads(index)) for index in MINE)


def test_other_announcement_than_the_decided_one_gives_no_claim():
    """This peer cannot compute the results: it lacks the hashes of a contributor's chunks."""
    for other in (ready(dense_payloads(9)), ready(SOURCES[CAT], attempt=2)):
        assert not made(settled(record()), announced={**READY, CAT: other}).claims


def test_result_of_an_earlier_ballot_counts_if_its_owner_has_computed_it():
    assert set(settled(record(), again=True)) == set(MINE)
    assert not settled(record(own=False), again=True)
