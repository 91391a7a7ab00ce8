"""A round with the butterfly as its data plane, frame by frame."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace
from statistics import median_low

import blake3
import msgspec
import numpy as np
import pytest
from kit.rounds.round_harness import (
    BASE,
    DENSE,
    FIRST,
    GRID,
    LEADER,
    ME,
    PEERS,
    PLAN,
    SECOND,
    DenseHarness,
    RoundHarness,
    dense_payloads,
    hashes_of,
    mean,
    ready,
    signature,
)
from thinwire.collectives.aggregation.norm_bounds import norm_bound
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import TWO_ANNOUNCEMENTS, vote_for
from thinwire.collectives.rounds.data_planes.butterfly import Butterfly
from thinwire.collectives.rounds.data_planes.owner_records import basis_of
from thinwire.collectives.rounds.data_planes.result_store import digest_of
from thinwire.collectives.rounds.data_planes.transfer_progress import PARTIAL_FRAMES
from thinwire.collectives.rounds.repair import TIMES
from thinwire.collectives.state_sync.chunk_transfer import IN_FLIGHT
from thinwire.collectives.topology.bandwidth_shares import MOST
from thinwire.collectives.topology.shards import Grid
from thinwire.swarm.aggregation_spec import AggregationSpec
from thinwire.swarm.messages.registry import (
    Ask,
    Ballot,
    Blame,
    Chunk,
    Commit,
    Contribution,
    Exclusion,
    Fetch,
    Prepare,
    Promise,
    Proof,
    Propose,
    Ready,
    Result,
    ResultClaim,
    ResultRecord,
    ShownReady,
    Vote,
)

OTHER = PEERS[2]
IDS = PEERS[:3]


class Harness(DenseHarness):
    """Peer ME of three: LEADER leads, everyone contributes; ME owns chunks 2 and 3."""

    def __init__(self, **options):
        super().__init__(Butterfly, peers=IDS, **options)
        self.proposal = self.open()
        self.sent(Ready)

    def chunk(self, sender, index, payload=None, attempt=1):
        chunk = self.sources[sender][index] if payload is None else payload
        self.on_message(sender, Chunk(1, 0, attempt, index), chunk)

    def result(self, index):
        return mean([self.sources[peer][index] for peer in IDS], [10.0] * 3)

    def finish(self, ballot=FIRST):
        """Deliver all that is missing for a vote."""
        for peer in (LEADER, OTHER):
            for index in (2, 3):
                self.chunk(peer, index)
        for owner, indices in ((LEADER, (0, 1)), (OTHER, (4, 5))):
            self.results_of(owner, *indices, ballot=ballot)
            self.record_of(owner, *indices, ballot=ballot)


@pytest.fixture
def harness():
    return Harness()


def test_six_chunks_are_owned_two_each(harness):
    assert len(GRID) == 6
    assert harness.round.data_plane.owners == (LEADER, LEADER, ME, ME, OTHER, OTHER)


def test_butterfly_round_with_honest_peers_votes(harness):
    sent = {(to, message.index): payload for to, message, payload in harness.sent(Chunk)}
    assert sent == {
        (to, index): harness.sources[ME][index] for to, index in ((LEADER, 0), (LEADER, 1), (OTHER, 4), (OTHER, 5))
    }
    harness.finish()
    results = harness.sent(Result)
    assert {(to, message.index) for to, message, _ in results} == {(p, i) for p in (LEADER, OTHER) for i in (2, 3)}
    assert all(payload == harness.result(message.index) for _, message, payload in results)
    ((to, vote, _),) = harness.sent(Vote)
    wanted = digest_of([blake3.blake3(harness.result(i)).digest() for i in range(6)])
    assert to == LEADER and vote.digest == wanted and harness.blamed() == []


@pytest.mark.parametrize(("options", "audited"), [({}, False), ({"audited": True}, True)])
def test_owner_signs_once_for_all_its_results_and_in_audits_for_having_computed_them(options, audited):
    harness = Harness(**options)
    for peer in (LEADER, OTHER):
        harness.chunk(peer, 2)
    assert harness.sent(Result) and not harness.sent(ResultRecord)
    for peer in (LEADER, OTHER):
        harness.chunk(peer, 3)
    right = harness.record(2, 3)
    assert bool(right.basis) == audited
    assert [(to, message) for to, message, _ in harness.sent(ResultRecord)] == [(LEADER, right), (OTHER, right)]
    harness.results_of(LEADER, 0, 1)
    assert not harness.sent(ResultRecord)
    # It has computed them for these contributors, also if a later ballot adopts them.
    wanted = digest_of([blake3.blake3(harness.result(index)).digest() for index in range(6)])
    harness.open(ballot=Ballot(2, LEADER), adopted=wanted, sources=(LEADER,), kept=IDS)
    again = msgspec.structs.replace(right, ballot=Ballot(2, LEADER))
    assert [(to, message) for to, message, _ in harness.sent(ResultRecord)] == [(LEADER, again), (OTHER, again)]


def test_results_of_a_dropped_round_are_freed_at_once(harness):
    """Not only when cyclic garbage is collected, which may be many rounds later."""
    harness.finish()
    plane = weakref.ref(harness.round.data_plane)
    gc.disable()
    try:
        harness.round = None
        assert plane() is None
    finally:
        gc.enable()


def test_peer_without_chunks_signs_for_nothing():
    harness = DenseHarness(Butterfly, peers=IDS)
    harness.open(idle=(ME,))
    assert not harness.sent(ResultRecord)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (lambda right: bytes([right[0] ^ 1]) + right[1:], "hash"),
        (lambda right: right[:-4], "hash"),
        (lambda right: b"", "hash"),
    ],
)
def test_chunk_that_differs_from_announcement_is_blamed(harness, payload, reason):
    harness.chunk(OTHER, 2, payload(harness.sources[OTHER][2]))
    assert harness.blamed() == [(OTHER, reason)]
    harness.chunk(LEADER, 2)
    assert harness.sent(Result) == []


def _nan(right):
    return np.array([np.nan], np.float32).tobytes() + right[4:]


@pytest.mark.parametrize(("payload", "reason"), [(_nan, "not finite"), (lambda right: right[:-4], "length")])
def test_announced_but_invalid_chunk_is_blamed(payload, reason):
    harness = Harness()
    bad = list(harness.sources[OTHER])
    bad[2] = payload(bad[2])
    harness.sources[OTHER] = bad
    harness.on_message(OTHER, ready(bad, attempt=2))
    harness.open(ballot=Ballot(2, LEADER), contributors=tuple(Contribution(p, 1 + (p == OTHER), 10) for p in IDS))
    harness.sent(Blame)
    harness.chunk(OTHER, 2, attempt=2)
    assert harness.blamed() == [(OTHER, reason)]


def test_chunk_of_another_announcement_than_the_proposal_names_is_not_reduced():
    """OTHER has announced this data to us, and other data to the leader."""
    named = dict.fromkeys(IDS, b"")
    for announced, reduced in ((ready(Harness().sources[OTHER]).digest, True), (bytes([7]) * 32, False)):
        scene = Harness()
        said = {**named, OTHER: announced}
        scene.open(ballot=Ballot(2, LEADER), contributors=tuple(Contribution(p, 1, 10, said[p]) for p in IDS))
        for peer in (LEADER, OTHER):
            scene.chunk(peer, 2)
        assert bool(scene.sent(Result)) == reduced
        told = {(to, blame.peer, blame.reason) for to, blame, _ in scene.sent(Blame)}
        assert told == (set() if reduced else {(to, OTHER, TWO_ANNOUNCEMENTS) for to in (LEADER, OTHER)})


def test_contribution_with_another_digest_than_ours_is_not_sent():
    scene = Harness()
    scene.sent(Chunk)
    entries = tuple(Contribution(p, 1, 10, bytes([7]) * 32 if p == ME else b"") for p in IDS)
    scene.open(ballot=Ballot(2, LEADER), contributors=entries)
    assert not scene.sent(Chunk) and [blame.reason for _, blame, _ in scene.sent(Blame)] == ["withdrawn"]


def test_chunk_of_old_attempt_or_unknown_index_is_ignored(harness):
    harness.on_message(OTHER, ready(dense_payloads(9), attempt=2))
    harness.chunk(OTHER, 2)
    for index in (6, 60):
        harness.chunk(LEADER, index, b"x")
    harness.chunk(LEADER, 2)
    assert harness.sent(Result) == [] and harness.blamed() == []


def test_second_contribution_to_a_round_is_sent(harness):
    """A failed attempt of a round continues with the training since then."""
    harness.sent(Chunk)
    again = dense_payloads(11)
    harness.round.announce(again, weight=10, loss=0.0, speed=0.0)
    contributors = tuple(Contribution(peer, 1 + (peer == ME), 10) for peer in IDS)
    harness.open(ballot=Ballot(2, LEADER), contributors=contributors)
    sent = {(to, message.attempt, message.index): payload for to, message, payload in harness.sent(Chunk)}
    assert sent == {(to, 2, i): again[i] for to, i in ((LEADER, 0), (LEADER, 1), (OTHER, 4), (OTHER, 5))}


def test_chunk_before_its_announcement_is_kept():
    harness = Harness()
    later = dense_payloads(7)
    harness.chunk(OTHER, 3, later[3], attempt=2)
    assert harness.blamed() == []
    harness.sources[OTHER] = later
    harness.on_message(OTHER, ready(later, attempt=2))
    harness.open(ballot=Ballot(2, LEADER), contributors=tuple(Contribution(p, 1 + (p == OTHER), 10) for p in IDS))
    harness.chunk(LEADER, 3)
    results = harness.sent(Result)
    assert {message.index for _, message, _ in results} == {3} and results[0][2] == harness.result(3)


def test_repeated_chunk_changes_nothing(harness):
    for _ in range(3):
        for peer in (LEADER, OTHER):
            harness.chunk(peer, 2)
    assert len(harness.sent(Result)) == 2 and harness.blamed() == []


@pytest.mark.parametrize(("sender", "index"), [(OTHER, 0), (LEADER, 4)])
def test_result_from_non_owner_is_ignored(harness, sender, index):
    harness.on_message(sender, Result(1, 0, FIRST, index), harness.result(index))
    assert harness.round.results[index] is None and harness.blamed() == []
    assert harness.round.data_plane.early[0] == 0, "nothing is settled that could vouch for it later"


@pytest.mark.parametrize("payload", [b"", bytes(8), None])
def test_invalid_result_is_blamed(harness, payload):
    wrong = _nan(harness.result(0)) if payload is None else payload
    harness.on_message(LEADER, Result(1, 0, FIRST, 0), wrong)
    assert harness.round.results[0] is None and harness.blamed() == [(LEADER, "result")]


def test_result_that_contradicts_owner_record_is_blamed(harness):
    harness.record_of(LEADER, 0, 1)
    harness.on_message(LEADER, Result(1, 0, FIRST, 0), harness.result(0)[:-4] + bytes(4))
    assert harness.round.results[0] is None and harness.blamed() == [(LEADER, "result")]
    harness.results_of(LEADER, 0)
    assert bytes(harness.round.results[0]) == harness.result(0)


def bounded(**options):
    """Return a harness whose peers announce norms."""
    return Harness(bound=norm_bound(AggregationSpec("mean")), **options)


@pytest.mark.parametrize(("factor", "fits"), [(1.0, True), (1.6, True), (2.0, False), (-1e9, False)])
def test_result_longer_than_all_contributions_allow_is_blamed(factor, fits):
    """The sources are independent: their mean has the norm 1/√3 of the largest possible one, 1.73 times shorter."""
    harness = bounded()
    false = (np.float32(factor) * np.frombuffer(harness.result(0), np.float32)).tobytes()
    harness.on_message(LEADER, Result(1, 0, FIRST, 0), false)
    assert (harness.round.results[0] is not None) == fits
    assert harness.blamed() == ([] if fits else [(LEADER, "result")])


def test_later_announcement_of_a_contributor_does_not_lift_the_bound():
    """Its norm in the ballot is unknown then; those of the others still limit a clipped mean."""
    harness = Harness(bound=norm_bound(AggregationSpec("clip")))
    harness.on_message(OTHER, ready(harness.sources[OTHER], attempt=2, norms=np.full(6, 1.0, "<f4").tobytes()))
    false = (np.float32(-1e9) * np.frombuffer(harness.result(0), np.float32)).tobytes()
    harness.on_message(LEADER, Result(1, 0, FIRST, 0), false)
    assert harness.round.results[0] is None and harness.blamed() == [(LEADER, "result")]
    assert harness.round.data_plane.refused.keys() == {LEADER}


@pytest.mark.parametrize("norm", [5e-38, -0.0])
def test_zero_chunk_with_another_announced_norm_is_blamed(norm):
    """A norm of zero does not enter the median of a clipped mean, so the smallest other one would change the bound."""
    harness, zero = bounded(), bytes(4 * GRID.size(2))
    chunks = [zero if index == 2 else chunk for index, chunk in enumerate(harness.sources[OTHER])]
    norms = np.frombuffer(harness.round.data_plane.summarize(chunks).norms, "<f4").copy()
    norms[2] = norm
    harness.on_message(OTHER, ready(chunks, attempt=2, norms=norms.tobytes()))
    harness.open(ballot=SECOND, contributors=tuple(Contribution(p, 1 + (p == OTHER), 10) for p in IDS))
    harness.chunk(OTHER, 2, zero, attempt=2)
    assert harness.blamed() == [(OTHER, "hash")]


def test_relay_of_a_false_result_names_the_relay_only():
    harness = bounded()
    harness.record_of(LEADER, 0, 1)
    harness.on_message(OTHER, Result(1, 0, FIRST, 0), np.full(GRID.size(0), 1e9, np.float32).tobytes())
    assert harness.blamed() == [(OTHER, "result")] and not harness.round.data_plane.refused


@pytest.mark.parametrize("sources", [(LEADER,), (LEADER, OTHER)])
def test_adopted_result_beyond_the_bound_is_taken_if_more_peers_have_voted_than_may_lie(sources):
    """A single voter may lie, and then one peer could give all others any result."""
    harness, false = bounded(), np.full(GRID.size(0), 1e9, np.float32).tobytes()
    results = [false, *(harness.result(index) for index in range(1, 6))]
    wanted = digest_of([blake3.blake3(result).digest() for result in results])
    harness.open(ballot=SECOND, adopted=wanted, sources=sources, kept=IDS)
    harness.on_message(LEADER, ResultRecord(1, 0, SECOND, tuple(range(6)), hashes_of(results)))
    for index, result in enumerate(results):
        harness.on_message(LEADER, Result(1, 0, SECOND, index), result)
    if len(sources) > 1:
        assert bytes(harness.round.results[0]) == false and harness.blamed() == [] and harness.sent(Vote)
    else:
        assert harness.round.results[0] is None and harness.blamed() == [(LEADER, "result")] and not harness.sent(Vote)


def test_committed_result_beyond_the_bound_is_taken():
    harness, false = bounded(), np.full(GRID.size(0), 1e9, np.float32).tobytes()
    results = [false, *(harness.result(index) for index in range(1, 6))]
    wanted = digest_of([blake3.blake3(result).digest() for result in results])
    harness.open(ballot=SECOND, adopted=wanted, sources=(LEADER,), kept=IDS)
    harness.on_message(LEADER, ResultRecord(1, 0, SECOND, tuple(range(6)), hashes_of(results)))
    harness.on_message(LEADER, Result(1, 0, SECOND, 0), false)
    assert harness.round.results[0] is None
    vote = vote_for(harness.round.agreement.proposal, wanted)
    votes = tuple(Proof(peer, signature(peer, vote)) for peer in (LEADER, OTHER))
    harness.on_message(LEADER, Commit(harness.round.agreement.proposal, wanted, votes))
    for index, result in enumerate(results):
        harness.on_message(OTHER, Result(1, 0, SECOND, index), result)
    assert harness.round.complete and bytes(harness.round.results[0]) == false


def test_peer_computes_and_votes_again_when_a_free_ballot_follows_one_with_false_results():
    """The results of the voter do not count in the later ballot, and neither does their digest."""
    harness = Harness()
    false = [bytes(len(harness.result(index))) for index in range(6)]
    wanted = digest_of([blake3.blake3(result).digest() for result in false])
    harness.open(ballot=SECOND, adopted=wanted, sources=(LEADER,), kept=IDS)
    harness.on_message(LEADER, ResultRecord(1, 0, SECOND, tuple(range(6)), hashes_of(false)))
    for index in (0, 2):
        harness.on_message(LEADER, Result(1, 0, SECOND, index), false[index])
    assert harness.round.results[0] is not None and harness.round.results[2] is not None
    third = Ballot(3, OTHER)
    harness.sent(Result)
    harness.open(ballot=third)
    for peer in (LEADER, OTHER):
        for index in (2, 3):
            harness.chunk(peer, index)
    mine = [(message.index, payload) for to, message, payload in harness.sent(Result) if to == OTHER]
    assert mine == [(index, harness.result(index)) for index in (2, 3)]
    for peer, owned in ((LEADER, (0, 1)), (OTHER, (4, 5))):
        harness.results_of(peer, *owned, ballot=third)
        harness.record_of(peer, *owned, ballot=third)
    ((to, vote, _),) = harness.sent(Vote)
    assert to == OTHER and vote.ballot == third
    assert vote.digest == digest_of([blake3.blake3(harness.result(index)).digest() for index in range(6)])
    assert not harness.round.data_plane.failed, "the owners have contradicted no result that counts"


@pytest.mark.parametrize(
    "norms", [b"", bytes(24), np.full(6, np.nan, "<f4").tobytes(), np.full(6, 1.0, "<f4").tobytes()]
)
def test_contribution_whose_announced_norm_is_false_is_blamed(norms):
    harness = bounded()
    harness.on_message(OTHER, ready(harness.sources[OTHER], attempt=2, norms=norms))
    harness.open(ballot=SECOND, contributors=tuple(Contribution(p, 1 + (p == OTHER), 10) for p in IDS))
    harness.chunk(OTHER, 2, attempt=2)
    assert harness.blamed() == [(OTHER, "hash")]


def test_record_that_contradicts_received_result_drops_it(harness):
    harness.on_message(LEADER, Result(1, 0, FIRST, 0), harness.result(0)[:-4] + bytes(4))
    assert harness.round.results[0] is not None
    harness.record_of(LEADER, 0, 1)
    assert harness.round.results[0] is None
    harness.finish()
    assert len(harness.sent(Vote)) == 1


@pytest.mark.parametrize(
    "record",
    [
        ResultRecord(1, 0, FIRST, (0, 1), bytes(32)),  # fewer hashes than indices
        ResultRecord(1, 0, FIRST, (0, 1), bytes(96)),
        ResultRecord(1, 0, FIRST, (0, 0), bytes(64)),
        ResultRecord(1, 0, FIRST, (0, 99), bytes(64)),
        ResultRecord(1, 0, FIRST, (0, 6), bytes(64)),  # one beyond the last chunk
        ResultRecord(1, 0, FIRST, (2, 3), bytes(64)),  # our chunks
        ResultRecord(1, 0, FIRST, (4, 5), bytes(64)),  # chunks of another owner
    ],
)
def test_record_of_another_form_or_from_non_owner_is_ignored(harness, record):
    harness.on_message(LEADER, record)
    harness.finish()
    assert len(harness.sent(Vote)) == 1 and harness.blamed() == []


def test_changed_record_is_no_progress(harness):
    """With changing ResultRecords and fitting Results, an owner could seem active forever."""
    first, second = (bytes(4 * GRID.size(0)), np.ones(GRID.size(0), np.float32).tobytes())
    for at in range(100):
        harness.now = float(at)
        chunk = (first, second)[at % 2]
        harness.on_message(LEADER, ResultRecord(1, 0, FIRST, (0,), hashes_of([chunk])))
        harness.on_message(LEADER, Result(1, 0, FIRST, 0), chunk)
    assert harness.round.progressed_at == 0.0 and bytes(harness.round.results[0]) == first


def test_unneeded_chunk_is_no_progress(harness):
    for attempt in range(2, 50):
        harness.now = float(attempt)
        harness.on_message(OTHER, ready(harness.sources[OTHER], attempt))
        harness.chunk(OTHER, 2, attempt=attempt)
    assert harness.round.progressed_at == 0.0
    harness.chunk(LEADER, 2)
    assert harness.round.progressed_at == harness.now


def test_owner_that_lost_chunks_or_signed_other_results_has_failed(harness):
    harness.finish()
    assert not harness.round.data_plane.failed
    others = dense_payloads(9)
    right = [harness.result(index) for index in range(4)]
    digest = blake3.blake3(hashes_of(right + others[4:])).digest()
    harness.open(ballot=Ballot(2, LEADER), adopted=digest, sources=(LEADER,), kept=tuple(IDS), idle=(LEADER,))
    harness.on_message(LEADER, ResultRecord(1, 0, Ballot(2, LEADER), tuple(range(6)), hashes_of(right + others[4:])))
    assert harness.round.data_plane.failed == {LEADER, OTHER}


@pytest.mark.parametrize(("first", "last"), [(LEADER, OTHER), (OTHER, LEADER)])
def test_butterfly_votes_only_after_every_owner_record(harness, first, last):
    owned = {LEADER: (0, 1), OTHER: (4, 5)}
    for peer in (LEADER, OTHER):
        for index in (2, 3):
            harness.chunk(peer, index)
    harness.results_of(LEADER, 0, 1)
    harness.results_of(OTHER, 4, 5)
    harness.record_of(first, *owned[first])
    assert harness.sent(Vote) == []
    harness.record_of(last, *owned[last])
    assert len(harness.sent(Vote)) == 1


def test_silent_peer_is_blamed_after_a_patience(harness):
    harness.chunk(LEADER, 2)
    harness.chunk(LEADER, 3)
    harness.now = 1.0
    harness.round.tick()
    assert harness.blamed() == []
    harness.now = 2.5
    harness.round.tick()
    assert harness.blamed() == [(OTHER, "chunk missing")]
    harness.round.tick()
    assert harness.blamed() == [], "once a ballot"


def test_owner_has_time_to_name_the_peer_that_it_waits_for_before_it_is_blamed(harness):
    for peer in (LEADER, OTHER):
        for index in (2, 3):
            harness.chunk(peer, index)
    patience = harness.round.agreement.terms.patience
    for share, blamed in ((1.2, []), (1.3, [(LEADER, "result missing")])):
        harness.now = share * patience
        harness.round.tick()
        assert harness.blamed() == blamed


def test_unannounced_contributor_is_asked():
    harness = Harness()
    harness.sent(Ask)
    stranger = bytes([9]) * 32
    group = (*IDS, stranger)
    harness.open(
        ballot=Ballot(2, LEADER),
        group=group,
        alive=group,
        contributors=tuple(Contribution(peer, 1, 10) for peer in group),
    )
    assert [to for to, _, _ in harness.sent(Ask)] == [stranger]


def _opening(harness, *group):
    """Return a later ballot of OTHER, with this group."""
    entries = tuple(Contribution(peer, 1, 10) for peer in group)
    return harness.opening(ballot=Ballot(3, OTHER), group=group, alive=group, contributors=entries)


def _commit(proposal, harness, voters=(LEADER, OTHER)):
    digest = digest_of([blake3.blake3(harness.result(i)).digest() for i in range(6)])
    vote = vote_for(proposal, digest)
    return Commit(proposal, digest, tuple(Proof(peer, signature(peer, vote)) for peer in voters))


def test_excluded_peer_fetches_results_from_voters(harness):
    """Excluded from the committing ballot, it asks each voter for half, and checks them with the commit's digest."""
    proposal = _opening(harness, LEADER, OTHER)
    commit = _commit(proposal, harness)
    harness.on_message(LEADER, commit)
    asked = harness.sent(Fetch)
    assert {to for to, _, _ in asked} == {LEADER, OTHER}
    assert sorted(index for _, message, _ in asked for index in message.indices) == list(range(6))
    hashes = b"".join(blake3.blake3(harness.result(i)).digest() for i in range(6))
    # A lie about all results does not fit the digest and is refused.
    harness.on_message(OTHER, ResultRecord(1, 0, proposal.ballot, tuple(range(6)), bytes(192)))
    harness.on_message(OTHER, Result(1, 0, proposal.ballot, 0), harness.result(0)[:-4] + bytes(4))
    harness.on_message(LEADER, ResultRecord(1, 0, proposal.ballot, tuple(range(6)), hashes))
    for index in range(6):
        harness.on_message(LEADER, Result(1, 0, proposal.ballot, index), harness.result(index))
    assert harness.round.complete
    assert [bytes(result) for result in harness.round.results] == [harness.result(i) for i in range(6)]


