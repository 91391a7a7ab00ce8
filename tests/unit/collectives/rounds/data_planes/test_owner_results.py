"""Claims of owners and their audit, without rounds."""

from __future__ import annotations

from types import SimpleNamespace

import blake3
import msgspec
import numpy as np
import pytest
from kit.rounds.round_harness import (
    DENSE,
    FIRST,
    GRID,
    PEERS,
    dense_payloads,
    hashes_of,
    mean,
    opening,
    ready,
    signature,
)
from thinwire.collectives.consensus.proposal import names
from thinwire.collectives.rounds.data_planes.owner_records import OwnerRecords, basis_of
from thinwire.collectives.rounds.data_planes.owner_results import audit_data
from thinwire.collectives.rounds.data_planes.result_store import Results
from thinwire.swarm.messages.registry import Commit, Contribution, ResultClaim, ResultRecord

ANN, BEN, CAT = IDS = PEERS[:3]
SOURCES = {peer: dense_payloads(seed) for seed, peer in enumerate(IDS)}
READY = {peer: ready(SOURCES[peer]) for peer in IDS}
OPENED = opening(IDS, contributors=tuple(Contribution(peer, 1, 10, READY[peer].digest) for peer in IDS))
RESULTS = [mean([SOURCES[peer][index] for peer in IDS], [10.0] * 3) for index in range(len(GRID))]
MINE = (2, 3)


def record(results=RESULTS):
    return ResultRecord(
        1, 0, FIRST, MINE, hashes_of(results[index] for index in MINE), b"", basis_of(OPENED.contributors)
    )


def records_of(results, *, audited=True, known=IDS, voted=None):
    """Return the OwnerRecords of a round that adopts results, all of which are here; no owner has signed yet.

    known: contributors whose announcements are here. voted: proposal that we have voted for. `results` of the returned object
    has the results.
    """
    stored = Results(len(GRID))
    for index, one in enumerate(results):
        stored.put(index, one)
    agreement = SimpleNamespace(
        me=ANN,
        terms=SimpleNamespace(members=IDS),
        commit=None,
        acceptor=SimpleNamespace(voted=voted),
        announcements=SimpleNamespace(find=lambda entry: READY[entry.peer] if entry.peer in known else None),
        sign=lambda message: signature(ANN, message),
        verify=lambda peer, message, proof: proof == signature(peer, message),
    )
    records = OwnerRecords(agreement, stored, audited=audited)
    records.results = stored
    records.open(msgspec.structs.replace(OPENED, adopted=bytes(32)), [BEN] * len(GRID))
    return records


def claim(one, owner=BEN, signer=BEN):
    return ResultClaim(owner, one, signature(signer, one))


def settled(one, *, committed=RESULTS):
    records = records_of(committed)
    records.take_claim(claim(one))
    return records.take_claims()


def made(claims, *, proposal=OPENED, announced=READY):
    tools = DENSE["reducer"], GRID

    def known(entry):
        return announced[entry.peer] if names(entry, announced[entry.peer]) else None

    return audit_data(Commit(proposal, bytes(32), ()), known, claims, *tools)


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
    proposal = opening(IDS, contributors=tuple(Contribution(peer, 1, 10, announced[peer].digest) for peer in IDS))
    one = made(settled(record()), proposal=proposal, announced=announced)
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
    """Another owner may have claimed another result before; the claim to the committed one is found."""
    other = [bytes(len(one)) for one in RESULTS]
    records = records_of(RESULTS)
    for one, owner in ((record(other), ANN), (record(), BEN), (record(), CAT)):
        records.take_claim(claim(one, owner, owner))
    assert {owner for owner, _ in records.take_claims().values()} == {BEN}
    assert records.take_claims() == {}


@pytest.mark.parametrize(
    "false",
    [
        claim(record(), BEN, ANN),
        claim(record(), PEERS[3], PEERS[3]),
        claim(record([bytes(len(one)) for one in RESULTS])),
        claim(msgspec.structs.replace(record(), basis=bytes(32))),
        claim(msgspec.structs.replace(record(), basis=b"")),
    ],
    ids=["signature", "stranger", "results", "contributors", "nothing computed"],
)
def test_false_claim_is_not_taken(false):
    records = records_of(RESULTS)
    records.take_claim(false)
    assert records.take_claims() == {}


def test_claim_of_a_newcomer_counts_if_we_have_followed_a_ballot_in_which_it_owns_chunks():
    records, newcomer = records_of(RESULTS), PEERS[3]
    records.open(OPENED, [newcomer] * len(GRID))
    records.take_claim(claim(record(), newcomer, newcomer))
    assert {owner for owner, _ in records.take_claims().values()} == {newcomer}


@pytest.mark.parametrize("sender", [ANN, BEN, PEERS[3]])
def test_record_of_all_results_is_a_claim_only_if_a_member_sends_it(sender):
    records, every = records_of(RESULTS), tuple(range(len(GRID)))
    hashes = hashes_of(RESULTS)
    records.results.settle(blake3.blake3(hashes).digest())
    one = ResultRecord(1, 0, FIRST, every, hashes, b"", basis_of(OPENED.contributors))
    assert records.take(sender, one, signature(sender, one))
    assert records.unclaimed == (sender == PEERS[3])


def test_each_result_needs_a_claim_and_each_claim_is_shown_once():
    records, rest = records_of(RESULTS), tuple(index for index in range(len(GRID)) if index not in MINE)
    records.take_claim(claim(record()))
    assert records.unclaimed and len(records.claims()) == 1
    one = ResultRecord(
        1, 0, FIRST, rest, hashes_of(RESULTS[index] for index in rest), b"", basis_of(OPENED.contributors)
    )
    records.take_claim(claim(one, ANN, ANN))
    assert not records.unclaimed and {found.owner for found in records.claims()} == {ANN, BEN}


def test_audit_needs_the_announcement_of_each_contributor():
    records = records_of(RESULTS, known=(ANN, BEN))
    every = tuple(range(len(GRID)))
    records.take_claim(claim(ResultRecord(1, 0, FIRST, every, hashes_of(RESULTS), b"", basis_of(OPENED.contributors))))
    assert len(records.claims()) == 1 and records.unclaimed


def test_claims_outlive_a_ballot_with_other_contributors_only_if_we_have_voted_for_their_results():
    for voted in (OPENED, None):
        records = records_of(RESULTS, voted=voted)
        records.take_claim(claim(record()))
        records.open(msgspec.structs.replace(OPENED, contributors=OPENED.contributors[:1]), [BEN] * len(GRID))
        records.open(msgspec.structs.replace(OPENED, adopted=bytes(32)), [BEN] * len(GRID))
        assert len(records.claims()) == (voted is not None)


def test_owner_claims_what_it_has_computed():
    records = records_of(RESULTS)
    for index in MINE:
        records.note_computed(index)
    assert records.sign(OPENED, MINE) == record()
    assert records.sign(OPENED, (0, 1)).basis == b"", "computed by another peer"
    assert {owner for owner, _ in records.take_claims().values()} == {ANN}


def test_only_the_first_record_of_an_owner_is_a_claim():
    """Otherwise it could fill the memory of others."""
    records = records_of(RESULTS)
    records.open(OPENED, [BEN] * len(GRID))
    first = record([bytes(len(chunk)) for chunk in RESULTS])
    records.take(BEN, first, signature(BEN, first))
    records.take(BEN, record(), signature(BEN, record()))
    assert records.results.expected_hash(2) == blake3.blake3(bytes(len(RESULTS[2]))).digest()
    assert records.take_claims() == {}
