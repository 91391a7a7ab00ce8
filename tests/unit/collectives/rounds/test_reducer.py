"""Claims of owners and their audit, without rounds."""

from __future__ import annotations

import blake3
import msgspec
import numpy as np
import pytest
from kit.round_harness import CODEC, DENSE, FIRST, GRID, PEERS, dense_payloads, hashes_of, mean, opening, ready
from thinwire.collectives.aggregation.rules import RULES
from thinwire.collectives.rounds.reducer import Claims, Reducer, docket, inputs_of
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.swarm.messages.registry import Commit, Record

ANN, BEN, CAT = IDS = PEERS[:3]
SOURCES = {peer: dense_payloads(seed) for seed, peer in enumerate(IDS)}
READY = {peer: ready(SOURCES[peer]) for peer in IDS}
OPENED = opening(IDS)
RESULTS = [mean([SOURCES[peer][index] for peer in IDS], [10.0] * 3) for index in range(len(GRID))]
MINE = (2, 3)


def record(results=RESULTS, *, announced=READY, inputs=None):
    inputs = inputs_of(OPENED, announced, MINE) if inputs is None else inputs
    return Record(1, 0, FIRST, MINE, hashes_of(results[index] for index in MINE), b"", inputs)


def settled(one, *, committed=RESULTS, opened=OPENED, announced=READY):
    claims = Claims()
    for index in MINE:
        claims.note(index, BEN, one, again=opened.adopted is not None)
    return claims.settle(opened, announced, hashes_of(committed))


def made(claims):
    tools = Reducer(CODEC, DENSE["rule"], BufferPool()), CODEC, GRID
    return docket(Commit(OPENED, bytes(32), ()), READY, claims, *tools)


def payloads(index, **others):
    found = [SOURCES[peer][index] for peer in IDS]
    return {blake3.blake3(one).digest(): one for one in found}


def test_true_result_is_confirmed():
    claims, denied = settled(record())
    assert not denied and set(claims) == set(MINE) and claims[2][0] == BEN
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
    claims, _ = settled(record(false), committed=false)
    assert not any(made(claims).confirms(index, payloads(index)) for index in MINE)


def test_result_without_one_contribution_is_not_confirmed():
    false = [mean([SOURCES[peer][index] for peer in (ANN, BEN)], [10.0] * 2) for index in range(len(GRID))]
    claims, _ = settled(record(false), committed=false)
    assert not made(claims).confirms(2, payloads(2))


def test_owner_that_includes_an_invalid_contribution_is_not_confirmed():
    broken = np.full(GRID.size(2), np.nan, np.float32).tobytes()
    announced = {**READY, CAT: ready([*SOURCES[CAT][:2], broken, *SOURCES[CAT][3:]])}
    claims, _ = settled(record(announced=announced), announced=announced)
    tools = Reducer(CODEC, RULES["mean"], BufferPool()), CODEC, GRID
    one = docket(Commit(OPENED, bytes(32), ()), announced, claims, *tools)
    assert not one.confirms(2, {**payloads(2), blake3.blake3(broken).digest(): broken})


def test_contributor_with_two_announcements_gives_no_claim_against_the_owner():
    """The owner got other data than we: nothing follows about its result, but it may have lied about its inputs."""
    other = {**READY, CAT: ready(dense_payloads(9))}
    claims, denied = settled(record(announced=other))
    assert not claims and denied == {BEN}


def test_later_announcement_of_a_contributor_gives_neither_a_claim_nor_a_denial():
    later = {**READY, CAT: ready(SOURCES[CAT], attempt=2)}
    assert settled(record(), announced=later) == ({}, set())


def test_record_without_inputs_is_denied_but_not_in_an_adopted_ballot():
    assert settled(record(inputs=b"")) == ({}, {BEN})
    adopted = msgspec.structs.replace(OPENED, adopted=bytes(32))
    assert settled(record(inputs=b""), opened=adopted) == ({}, set())


def test_weights_are_part_of_the_inputs():
    heavier = opening(IDS, contributors=tuple(msgspec.structs.replace(one, weight=11) for one in OPENED.contributors))
    assert settled(record(), opened=heavier) == ({}, {BEN})