def test_adopted_results_are_unobtainable_while_none_of_their_voters_is_reachable():
    harness = Harness()
    assert not harness.round.unobtainable(), "it has results to wait for, and is bound to none"
    harness.open(ballot=Ballot(2, LEADER), adopted=bytes([7]) * 32, sources=(OTHER,), kept=IDS)
    assert not harness.round.unobtainable()
    harness.round.on_link_down(OTHER)
    assert harness.round.unobtainable()
    harness.round.on_link_up(OTHER)
    assert not harness.round.unobtainable()


def test_voter_that_is_reachable_again_is_asked_at_once_if_all_others_have_freed_the_results(harness):
    """Otherwise a peer that is behind would wait for it, although it may have freed them, too."""
    harness.round.on_link_down(OTHER)
    harness.on_message(LEADER, _commit(_opening(harness, LEADER, OTHER), harness))
    harness.round.on_link_up(OTHER)
    assert {to for to, _, _ in harness.sent(Fetch)} == {LEADER}, "the leader may still send them"
    harness.round.on_link_down(OTHER)
    assert not harness.round.exhausted
    harness.round.note_freed(LEADER)
    assert harness.round.mostly_exhausted and harness.round.exhausted
    harness.round.on_link_up(OTHER)
    ((to, message, _),) = harness.sent(Fetch)
    assert to == OTHER and sorted(message.indices) == list(range(6))
    assert not harness.round.mostly_exhausted and not harness.round.exhausted
    harness.round.note_freed(OTHER)
    assert harness.round.mostly_exhausted and harness.round.exhausted


