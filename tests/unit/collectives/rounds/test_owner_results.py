"""Claims of owners and their audit, without rounds."""

from __future__ import annotations

from types import SimpleNamespace

import blake3
import msgspec
import numpy as np
import pytest
from kit.round_harness import (
    CODEC,
    DENSE,
    FIRST,
    GRID,
    PEERS,
    basis_of,
    dense_payloads,
    hashes_of,
    mean,
    opening,
    ready,
    signature,
)
from thinwire.collectives.consensus.proposal import names
from thinwire.collectives.rounds.owner_results import OwnerRecords, Reducer, audit_data
from thinwire.collectives.rounds.result_store import Results
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.swarm.messages.registry import Claim, Commit, Contribution, Record

ANN, BEN, CAT = IDS = PEERS[:3]
SOURCES = {peer: dense_payloads(seed) for seed, peer in enumerate(IDS)}
READY = {peer: ready(SOURCES[peer]) for peer in IDS}
OPENED = opening(IDS, contributors=tuple(Contribution(peer, 1, 10, READY[peer].digest) for peer in IDS))
RESULTS = [mean([SOURCES[peer][index] for peer in IDS], [10.0] * 3) for index in range(len(GRID))]
MINE = (2, 3)


def record(results=RESULTS):
    return Record(1, 0, FIRST, MINE, hashes_of(results[index] for index in MINE), b"", basis_of(OPENED))


def records_of(results, *, audited=True):
    """Return the OwnerRecords of a round whose results are all here, and known to be settled; no owner has signed yet."""
    stored = Results(lambda chunk, index: None, len(GRID))
    for index, one in enumerate(results):
        stored.put(index, one)
    agreement = SimpleNamespace(
        me=ANN,
        terms=SimpleNamespace(members=IDS),
        commit=None,
        opened=OPENED,
        confirms=lambda opened: False,
        sign=lambda message: signature(ANN, message),
        verify=lambda peer, message, proof: proof == signature(peer, message),
    )
    records = OwnerRecords(agreement, stored, audited=audited)
    records.open(msgspec.structs.replace(OPENED, adopted=bytes(32)), [BEN] * len(GRID), basis_of(OPENED))
    return records


def claim(one, owner=BEN, signer=BEN):
    return Claim(owner, one, signature(signer, one))


def settled(one, *, committed=RESULTS):
    records = records_of(committed)
    assert records.take_claim(claim(one))
    return records.settle()


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
    one = made(settled(record(false), committed=false))
    assert set(one.claims) == set(MINE) and not any(one.confirms(index, payloads(index)) for index in MINE)


def test_other_announcement_than_the_decided_one_gives_no_claim():
    """This peer cannot compute the results: it lacks the hashes of a contributor's chunks."""
    for other in (ready(dense_payloads(9)), ready(SOURCES[CAT], attempt=2)):
        assert not made(settled(record()), announced={**READY, CAT: other}).claims


def test_claim_counts_for_the_results_that_have_its_hashes_only():
    """An earlier owner of a chunk may have claimed another result; the claim to the committed one is found."""
    other = [bytes(len(one)) for one in RESULTS]
    records = records_of(RESULTS)
    assert not records.take_claim(claim(record(other), ANN, ANN))
    assert records.take_claim(claim(record())) and records.take_claim(claim(record(), CAT, CAT))
    assert {owner for owner, _ in records.settle().values()} == {BEN}
    assert records.settle() == {}


def test_shown_claim_is_taken_if_a_peer_of_the_round_has_signed_it():
    records, other = records_of(RESULTS), record([bytes(len(one)) for one in RESULTS])
    assert not records.take_claim(claim(record(), BEN, ANN)), "another signature"
    assert not records.take_claim(claim(record(), PEERS[3], PEERS[3])), "a stranger"
    assert not records.take_claim(claim(other)), "other results"
    assert not records.take_claim(claim(msgspec.structs.replace(record(), basis=bytes(32)))), "other contributors"
    assert not records_of(RESULTS, audited=False).take_claim(claim(record()))
    assert records.settle() == {}
    assert records.take_claim(claim(record())) and set(records.settle()) == set(MINE)


def test_each_result_needs_a_claim_and_each_claim_is_shown_once():
    records, rest = records_of(RESULTS), tuple(index for index in range(len(GRID)) if index not in MINE)
    assert records.take_claim(claim(record()))
    assert records.unclaimed and records.claims() is None
    one = Record(1, 0, FIRST, rest, hashes_of(RESULTS[index] for index in rest), b"", basis_of(OPENED))
    assert records.take_claim(claim(one, ANN, ANN))
    assert not records.unclaimed
    assert {found.owner for found in records.claims()} == {ANN, BEN} and len(records.claims()) == 2
    records.clear()
    assert records.unclaimed


def test_record_claims_what_was_computed_here_in_a_ballot_without_adopted_results():
    records = records_of(RESULTS)
    for index in MINE:
        records.note_computed(index)
    assert records.sign(OPENED, MINE).basis == b""
    records.open(OPENED, [ANN] * len(GRID), basis_of(OPENED))
    assert records.sign(OPENED, (0, 1)).basis == b"", "computed by another peer"
    assert records.sign(OPENED, MINE) == record()
    assert {owner for owner, _ in records.settle().values()} == {ANN}