def test_abandoned_round_ends_without_a_commit(harness):
    outcome = asyncio.run(_abandoned(harness))
    assert outcome.commit is None and not outcome.diverged and not harness.round.complete


async def _abandoned(harness):
    waiting = asyncio.ensure_future(harness.round.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    harness.round.abandon()
    return await asyncio.wait_for(waiting, 1.0)


def test_results_are_fetched_elsewhere_when_source_has_none():
    """Requests move to another peer at once; without another one, only the state is left to fetch."""
    harness = Harness()
    group = (LEADER, OTHER)
    harness.on_message(LEADER, _commit(_opening(harness, *group), harness))
    asked = {to: message.indices for to, message, _ in harness.sent(Fetch)}
    assert asked.keys() == {LEADER, OTHER} and not harness.round.mostly_exhausted
    harness.round.note_freed(OTHER)
    again = harness.sent(Fetch)
    assert [(to, message.indices) for to, message, _ in again] == [(LEADER, asked[OTHER])]
    harness.round.note_freed(OTHER)
    assert not harness.sent(Fetch) and not harness.round.mostly_exhausted
    harness.round.note_freed(LEADER)
    assert not harness.sent(Fetch) and harness.round.mostly_exhausted
    harness.on_message(LEADER, _commit(harness.round.agreement.commit.proposal, harness))
    assert not harness.round.mostly_exhausted, "what it had said was about another round"


def test_results_are_fetched_from_several_sources():
    """Its link may lose the requests while the other peers have continued."""
    harness, third = Harness(), bytes([9]) * 32
    harness.round.on_link_up(third)
    group = (LEADER, OTHER, third)
    proposal = _opening(harness, *group)
    harness.on_message(LEADER, _commit(proposal, harness, voters=group))
    harness.round.note_freed(OTHER)
    assert not harness.round.mostly_exhausted
    harness.round.note_freed(third)
    assert harness.round.mostly_exhausted


@pytest.mark.parametrize("owes", [True, False])
def test_owed_bytes_in_transit_are_progress_for_a_while(owes):
    """LEADER withholds its results, while OTHER sends at 2.5 kB/s: owed bytes, or useless ones."""
    harness = Harness()
    for index in (2, 3):
        for peer in (LEADER, OTHER):
            harness.chunk(peer, index)
    if not owes:
        harness.results_of(OTHER, 4, 5)
        harness.record_of(OTHER, 4, 5)
    patience = harness.round.agreement.terms.patience
    since = harness.now
    while not harness.blamed() and harness.now < since + 100 * patience:
        harness.now += patience / 8
        harness.queue.stirring[OTHER] = int(2500 * harness.now)
        harness.round.tick()
    assert (harness.now - since) / patience == pytest.approx(PARTIAL_FRAMES + 1 if owes else 1, abs=0.5)


@pytest.mark.parametrize("busy", [False, True])
def test_peer_blames_no_owner_while_its_own_data_leaves_to_most_receivers(busy):
    """All may wait for that, but not for a single receiver that is slow."""
    harness = Harness()
    for index in (2, 3):
        for peer in (LEADER, OTHER):
            harness.chunk(peer, index)
    patience, since = harness.round.agreement.terms.patience, harness.now
    while harness.now < since + 4 * patience:
        harness.now += patience / 8
        harness.queue.departed, harness.queue.busy = harness.now, busy
        harness.round.tick()
    assert bool(harness.blamed()) != busy
    if not busy:
        return
    harness.now += 1.5 * patience
    harness.round.tick()
    assert harness.blamed()


@pytest.mark.parametrize("honest", [True, False])
def test_results_are_fetched_from_followers_when_voters_are_unreachable(honest):
    """A newcomer has followed the round and is in the next one: it has the results, or lies; the commit stays."""
    harness, guest = Harness(), bytes([9]) * 32
    harness.round.on_link_up(guest)
    group = (LEADER, OTHER)
    proposal = _opening(harness, *group)
    harness.on_message(LEADER, _commit(proposal, harness))
    for peer in group:
        harness.round.on_link_down(peer)
    harness.queue.sent.clear()
    harness.round.agreement.past.add(guest)
    patience = harness.round.agreement.terms.patience
    for _ in range(12):
        harness.now += 0.99 * patience
        harness.round.tick()
    asked = harness.sent(Fetch)
    assert {to for to, _, _ in asked} == {guest} and {i for _, message, _ in asked for i in message.indices} == {
        *range(6)
    }
    if honest:
        hashes = b"".join(blake3.blake3(harness.result(i)).digest() for i in range(6))
        harness.on_message(guest, ResultRecord(1, 0, proposal.ballot, tuple(range(6)), hashes))
        for index in range(6):
            harness.on_message(guest, Result(1, 0, proposal.ballot, index), harness.result(index))
    harness.now += 100 * patience
    harness.round.tick()
    assert harness.round.complete == honest and harness.round.agreement.commit is not None
    assert harness.round.unobtainable() != honest


def test_results_before_their_record_are_kept(harness):
    """Records are control messages, results use streams; peers must not request results again for that."""
    group = (LEADER, OTHER)
    proposal = _opening(harness, *group)
    harness.on_message(LEADER, _commit(proposal, harness))
    hashes = b"".join(blake3.blake3(harness.result(i)).digest() for i in range(6))
    harness.on_message(OTHER, Result(1, 0, proposal.ballot, 1), harness.result(1)[:-4] + bytes(4))
    for index in range(6):
        harness.on_message(LEADER, Result(1, 0, proposal.ballot, index), harness.result(index))
    harness.on_message(LEADER, ResultRecord(1, 0, proposal.ballot, tuple(range(6)), hashes))
    assert harness.round.complete
    assert [bytes(result) for result in harness.round.results] == [harness.result(i) for i in range(6)]


def test_lost_results_are_fetched_soon_after_the_verdict(harness):
    """Its patience may be longer than the others' next round, after which they drop these results."""
    proposal = harness.proposal
    for index in (0, 1, 4):
        owner = harness.round.data_plane.owners[index]
        harness.on_message(owner, Result(1, 0, proposal.ballot, index), harness.result(index))
    harness.on_message(LEADER, _commit(proposal, harness))
    harness.round.tick()
    assert not harness.round.complete and not harness.sent(Fetch), "they may still be on their way"
    harness.now += 0.3 * harness.round.agreement.terms.patience
    harness.round.tick()
    missing = [index for _, message, _ in harness.sent(Fetch) for index in message.indices]
    assert sorted(missing) == harness.round.data_plane.results.missing_indices() != []
    harness.now += 0.3 * harness.round.agreement.terms.patience
    harness.round.tick()
    assert not harness.sent(Fetch)


def test_results_are_served_for_the_right_digest_only(harness):
    harness.finish()
    harness.queue.sent.clear()
    digest = digest_of([blake3.blake3(harness.result(i)).digest() for i in range(6)])
    harness.on_message(OTHER, Fetch(1, 0, bytes(32), (0, 1)))
    assert harness.queue.sent == []
    harness.on_message(OTHER, Fetch(1, 0, digest, (5, 0, 5, 77)))
    ((_, record, _),) = harness.sent(ResultRecord)
    assert record.indices == tuple(range(6))
    assert [(message.index, payload) for _, message, payload in harness.sent(Result)] == [
        (5, harness.result(5)),
        (0, harness.result(0)),
    ]


def test_peer_gets_the_results_of_a_round_a_few_times_only(harness):
    """A peer that asks for them for ever would take the uplink from the others."""
    harness.finish()
    harness.queue.sent.clear()
    digest = digest_of([blake3.blake3(harness.result(i)).digest() for i in range(6)])
    for _ in range(20):
        harness.on_message(PEERS[4], Fetch(1, 0, digest, tuple(range(4))))
    assert len(harness.sent(Result)) == TIMES * 6
    harness.on_message(OTHER, Fetch(1, 0, digest, (0,)))
    assert len(harness.sent(Result)) == 1, "a member"
    harness.round.on_link_down(PEERS[4])
    harness.on_message(PEERS[4], Fetch(1, 0, digest, (0,)))
    assert len(harness.sent(Result)) == 1, "over another link"


def test_peer_that_follows_gets_results_with_pauses_after_the_commit(harness):
    digest = digest_of([blake3.blake3(harness.result(i)).digest() for i in range(6)])
    harness.slow = {PEERS[4]}
    harness.finish()
    harness.on_message(PEERS[4], Fetch(1, 0, digest, (0,)))
    assert harness.queue.paced == [] and harness.asked == [], "the round is not over"
    harness.on_message(LEADER, _commit(harness.proposal, harness))
    harness.queue.sent.clear()
    harness.on_message(PEERS[4], Fetch(1, 0, digest, (5, 0)))
    assert [message.index for _, message, _ in harness.queue.paced] == [5, 0] and harness.sent(Result) == []
    harness.on_message(OTHER, Fetch(1, 0, digest, (5,)))
    assert len(harness.sent(Result)) == 1 and harness.asked == [(PEERS[4], 1)]
    harness.queue.paced *= IN_FLIGHT + 1
    harness.on_message(PEERS[4], Fetch(1, 0, digest, (1,)))
    assert len(harness.queue.paced) == 2 * (IN_FLIGHT + 1), "the peer has not read what it asked for before"


def test_peer_that_follows_asks_again_only_after_the_pauses_of_its_sources():
    """A late member asks others after one patience, a peer that follows after two, and then after four."""
    waits = []
    for members in (IDS, (LEADER, OTHER)):
        harness = Harness()
        harness.round.agreement.terms = replace(harness.terms, members=members)
        harness.on_message(LEADER, _commit(_opening(harness, LEADER, OTHER), harness))
        assert harness.round.follows == (ME not in members) and len(harness.sent(Fetch)) == 2
        at = []
        for harness.now in range(100):
            harness.round.tick()
            at += [harness.now] if harness.sent(Fetch) else []
        waits.append([after - before for before, after in zip([0, *at], at, strict=False)][:2])
        if harness.round.follows:
            harness.round.on_link_down(LEADER)
            assert [to for to, _, _ in harness.sent(Fetch)] == [OTHER], "at once, if a source is lost"
    patience = harness.terms.patience
    assert waits == [[patience, patience], [2 * patience, 4 * patience]]


def test_request_to_another_source_lengthens_no_pause():
    """Only requests without an answer do. Here a source has freed the results, and its link breaks."""
    harness = Harness()
    harness.round.agreement.terms = replace(harness.terms, members=(LEADER, OTHER))
    harness.on_message(LEADER, _commit(_opening(harness, LEADER, OTHER), harness))
    harness.round.note_freed(LEADER)
    harness.round.on_link_down(LEADER)
    harness.round.on_link_up(LEADER)
    harness.sent(Fetch)
    for harness.now in range(100):
        harness.round.tick()
        if harness.sent(Fetch):
            break
    assert harness.now == 2 * harness.terms.patience


def test_peer_that_follows_asks_the_first_source_that_can_be_reached_at_once():
    """At the commit none could be; a link is up again, or a suspicion has ended."""
    harness = Harness()
    harness.round.agreement.terms = replace(harness.terms, members=(LEADER, OTHER))
    for peer in (LEADER, OTHER):
        harness.round.on_link_down(peer)
    harness.on_message(PEERS[4], _commit(_opening(harness, LEADER, OTHER), harness))
    assert harness.round.follows and not harness.sent(Fetch)
    harness.now = 0.5
    harness.round.agreement.electorate.live.add(OTHER)
    harness.round.tick()
    assert {to for to, _, _ in harness.sent(Fetch)} == {OTHER}


@pytest.mark.parametrize("asked", [False, True])
def test_time_without_a_source_lengthens_no_pause_between_requests(asked):
    """No request is made then. A source that is back has restarted, and does not answer the first one."""
    harness = Harness()
    harness.round.agreement.terms = replace(harness.terms, members=(LEADER, OTHER))
    if not asked:
        harness.round.on_link_down(OTHER)
    harness.round.on_link_down(LEADER)
    harness.on_message(PEERS[4], _commit(_opening(harness, LEADER, OTHER), harness))
    harness.round.on_link_down(OTHER)
    assert bool(harness.sent(Fetch)) == asked
    for tick in range(200):
        harness.now = tick / 10
        harness.round.tick()
    assert not harness.sent(Fetch)
    harness.round.agreement.electorate.live.add(OTHER)
    at = []
    for tick in range(200, 1000):
        harness.now = tick / 10
        harness.round.tick()
        at += [harness.now] if harness.sent(Fetch) else []
    patience = harness.terms.patience
    assert at[0] == 20.0 and at[1] - at[0] == pytest.approx((4 if asked else 2) * patience, abs=0.2)


def test_peer_that_does_not_read_answers_gets_no_more(harness):
    harness.finish()
    digest = digest_of([blake3.blake3(harness.result(i)).digest() for i in range(6)])
    harness.queue.sent.clear()
    harness.queue.waiting = 2 * IN_FLIGHT
    harness.on_message(OTHER, Fetch(1, 0, digest, (0,)))
    assert len(harness.sent(Result)) == len(harness.sent(ResultRecord)) == 1
    harness.queue.waiting += 1
    harness.on_message(OTHER, Fetch(1, 0, digest, (0,)))
    assert harness.queue.sent == []


def test_usual_norm_follows_committed_rounds_only(harness):
    """Failed attempts leave no trace."""
    for peer in (LEADER, OTHER):
        for index in (2, 3):
            harness.chunk(peer, index)
    assert harness.usual == {}
    louder = [(np.frombuffer(chunk, np.float32) * np.float32(2)).tobytes() for chunk in harness.sources[OTHER]]
    harness.sources[OTHER] = louder
    harness.on_message(OTHER, ready(louder, attempt=2))
    contributors = tuple(Contribution(peer, 1 + (peer == OTHER), 10) for peer in IDS)
    proposal = harness.open(ballot=Ballot(2, LEADER), contributors=contributors)
    for index in (2, 3):
        harness.chunk(OTHER, index, attempt=2)
    for owner, indices in ((LEADER, (0, 1)), (OTHER, (4, 5))):
        harness.results_of(owner, *indices, ballot=Ballot(2, LEADER))
        harness.record_of(owner, *indices, ballot=Ballot(2, LEADER))
    assert harness.usual == {}
    harness.on_message(LEADER, _commit(proposal, harness))
    norms = {
        i: median_low(float(np.linalg.norm(np.frombuffer(harness.sources[peer][i], np.float32))) for peer in IDS)
        for i in (2, 3)
    }
    assert harness.usual == {i: pytest.approx(norm, rel=1e-5) for i, norm in norms.items()}


@pytest.mark.parametrize(("factor", "reason"), [(1e6, "norm"), (np.inf, "not finite")])
def test_own_contribution_is_screened_where_we_own_the_chunk(harness, factor, reason):
    """If our training has diverged, the chunks that we own must be averaged without us, like all others."""
    with np.errstate(invalid="ignore"):
        mine = [(np.frombuffer(chunk, np.float32) * np.float32(factor)).tobytes() for chunk in harness.sources[ME]]
    harness.round.announce(mine, weight=10, loss=0.0, speed=0.0)
    contributors = tuple(Contribution(peer, 1 + (peer == ME), 10) for peer in IDS)
    harness.open(ballot=Ballot(2, LEADER), contributors=contributors)
    for peer in (LEADER, OTHER):
        for index in (2, 3):
            harness.chunk(peer, index)
    assert set(harness.blamed()) == {(ME, reason)} and harness.sent(Result) == []


def test_early_frames_of_one_peer_leave_room_for_others():
    harness = Harness()
    later, stranger = dense_payloads(7), bytes([9]) * 32
    for _ in range(5):
        for index in range(6):
            harness.chunk(LEADER, index, bytes(4096 * 4), attempt=7)
            harness.on_message(stranger, Chunk(1, 0, 1, index), bytes(4096 * 4))
    for index in (2, 3):
        harness.chunk(OTHER, index, later[index], attempt=2)
    harness.sources[OTHER] = later
    harness.on_message(OTHER, ready(later, attempt=2))
    harness.open(ballot=Ballot(2, LEADER), contributors=tuple(Contribution(p, 1 + (p == OTHER), 10) for p in IDS))
    for index in (2, 3):
        harness.chunk(LEADER, index)
    assert {message.index for _, message, _ in harness.sent(Result)} == {2, 3}


def test_oversized_early_frame_is_dropped():
    harness = Harness()
    for index, size in ((2, 4 * 4096 + 1), (6, 1)):
        harness.chunk(OTHER, index, bytes(size), attempt=2)
    assert harness.round.data_plane.early[0] == 0
    harness.chunk(OTHER, 2, bytes(4 * 4096), attempt=2)
    assert harness.round.data_plane.early[0] == 1
    harness.chunk(OTHER, 3, bytes(8), attempt=2)
    assert harness.round.data_plane.early[0] == 2, "payloads of some codecs vary in length"


def test_early_frames_of_one_peer_are_all_that_an_honest_one_sends_and_some_repeated_ones(harness):
    for number in range(40):
        harness.chunk(LEADER, number % 6, b"", attempt=2)
    assert harness.round.data_plane.early[0] == 2 * len(GRID) + 8


def test_early_chunk_beyond_the_grid_is_dropped_although_the_last_chunk_is_full():
    options = {**DENSE, "grid": Grid(2 * 4096, 4096)}
    harness = RoundHarness(Butterfly, peers=IDS, **options)
    for index in (1, 2):
        harness.on_message(OTHER, Chunk(1, 0, 1, index), b"")
    assert harness.round.data_plane.early[0] == 1


def test_record_before_its_ballot_is_kept_with_a_single_chunk():
    options = {**DENSE, "grid": Grid(4096, 4096)}
    harness = RoundHarness(Butterfly, peers=IDS, **options)
    harness.on_message(LEADER, ResultRecord(1, 0, FIRST, (0,), bytes(32)))
    assert harness.round.data_plane.early[0] == 1


def test_resumed_round_keeps_promises_and_votes():
    """A peer that gave a round up for a swarm ahead, and found none, must not vote twice in it."""
    harness = Harness()
    harness.on_message(OTHER, Prepare(1, 0, Ballot(5, OTHER)))
    assert len(harness.sent(Promise)) == 1
    harness.round.agreement.overtaken()
    harness.round.pump()
    harness.round.resume()
    harness.finish()
    assert harness.sent(Vote) == [] and not harness.round.agreement.diverged
    proposal = harness.open(ballot=Ballot(5, OTHER))
    assert harness.round.data_plane.proposal == proposal and len(harness.sent(Vote)) == 1


def test_frames_of_another_fragment_are_ignored(harness):
    before = len(harness.queue.sent)
    harness.on_message(OTHER, Chunk(1, 1, 1, 2), b"x")
    harness.on_message(LEADER, Result(1, 1, FIRST, 0), b"x")
    harness.on_message(LEADER, Propose(harness.opening(fragment=1, ballot=Ballot(2, LEADER))))
    assert len(harness.queue.sent) == before and harness.round.agreement.proposal == harness.proposal


# --- butterfly: chunks and results that belong to another place or time


@pytest.mark.parametrize(("sender", "index"), [(OTHER, 0), (LEADER, 4)])
def test_chunk_for_another_owner_is_neither_used_nor_blamed(harness, sender, index):
    harness.chunk(sender, index, b"spoilt!!")
    assert harness.blamed() == []


def test_chunk_of_an_announcement_that_another_one_replaced_is_neither_blamed_nor_stored(harness):
    """The ballot in progress still names the older one."""
    harness.on_message(OTHER, ready(dense_payloads(9), attempt=2))
    harness.chunk(OTHER, 2, attempt=1)
    assert harness.blamed() == [] and harness.round.data_plane.early[0] == 0


def test_fetched_result_of_our_chunk_is_not_computed_again(harness):
    hashes = hashes_of(map(harness.result, range(6)))
    harness.open(ballot=Ballot(2, LEADER), adopted=blake3.blake3(hashes).digest(), sources=(OTHER,), kept=IDS)
    harness.on_message(OTHER, ResultRecord(1, 0, Ballot(2, LEADER), tuple(range(6)), hashes))
    harness.results_of(OTHER, 2, ballot=Ballot(2, LEADER))
    assert {message.index for _, message, _ in harness.sent(Result)} == {2}
    missing = harness.round.data_plane.results.missing
    for peer in (LEADER, OTHER):
        harness.chunk(peer, 2)
    assert not harness.sent(Result) and harness.round.data_plane.results.missing == missing == 5


def test_chunk_of_a_peer_outside_the_ballot_is_neither_used_nor_blamed():
    harness = Harness()
    harness.open(ballot=Ballot(2, LEADER), contributors=tuple(Contribution(peer, 1, 10) for peer in (ME, OTHER)))
    harness.sent(Blame)
    harness.chunk(LEADER, 2, b"spoilt!!")
    assert harness.blamed() == []
    harness.chunk(OTHER, 2)
    assert {message.index for _, message, _ in harness.sent(Result)} == {2}


def test_early_frames_are_limited_by_grid_and_group(harness):
    assert harness.round.data_plane.early == (0, 2 * 6 + 256)
    terms = RoundTerms(1, 0, IDS, BASE, PLAN, chunks=6)
    unequal = DenseHarness(Butterfly, peers=IDS, terms=terms)
    assert unequal.round.data_plane.early == (0, (MOST + 1) * 6 + 256), "one peer may own MOST equal shares"


def test_peer_that_connects_before_the_round_opens_gets_no_chunks():
    harness = DenseHarness(Butterfly, peers=IDS)
    harness.round.data_plane.on_link_up(OTHER)
    assert harness.sent(Chunk) == [] and harness.sent(Result) == []


def test_peer_that_connects_in_the_round_gets_results_and_a_stranger_gets_none(harness):
    for peer in (LEADER, OTHER):
        harness.chunk(peer, 2)
    harness.sent(Result)
    harness.round.data_plane.on_link_up(PEERS[4])
    assert harness.sent(Result) == []
    harness.round.data_plane.on_link_up(OTHER)
    assert [(to, message.index) for to, message, _ in harness.sent(Result)] == [(OTHER, 2)]


def test_owner_that_has_begun_the_round_again_gets_our_chunks_again(harness):
    """It has lost what it got over the same link; once in a patience."""

    def chunks():
        return sorted((to, message.index) for to, message, _ in harness.sent(Chunk))

    assert chunks() == [(LEADER, 0), (LEADER, 1), (OTHER, 4), (OTHER, 5)]
    for now, again, expected in (
        (1.0, False, 0),  # It only lacks an announcement.
        (1.0, True, 2),
        (1.5, False, 0),
        (1.0 + harness.terms.patience, True, 2),
    ):
        harness.now = now
        harness.on_message(OTHER, Ask(1, 0, again=again))
        harness.on_message(OTHER, ready(harness.sources[OTHER], attempt=2))
        assert chunks() == [(OTHER, 4), (OTHER, 5)][:expected]


def test_owner_that_begins_the_round_again_twice_in_a_patience_gets_our_chunks_after_it(harness):
    """It has lost what it got in between; without our chunks it could not end the round."""
    harness.sent(Chunk)
    for harness.now in (1.0, 1.5):
        harness.on_message(OTHER, Ask(1, 0, again=True))
    harness.round.tick()
    assert sorted((to, message.index) for to, message, _ in harness.sent(Chunk)) == [(OTHER, 4), (OTHER, 5)]
    harness.now = 1.0 + harness.terms.patience
    harness.round.tick()
    harness.round.tick()
    assert sorted((to, message.index) for to, message, _ in harness.sent(Chunk)) == [(OTHER, 4), (OTHER, 5)]


def test_chunks_that_still_wait_for_an_owner_that_begins_the_round_again_do_not_come_twice(harness):
    """Over a slow link most of them wait then."""
    harness.on_message(OTHER, Ask(1, 0, again=True))
    assert harness.queue.dropped == [(OTHER, 1, 0)]


def test_owner_gets_our_chunks_once_over_a_new_link_whatever_it_asked_before(harness):
    for harness.now in (1.0, 1.5):
        harness.on_message(OTHER, Ask(1, 0, again=True))
    harness.sent(Chunk)
    harness.round.on_link_down(OTHER)
    harness.round.on_link_up(OTHER)
    harness.now = 1.0 + harness.terms.patience
    harness.round.tick()
    assert sorted((to, message.index) for to, message, _ in harness.sent(Chunk)) == [(OTHER, 4), (OTHER, 5)]


@pytest.mark.parametrize("former", [LEADER, OTHER])
def test_false_record_of_a_former_owner_does_not_bind_its_successor(former):
    harness = DenseHarness(Butterfly, peers=PEERS)
    harness.result = lambda index: mean([harness.sources[peer][index] for peer in PEERS], [10.0] * 5)
    harness.open()
    before = harness.round.data_plane.owners
    lost = tuple(index for index, owner in enumerate(before) if owner == former)
    harness.on_message(former, ResultRecord(1, 0, FIRST, lost, hashes_of([b"false"] * len(lost))))
    harness.open(ballot=Ballot(2, LEADER), idle=(former,))
    owners = harness.round.data_plane.owners
    assert any(owners[index] not in (former, ME) for index in lost)
    for peer in PEERS:
        for index, owner in enumerate(owners):
            if owner == ME != peer:
                harness.on_message(peer, Chunk(1, 0, 1, index), harness.sources[peer][index])
    for owner in {*owners} - {ME}:
        theirs = [index for index, one in enumerate(owners) if one == owner]
        harness.record_of(owner, *theirs, ballot=Ballot(2, LEADER))
        harness.results_of(owner, *theirs, ballot=Ballot(2, LEADER))
    assert harness.blamed() == [] and len(harness.sent(Vote)) == 1


@pytest.mark.parametrize("audited", [True, False])
def test_backup_computes_an_audited_result_itself(audited):
    """Otherwise it would sign for a false result of the owner before."""
    harness = DenseHarness(Butterfly, peers=PEERS, audited=audited)
    harness.open()
    before = harness.round.data_plane.owners
    lost = [index for index, owner in enumerate(before) if owner in PEERS[2:]]
    for index in lost:
        harness.on_message(before[index], Result(1, 0, FIRST, index), b"\0" * 4 * GRID.size(index))
    harness.sent(Result)
    harness.open(ballot=Ballot(2, LEADER), idle=PEERS[2:])
    mine = [index for index in lost if harness.round.data_plane.owners[index] == ME]
    assert mine
    assert {message.index for _, message, _ in harness.sent(Result)}.isdisjoint(mine) is audited
    for peer in PEERS:
        for index in mine:
            if peer != ME:
                harness.on_message(peer, Chunk(1, 0, 1, index), harness.sources[peer][index])
    made = {message.index: payload for _, message, payload in harness.sent(Result)}
    right = {index: mean([harness.sources[peer][index] for peer in PEERS], [10.0] * 5) for index in mine}
    assert made == (right if audited else {})


@pytest.mark.parametrize("above", [False, True])
def test_hashes_that_do_not_have_the_settled_digest_vouch_for_nothing(harness, above):
    """The digest of the false hashes is below or above the settled one."""
    wanted = digest_of([blake3.blake3(harness.result(index)).digest() for index in range(6)])
    false = next(
        hashes
        for seed in range(100)
        if (blake3.blake3(hashes := hashes_of(dense_payloads(seed))).digest() > wanted) is above
    )
    harness.open(ballot=Ballot(2, LEADER), adopted=wanted, sources=(OTHER,), kept=IDS)
    harness.on_message(OTHER, ResultRecord(1, 0, Ballot(2, LEADER), tuple(range(6)), false))
    harness.results_of(LEADER, 0, ballot=Ballot(2, LEADER))
    assert harness.blamed() == [] and not harness.round.data_plane.failed


def test_owner_repeats_its_results_in_a_later_ballot(harness):
    for peer in (LEADER, OTHER):
        for index in (2, 3):
            harness.chunk(peer, index)
    assert len(harness.sent(Result)) == 4
    harness.open(ballot=Ballot(2, LEADER))
    repeated = {(to, message.index): payload for to, message, payload in harness.sent(Result)}
    assert repeated == {(to, index): harness.result(index) for to in (LEADER, OTHER) for index in (2, 3)}


@pytest.mark.parametrize("kept", [(2, 3), ()])
def test_contributors_without_all_their_chunks_for_us_have_withheld_them(harness, kept):
    """LEADER has sent what is due to us, OTHER a part of it. If no chunks are ours, we cannot tell of either."""
    if not kept:
        harness.open(ballot=Ballot(2, LEADER), idle=(ME,))
    for index in kept:
        harness.chunk(LEADER, index)
    harness.chunk(OTHER, 2)
    missing = tuple(Exclusion(peer, "chunk missing") for peer in (LEADER, OTHER))
    proposal = harness.open(ballot=Ballot(3, LEADER), contributors=(Contribution(ME, 1, 10),), excluded=missing)
    harness.on_message(LEADER, _commit(proposal, harness))
    assert harness.round.data_plane.withheld == ({OTHER} if kept else {LEADER, OTHER})


@pytest.mark.parametrize("indices", [(0,) * 6, (1, 0, 2, 3, 4, 5)])
def test_record_with_repeated_or_exchanged_indices_does_not_vouch_for_settled_results(harness, indices):
    hashes = [blake3.blake3(harness.result(index)).digest() for index in range(6)]
    harness.open(ballot=Ballot(2, LEADER), adopted=digest_of(hashes), sources=(OTHER,), kept=IDS)
    harness.on_message(OTHER, ResultRecord(1, 0, Ballot(2, LEADER), indices, b"".join(hashes)))
    harness.results_of(LEADER, 0, ballot=Ballot(2, LEADER))
    assert harness.blamed() == []


def test_late_record_of_an_owner_changes_no_committed_result(harness):
    for peer in (LEADER, OTHER):
        for index in (2, 3):
            harness.chunk(peer, index)
    harness.results_of(LEADER, 0, 1)
    harness.results_of(OTHER, 4, 5)
    harness.on_message(LEADER, _commit(harness.proposal, harness))
    assert harness.round.complete
    harness.on_message(LEADER, ResultRecord(1, 0, FIRST, (0, 1), bytes(64)))
    assert harness.round.complete and harness.round.results[0] is not None


@pytest.mark.parametrize("audited", [True, False])
def test_audited_round_leaves_the_claims_of_its_owners_alone(audited):
    """An answer to our request names all hashes, and claims nothing."""
    harness = Harness(audited=audited)
    harness.finish()
    hashes = hashes_of(map(harness.result, range(6)))
    harness.open(ballot=Ballot(2, LEADER), adopted=blake3.blake3(hashes).digest(), sources=(OTHER,), kept=IDS)
    harness.on_message(
        OTHER,
        ResultRecord(1, 0, Ballot(2, LEADER), tuple(range(6)), hashes, b"", basis_of(harness.proposal.contributors)),
    )
    harness.on_message(LEADER, _commit(harness.proposal, harness))
    assert harness.round.complete and (harness.round.data_plane.audit_data is not None) == audited
    if audited:
        claims = harness.round.data_plane.audit_data.claims
        assert {index: owner for index, (owner, _) in claims.items()} == dict(
            enumerate(harness.round.data_plane.owners)
        )


def adopting(sources=(OTHER,)):
    """Return an audited round in which a later ballot adopts results, all of which are here; there are no claims to these."""
    harness = Harness(audited=True)
    harness.wanted = digest_of([blake3.blake3(harness.result(index)).digest() for index in range(6)])
    # Other contributors first: then we have computed nothing of what is adopted.
    harness.open(ballot=SECOND, contributors=(Contribution(LEADER, 1, 10),))
    third = Ballot(3, OTHER)
    harness.open(ballot=third, adopted=harness.wanted, sources=sources, kept=IDS)
    harness.on_message(OTHER, ResultRecord(1, 0, third, tuple(range(6)), hashes_of(map(harness.result, range(6)))))
    harness.results_of(OTHER, *range(6), ballot=third)
    assert not harness.round.results.count(None)
    return harness


def shown(harness, owner, *indices, signer=None, **changes):
    """Return the claim of an owner to results, from the first ballot."""
    record = msgspec.structs.replace(harness.record(*indices), **changes)
    return ResultClaim(owner, record, signature(signer or owner, record))


def test_adopted_results_get_our_vote_with_a_claim_to_each_of_them():
    """Otherwise a leader could have results decided that it has made up, and no audit could name an owner."""
    harness = adopting()
    harness.round.tick()
    assert not harness.sent(Vote) and [(to, one.indices) for to, one, _ in harness.sent(Fetch)][-1] == (OTHER, ())
    harness.on_message(OTHER, shown(harness, LEADER, 0, 1))
    harness.on_message(OTHER, shown(harness, ME, 2, 3))
    assert not harness.sent(Vote)
    harness.on_message(OTHER, shown(harness, OTHER, 4, 5))
    assert [(to, vote.digest) for to, vote, _ in harness.sent(Vote)] == [(OTHER, harness.wanted)]


@pytest.mark.parametrize(
    "changes",
    [
        {"signer": OTHER},
        {"basis": b""},
        {"basis": bytes(32)},
        {"hashes": bytes(192)},
        {"hashes": bytes(32)},
        {"fragment": 1},
        {"lineage": bytes(16)},
        {"indices": (0, 1, 2, 3, 4, 9)},
    ],
)
def test_false_claim_is_not_taken(changes):
    harness = adopting()
    harness.on_message(OTHER, shown(harness, LEADER, *range(6), **changes))
    assert not harness.sent(Vote)
    harness.on_message(OTHER, shown(harness, LEADER, *range(6)))
    assert harness.sent(Vote)


def test_round_whose_results_lack_claims_counts_one_as_missing_for_the_wait_for_a_quorum():
    """Otherwise a round would wait for ever for a peer that has lost the claims to results that it has voted for."""
    harness = adopting()
    assert harness.round.missing_results == 1
    harness.on_message(OTHER, shown(harness, LEADER, *range(6)))
    assert harness.round.missing_results == 0


def test_results_with_more_voters_than_liars_need_no_claims():
    harness = adopting(sources=(LEADER, OTHER))
    assert harness.sent(Vote) and harness.round.missing_results == 0


def test_voter_shows_the_claims_of_all_owners_until_the_commit():
    harness = Harness(audited=True)
    harness.finish()
    wanted = harness.sent(Vote)[0][1].digest
    harness.sent(ResultRecord)
    harness.on_message(OTHER, Fetch(1, 0, wanted, ()))
    assert {(to, one.owner) for to, one, _ in harness.sent(ResultClaim)} == {(OTHER, peer) for peer in IDS}
    harness.on_message(LEADER, _commit(harness.proposal, harness))
    harness.on_message(OTHER, Fetch(1, 0, wanted, ()))
    assert not harness.sent(ResultClaim)


def test_record_without_basis_does_not_vouch_for_results_that_are_audited():
    """An owner that does not state that it has computed them could not be convicted; it is named as one that is missing."""
    harness = Harness(audited=True)
    harness.finish()
    assert harness.sent(Vote)
    harness = Harness(audited=True)
    for peer in (LEADER, OTHER):
        for index in (2, 3):
            harness.chunk(peer, index)
    harness.results_of(LEADER, 0, 1)
    harness.results_of(OTHER, 4, 5)
    harness.record_of(OTHER, 4, 5)
    harness.on_message(LEADER, msgspec.structs.replace(harness.record(0, 1), basis=b""))
    assert not harness.sent(Vote) and not harness.sent(Propose)
    harness.now += 2 * harness.terms.patience
    harness.round.tick()
    assert harness.blamed() == [(LEADER, "result missing")]


def test_owner_that_follows_another_proposal_with_this_ballot_is_shown_ours():
    """Its record names other contributors. Two proposals of one leader are evidence."""
    harness = Harness(audited=True)
    for _ in range(3):
        harness.on_message(OTHER, msgspec.structs.replace(harness.record(4, 5), basis=bytes(32)))
    assert [(to, one) for to, one, _ in harness.sent(Propose)] == [(OTHER, Propose(harness.proposal))]


def entries(harness, **other):
    """Return entries that name the announcements here. other: digests by name of a peer."""
    known = harness.round.agreement.ready
    return tuple(Contribution(peer, 1, 10, other.get(peer.hex(), known[peer].digest)) for peer in IDS)


def test_claims_outlive_a_ballot_with_other_contributors():
    """We have voted; a ballot of fewer contributors fails; then our vote is adopted, and only we can show claims to it."""
    harness = Harness(audited=True)
    harness.finish()
    wanted = harness.sent(Vote)[0][1].digest
    harness.open(ballot=SECOND, contributors=(Contribution(LEADER, 1, 10), Contribution(ME, 1, 10)))
    third = Ballot(3, LEADER)
    harness.open(ballot=third, adopted=wanted, sources=(ME,), kept=IDS)
    for owner, indices in ((LEADER, (0, 1)), (OTHER, (4, 5))):
        harness.results_of(owner, *indices, ballot=third)
    assert [vote.ballot for _, vote, _ in harness.sent(Vote)] == [third]
    harness.on_message(OTHER, Fetch(1, 0, wanted, ()))
    assert {one.owner for _, one, _ in harness.sent(ResultClaim)} == {*IDS}


def test_owner_signs_no_result_of_data_that_another_announcement_covers():
    """A contributor has told it other data than the others; with the decided announcement, its result would seem false."""
    harness = Harness(audited=True)
    harness.open(ballot=SECOND, contributors=entries(harness))
    for peer in (LEADER, OTHER):
        for index in (2, 3):
            harness.chunk(peer, index)
    assert harness.sent(ResultRecord)
    harness.open(ballot=Ballot(3, LEADER), contributors=entries(harness, **{OTHER.hex(): bytes([7]) * 32}))
    assert not harness.sent(ResultRecord) and harness.round.results[2] is None


def test_announcement_that_its_peer_replaces_remains_for_audits():
    harness = Harness(audited=True)
    proposal = harness.open(ballot=SECOND, contributors=entries(harness))
    first = harness.round.agreement.ready[OTHER]
    harness.on_message(OTHER, ready(dense_payloads(99), attempt=2))
    named = proposal.contributors[IDS.index(OTHER)]
    assert harness.round.agreement.ready[OTHER] != first and harness.round.agreement.announcements.find(named) == first
    harness.open(ballot=Ballot(3, LEADER), contributors=proposal.contributors[:1])
    assert harness.round.agreement.announcements.find(named) is None


def test_announcement_of_our_vote_outlives_a_ballot_without_it():
    harness = Harness(audited=True)
    proposal = harness.open(ballot=SECOND, contributors=entries(harness))
    harness.finish(SECOND)
    assert harness.sent(Vote)
    first = harness.round.agreement.ready[OTHER]
    harness.on_message(OTHER, ready(dense_payloads(99), attempt=2))
    harness.open(ballot=Ballot(3, LEADER), contributors=proposal.contributors[:1])
    assert harness.round.agreement.announcements.find(proposal.contributors[IDS.index(OTHER)]) == first


def test_late_announcement_shows_that_adopted_results_are_too_long():
    """Their norm cannot be checked before. A liar could show the announcement last."""
    harness = bounded(audited=True)
    false = [np.full(GRID.size(index), 1e9, np.float32).tobytes() for index in range(6)]
    norms = harness.round.agreement.ready[OTHER].norms
    late = msgspec.structs.replace(ready(harness.sources[OTHER], attempt=5), norms=norms)
    named = (*entries(harness)[:2], Contribution(OTHER, 5, 10, late.digest))
    third = Ballot(3, OTHER)
    wanted = digest_of([blake3.blake3(one).digest() for one in false])
    harness.open(ballot=third, contributors=named, adopted=wanted, sources=(OTHER,), kept=IDS)
    harness.on_message(OTHER, ResultRecord(1, 0, third, tuple(range(6)), hashes_of(false), b"", basis_of(named)))
    for index, one in enumerate(false):
        harness.on_message(OTHER, Result(1, 0, third, index), one)
    assert not harness.round.results.count(None)
    harness.on_message(OTHER, ShownReady(OTHER, late, signature(OTHER, late.statement())))
    assert harness.round.results.count(None) == 6 and not harness.sent(Vote)


def test_results_are_no_vote_for_a_proposal_that_has_not_begun_here():
    """Our own ballot may open while a message is handled."""
    harness = Harness(audited=True)
    harness.finish()
    assert harness.sent(Vote)
    harness.round.agreement.proposal = msgspec.structs.replace(harness.proposal, ballot=SECOND)
    harness.round.data_plane.check()
    assert harness.round.agreement.acceptor.voted.ballot == FIRST


def test_adopted_results_of_an_unknown_announcement_get_our_vote_once_it_is_shown():
    """Without it no audit is possible. A liar may report a vote for contributors that do not exist."""
    harness, late = Harness(audited=True), ready(dense_payloads(7), attempt=5)
    named = (*entries(harness)[:2], Contribution(OTHER, 5, 10, late.digest))
    third = Ballot(3, OTHER)
    wanted = digest_of([blake3.blake3(harness.result(index)).digest() for index in range(6)])
    harness.open(ballot=third, contributors=named, adopted=wanted, sources=(OTHER,), kept=IDS)
    harness.on_message(OTHER, ResultRecord(1, 0, third, tuple(range(6)), hashes_of(map(harness.result, range(6)))))
    harness.results_of(OTHER, *range(6), ballot=third)
    harness.on_message(OTHER, shown(harness, OTHER, *range(6)))
    assert not harness.sent(Vote)
    for false in (ready(dense_payloads(8), attempt=5), ready(dense_payloads(7), attempt=6)):
        harness.on_message(LEADER, ShownReady(OTHER, false, signature(OTHER, false.statement())))
    harness.on_message(LEADER, ShownReady(OTHER, late, signature(LEADER, late.statement())))
    assert not harness.sent(Vote)
    harness.on_message(LEADER, ShownReady(OTHER, late, signature(OTHER, late.statement())))
    assert harness.sent(Vote)


def test_voter_shows_the_announcements_that_its_proposal_names():
    harness = Harness(audited=True)
    harness.open(ballot=SECOND, contributors=entries(harness))
    harness.finish(SECOND)
    wanted = harness.sent(Vote)[-1][1].digest
    harness.on_message(OTHER, Fetch(1, 0, wanted, ()))
    told = {one.peer: one for _, one, _ in harness.sent(ShownReady)}
    assert told.keys() == {*IDS}
    assert all(one.signature == signature(one.peer, one.ready.statement()) for one in told.values())
    harness.on_message(OTHER, Fetch(1, 0, wanted, ()))
    assert not harness.sent(ShownReady), "once in a patience"


@pytest.mark.parametrize("proves", [False, True])
def test_leader_that_shows_no_claims_to_its_vote_in_time_leads_no_more(proves):
    harness = adopting()
    harness.round.tick()
    if proves:
        harness.on_message(OTHER, shown(harness, LEADER, *range(6)))
    harness.now += 2.1 * harness.terms.patience
    harness.round.tick()
    fourth = Ballot(4, OTHER)
    harness.open(ballot=fourth)
    assert (harness.round.agreement.proposal.ballot == fourth) == proves


def test_sources_are_asked_in_turn_and_the_leader_first():
    harness = adopting(sources=(LEADER, OTHER))
    asked = []
    for _ in range(4):
        harness.round.tick()
        asked += [to for to, one, _ in harness.sent(Fetch) if not one.indices]
        harness.now += harness.terms.patience / 3
    assert asked == [OTHER, LEADER, OTHER, LEADER]
    harness.on_message(OTHER, shown(harness, LEADER, *range(6)))
    harness.now += harness.terms.patience
    harness.round.tick()
    assert not harness.sent(Fetch)


def shared():
    """Return a round that has opened at 10 s: OTHER owns most chunks, and we have made ours; all records are here."""
    harness = DenseHarness(Butterfly, peers=IDS, terms=RoundTerms(1, 0, IDS, BASE, PLAN, chunks=6))
    harness.result = lambda index: mean([harness.sources[peer][index] for peer in IDS], [10.0] * 3)
    fast = {"up": 10**9, "down": 10**9}
    harness.on_message(OTHER, msgspec.structs.replace(ready(harness.sources[OTHER], attempt=2), **fast))
    harness.now = 10.0
    entries = tuple(Contribution(peer, 1 + (peer == OTHER), 10) for peer in IDS)
    harness.open(contributors=entries, shares=(1, 1, 4))
    assert harness.round.data_plane.owners == (LEADER, ME, *[OTHER] * 4)
    harness.now = 11.0
    for peer in (LEADER, OTHER):
        harness.on_message(peer, Chunk(1, 0, 1 + (peer == OTHER), 1), harness.sources[peer][1])
    harness.record_of(LEADER, 0)
    harness.record_of(OTHER, 2, 3, 4, 5)
    return harness


@pytest.mark.parametrize(("took", "failed"), [(0.5, set()), (10.0, {OTHER})])
def test_owner_of_many_chunks_that_is_much_slower_than_announced_has_failed(took, failed):
    harness = shared()
    harness.results_of(LEADER, 0)
    harness.now = 10.0 + took
    harness.results_of(OTHER, 2, 3, 4, 5)
    assert harness.round.data_plane.failed == failed
    harness.open(
        ballot=Ballot(2, LEADER), contributors=harness.round.data_plane.proposal.contributors, shares=(1, 1, 4)
    )
    assert harness.round.data_plane.failed == set(), "the later ballot has delayed it"


def test_results_that_others_hand_on_do_not_tell_how_long_their_owner_took():
    harness = shared()
    harness.results_of(OTHER, 2, 3, 4, 5)
    harness.now = 20.0
    harness.results_of(OTHER, 0)
    assert harness.round.data_plane.failed == set()
    harness = shared()
    harness.results_of(LEADER, 0)
    harness.now = 20.0
    harness.results_of(OTHER, 2, 3, 4)
    harness.now = 30.0
    harness.results_of(LEADER, 5)
    assert harness.round.data_plane.failed == {OTHER}


def test_peers_that_owe_data_are_contributors_and_owners_without_it(harness):
    exchange = harness.round.data_plane
    assert set(exchange.awaited_peers(harness.proposal)) == {LEADER, OTHER}
    harness.results_of(LEADER, 0, 1)
    harness.results_of(OTHER, 4, 5)
    for index in (2, 3):
        harness.chunk(LEADER, index)
    assert set(exchange.awaited_peers(harness.proposal)) == {OTHER}
    assert exchange.culprit(harness.proposal) == (OTHER, "chunk missing")


def test_culprit_is_the_owner_whose_result_is_missing(harness):
    for peer in (LEADER, OTHER):
        for index in (2, 3):
            harness.chunk(peer, index)
    harness.results_of(LEADER, 0, 1)
    harness.record_of(LEADER, 0, 1)
    assert harness.round.data_plane.culprit(harness.proposal) == (OTHER, "result missing")
    harness.results_of(OTHER, 4, 5)
    assert harness.round.data_plane.culprit(harness.proposal) == (OTHER, "result missing"), "it has not signed"
    assert harness.round.data_plane.waits
    harness.record_of(OTHER, 4, 5)
    assert harness.round.data_plane.culprit(harness.proposal) is None and not harness.round.data_plane.waits


@pytest.mark.parametrize("index", [6, 60])
def test_result_beyond_the_grid_is_ignored(harness, index):
    harness.on_message(LEADER, Result(1, 0, FIRST, index), b"beyond")
    assert harness.blamed() == []


def test_peers_behind_relays_that_owe_data_and_send_no_byte_are_noted_with_the_complaint():
    harness = Harness()
    harness.queue.behind, harness.queue.stirring = {LEADER, OTHER}, {LEADER: 500, OTHER: 700}
    harness.open(ballot=SECOND)
    harness.now += harness.round.agreement.terms.patience / 2
    harness.queue.stirring[OTHER] += 1
    harness.round.tick()
    assert not harness.queue.debtors
    harness.now += harness.round.agreement.terms.patience
    harness.round.tick()
    assert harness.blamed() and harness.queue.debtors == {LEADER: 500}


def test_only_peers_behind_relays_are_noted():
    harness = Harness()
    harness.now += harness.round.agreement.terms.patience
    harness.round.tick()
    assert harness.blamed() and not harness.queue.debtors
