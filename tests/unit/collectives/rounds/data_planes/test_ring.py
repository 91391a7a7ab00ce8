"""The ring of a round, frame by frame."""

from __future__ import annotations

import blake3
import msgspec
import numpy as np
import pytest
from kit.rounds.round_harness import (
    BASE,
    CODEC,
    FIRST,
    GRID,
    LEADER,
    ME,
    PEERS,
    PLAN,
    SECOND,
    DenseHarness,
    hashes_of,
    opening,
    signature,
)
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import name_of, sound
from thinwire.collectives.rounds.data_planes.result_store import digest_of
from thinwire.collectives.rounds.data_planes.ring import Ring
from thinwire.swarm.messages.registry import (
    Ballot,
    Chunk,
    Commit,
    Contribution,
    Fetch,
    Partial,
    Prepare,
    Promise,
    Proof,
    Proposal,
    Ready,
    Result,
    ResultRecord,
    Subtotal,
    Vote,
)

IDS = PEERS[:4]
OTHER, NEW = IDS[2:]
MINE, PASSING, BEGUN = (2, 3), (4, 5), (0, 1)
"""Chunks that ME owns, forwards in the middle, and begins: the ring is LEADER, ME, OTHER."""


class Harness(DenseHarness):
    """Peer ME of three contributors in a ring; NEW is outside of the ring."""

    def __init__(self, peers=3):
        super().__init__(Ring, peers=IDS[:peers], terms=RoundTerms(1, 0, IDS[:3], BASE, PLAN, ring=tuple))
        self.sent(Ready)

    def opening(self, **changes):
        usual = {"idle": self.peers[3:], "order": (0, 1, 2), "electorate": self.terms.electorate}
        return opening(self.peers, **(usual | changes))

    def partial_mean(self, index, *peers):
        """Return the partial mean of a chunk after these peers."""
        so_far = self.sources[peers[0]][index]
        for count, peer in enumerate(peers[1:], 1):
            out = np.empty(GRID.size(index), np.float32)
            CODEC.mean([so_far, self.sources[peer][index]], [10.0 * count, 10.0], out)
            so_far = out.tobytes()
        return so_far

    def result(self, index):
        owner = index // 2
        return self.partial_mean(index, *(IDS[(owner + 1 + at) % 3] for at in range(3)))

    def partial(self, index, sender=LEADER, payload=None, ballot=FIRST):
        before = {MINE: (OTHER, LEADER), PASSING: (LEADER,)}
        peers = next((peers for chunks, peers in before.items() if index in chunks), (LEADER,))
        payload = self.partial_mean(index, *peers) if payload is None else payload
        self.on_message(sender, Partial(1, 0, ballot, index), payload)

    def result_of(self, index, sender=LEADER, ballot=FIRST, payload=None):
        self.on_message(sender, Result(1, 0, ballot, index), self.result(index) if payload is None else payload)

    def finish(self, ballot=FIRST):
        """Deliver all that is missing for a vote."""
        for index in (*PASSING, *MINE):
            self.partial(index, ballot=ballot)
        for owner, indices in ((LEADER, BEGUN), (OTHER, PASSING)):
            self.record_of(owner, *indices, ballot=ballot)
            for index in indices:
                self.result_of(index, ballot=ballot)


def begun():
    harness = Harness()
    harness.open()
    return harness


@pytest.fixture
def harness():
    return begun()


def sent(entries):
    return {(to, message.index): payload for to, message, payload in entries}


def test_ring_round_with_honest_peers_votes(harness):
    assert sent(harness.sent(Partial)) == {(OTHER, index): harness.sources[ME][index] for index in BEGUN}
    assert harness.sent(Chunk) == [], "nobody gets a contribution as it is"
    harness.finish()
    assert sent(harness.sent(Partial)) == {(OTHER, index): harness.partial_mean(index, LEADER, ME) for index in PASSING}
    wanted = {(OTHER, index): harness.result(index) for index in (*MINE, *BEGUN)}
    assert sent(harness.sent(Result)) == wanted, "OTHER has its own"
    records = harness.sent(ResultRecord)
    assert {to for to, _, _ in records} == {LEADER, OTHER} and records[0][1].indices == MINE
    ((to, vote, _),) = harness.sent(Vote)
    digest = digest_of([blake3.blake3(harness.result(i)).digest() for i in range(6)])
    assert to == LEADER and vote.digest == digest and harness.blamed() == []


def test_ring_result_is_the_mean(harness):
    harness.finish()
    for index, chunk in enumerate(harness.round.results):
        exact = np.mean([np.frombuffer(harness.sources[peer][index], np.float32) for peer in IDS[:3]], axis=0)
        np.testing.assert_allclose(np.frombuffer(chunk, np.float32), exact, atol=1e-6)


def test_partial_is_taken_once_and_only_from_left_neighbour(harness):
    harness.sent(Partial)
    for index, sender in ((4, OTHER), (0, LEADER), (0, OTHER), (77, LEADER)):
        harness.partial(index, sender, payload=bytes(4 * 4096))
    assert harness.sent(Partial) == [] and harness.blamed() == []
    for _ in range(3):
        harness.partial(4)
    harness.partial(4, payload=bytes(4 * 4096))
    assert sent(harness.sent(Partial)) == {(OTHER, 4): harness.partial_mean(4, LEADER, ME)}


def _nan(right):
    return np.array([np.nan], np.float32).tobytes() + right[4:]


@pytest.mark.parametrize("spoil", [_nan, lambda right: right[:-4], lambda right: b""])
@pytest.mark.parametrize("index", [*PASSING, *MINE])
def test_invalid_partial_breaks_the_ring(harness, spoil, index):
    """No peer is excluded for it: only a ballot without a ring shows which predecessor is at fault."""
    harness.sent(Partial)
    harness.partial(index, payload=spoil(harness.partial_mean(index, LEADER)))
    assert harness.blamed() == [(LEADER, "ring")]
    assert harness.sent(Partial) == harness.sent(Result) == []


def test_partial_with_absurd_norm_breaks_the_ring(harness):
    harness.partial(4, payload=(np.frombuffer(harness.partial_mean(4, LEADER), np.float32) * np.float32(1e5)).tobytes())
    assert harness.blamed() == [(LEADER, "ring")]


def test_own_invalid_contribution_is_withdrawn():
    harness = Harness()
    bad = list(harness.sources[ME])
    bad[4] = _nan(bad[4])
    harness.round.announce(bad, weight=10, loss=0.0, speed=0.0)
    harness.open(contributors=tuple(Contribution(peer, 1 + (peer == ME), 10) for peer in IDS[:3]))
    assert harness.blamed() == []
    harness.partial(4)
    assert harness.blamed() == [(ME, "not finite")]


def test_ring_result_is_forwarded_after_owner_record(harness):
    harness.result_of(0)
    assert harness.round.results[0] is None and harness.sent(Result) == []
    harness.record_of(OTHER, *BEGUN)
    assert harness.round.results[0] is None, "it is not OTHER's"
    harness.record_of(LEADER, *BEGUN)
    assert bytes(harness.round.results[0]) == harness.result(0)
    assert sent(harness.sent(Result)) == {(OTHER, 0): harness.result(0)}
    harness.result_of(0)
    assert harness.sent(Result) == []


def test_changed_result_breaks_the_ring(harness):
    harness.record_of(OTHER, *PASSING)
    harness.result_of(4, payload=harness.result(5))
    assert harness.round.results[4] is None and harness.blamed() == [(LEADER, "ring")]
    harness.result_of(4, OTHER)
    assert bytes(harness.round.results[4]) == harness.result(4), "whoever has the right one may give it"


def test_ring_votes_only_after_every_owner_record(harness):
    for index in (*PASSING, *MINE):
        harness.partial(index)
    for index in (*BEGUN, *PASSING):
        harness.result_of(index)
    harness.record_of(LEADER, *BEGUN)
    assert harness.sent(Vote) == []
    harness.record_of(OTHER, *PASSING)
    assert len(harness.sent(Vote)) == 1


def test_peer_blames_the_ring_after_a_patience(harness):
    harness.partial(4)
    harness.now = 1.9
    harness.round.tick()
    assert harness.blamed() == []
    harness.now = 2.1
    harness.round.tick()
    harness.round.tick()
    assert harness.blamed() == [(LEADER, "ring")], "once a ballot"


def test_frames_of_another_ring_order_are_ignored(harness):
    """Late frames of a failed ballot; the order of the ring has changed since."""
    harness.partial(4)
    harness.open(ballot=SECOND, order=(0, 2, 1))
    assert harness.queue.recalled == 1
    # Now OTHER sends to ME and ME to LEADER, and the chunks of OTHER begin with ME.
    fresh = harness.sent(Partial)
    assert {(to, message.index) for to, message, _ in fresh if message.ballot == SECOND} == {(LEADER, 2), (LEADER, 3)}
    for ballot in (FIRST, Ballot(1, OTHER)):
        for index in range(6):
            harness.partial(index, ballot=ballot)
            harness.partial(index, OTHER, payload=harness.partial_mean(index, LEADER), ballot=ballot)
            harness.result_of(index, OTHER, ballot=ballot)
        harness.record_of(OTHER, *PASSING, ballot=ballot)
        harness.record_of(LEADER, *BEGUN, ballot=ballot)
    assert harness.sent(Partial) == harness.sent(Result) == harness.sent(Vote) == [] and harness.blamed() == []
    assert list(harness.round.results) == [None] * 6


def test_frames_of_ballot_with_same_ring_order_are_taken(harness):
    harness.sent(Partial)
    harness.open(ballot=SECOND)
    assert harness.sent(Partial) == [], "what has been sent is not sent again"
    harness.finish(FIRST)
    assert len(harness.sent(Vote)) == 1


def test_partials_before_the_ballot_are_kept():
    harness = Harness()
    for index in (*PASSING, *MINE):
        harness.partial(index)
    assert harness.sent(Partial) == []
    harness.open()
    found = sent(harness.sent(Partial))
    assert found[OTHER, 4] == harness.partial_mean(4, LEADER, ME)
    assert set(sent(harness.sent(Result))) == {(OTHER, 2), (OTHER, 3)}


def test_reconnected_neighbour_gets_all_partials_again(harness):
    for index in (*PASSING, *MINE):
        harness.partial(index)
    harness.queue.sent.clear()
    harness.round.on_link_up(OTHER)
    assert harness.sent(Partial) == [], "it has it all"
    harness.round.on_link_down(OTHER)
    harness.queue.sent.clear()
    harness.round.on_link_up(OTHER)
    assert {index for _, index in sent(harness.sent(Partial))} == {*BEGUN, *PASSING}
    assert {index for _, index in sent(harness.sent(Result))} == {*MINE}


def test_peer_outside_ring_sends_to_first_and_gets_results_from_owners():
    harness = Harness(4)
    harness.open()
    assert harness.sent(Partial) == [], "the chunks that begin with us lack what NEW brings"
    for index in (*BEGUN, 2, 4):
        harness.on_message(NEW, Chunk(1, 0, 1, index), harness.sources[NEW][index])
    out = np.empty(GRID.size(0), np.float32)
    CODEC.mean([harness.sources[ME][0], harness.sources[NEW][0]], [10.0, 10.0], out)
    found = sent(harness.sent(Partial))
    assert set(found) == {(OTHER, 0), (OTHER, 1)} and found[OTHER, 0] == out.tobytes()
    for index in MINE:
        harness.partial(index)
    assert {to for to, _ in sent(harness.sent(Result))} == {OTHER, NEW}
    assert harness.blamed() == []


@pytest.mark.parametrize(("spoil", "reason"), [(_nan, "hash"), (None, "chunk missing")])
def test_peer_outside_ring_is_blamed_for_its_own_chunks(spoil, reason):
    harness = Harness(4)
    harness.open()
    if spoil:
        harness.on_message(NEW, Chunk(1, 0, 1, 0), spoil(harness.sources[NEW][0]))
    harness.now = 2.1
    harness.round.tick()
    assert harness.blamed()[0] == (NEW, reason)


def test_ballot_without_ring_order_is_a_butterfly(harness):
    harness.queue.sent.clear()
    harness.open(ballot=SECOND, order=())
    assert set(sent(harness.sent(Chunk))) == {(LEADER, 0), (LEADER, 1), (OTHER, 4), (OTHER, 5)}
    for peer in (LEADER, OTHER):
        for index in MINE:
            harness.on_message(peer, Chunk(1, 0, 1, index), harness.sources[peer][index])
    results = sent(harness.sent(Result))
    assert set(results) == {(peer, index) for peer in (LEADER, OTHER) for index in MINE}
    assert harness.round.data_plane.broken


def _settled(harness):
    """Vote in a ring; then open another ballot, which fails."""
    harness.finish()
    ((_, vote, _),) = harness.sent(Vote)
    made = [bytes(chunk) for chunk in harness.round.results]
    return vote.digest, made


def test_voted_ring_results_can_be_adopted_by_later_ballot(harness):
    """A ballot without a ring has other bits, but an adopting one fetches those of the ring from its voters."""
    digest, made = _settled(harness)
    harness.open(ballot=SECOND, order=())
    assert list(harness.round.results) == [None] * 6
    third = Ballot(3, LEADER)
    harness.open(ballot=third, order=(), adopted=digest, sources=(ME, OTHER), kept=tuple(IDS[:3]))
    assert [bytes(chunk) for chunk in harness.round.results] == made
    ((_, vote, _),) = harness.sent(Vote)
    assert vote.digest == digest
    harness.on_message(OTHER, Fetch(1, 0, digest, (3,)))
    assert any(message.index == 3 and payload == made[3] for _, message, payload in harness.sent(Result))


def test_adopted_ring_results_are_fetched(harness):
    digest, made = _settled(begun())
    harness.queue.sent.clear()
    harness.open(ballot=SECOND, order=(), adopted=digest, sources=(OTHER,), kept=tuple(IDS[:3]))
    assert harness.sent(Chunk) == [] and {to for to, _, _ in harness.sent(Fetch)} == {OTHER}
    for peer in (LEADER, OTHER):  # contributions and results of old owners are no evidence
        for index in range(6):
            harness.on_message(peer, Chunk(1, 0, 1, index), harness.sources[peer][index])
            harness.on_message(peer, Result(1, 0, SECOND, index), harness.sources[peer][index])
    assert list(harness.round.results) == [None] * 6 and harness.sent(ResultRecord) == []
    for index in range(5):
        harness.on_message(OTHER, Result(1, 0, FIRST, index), made[index])
    harness.on_message(OTHER, ResultRecord(1, 0, FIRST, tuple(range(6)), hashes_of(made)))
    harness.on_message(OTHER, Result(1, 0, FIRST, 5), made[5])
    assert [bytes(chunk) for chunk in harness.round.results] == made
    ((_, vote, _),) = harness.sent(Vote)
    assert vote.digest == digest and harness.blamed() == [] and not harness.round.data_plane.failed


def test_results_are_forwarded_after_the_verdict(harness):
    for index in (*PASSING, *MINE):
        harness.partial(index)
    harness.sent(Result)
    digest = digest_of([blake3.blake3(harness.result(i)).digest() for i in range(6)])
    proposal = harness.round.data_plane.proposal
    vote = Vote(1, 0, FIRST, name_of(proposal), digest)
    proofs = tuple(Proof(peer, signature(peer, vote)) for peer in (LEADER, OTHER))
    harness.on_message(LEADER, Commit(proposal, digest, proofs))
    harness.record_of(LEADER, *BEGUN)
    for index in BEGUN:
        harness.result_of(index)
    assert {(to, index) for to, index in sent(harness.sent(Result))} == {(OTHER, 0), (OTHER, 1)}
    harness.record_of(OTHER, *PASSING)
    for index in PASSING:
        harness.result_of(index)
    assert harness.round.complete


def test_early_partials_are_bounded_and_have_chunk_size():
    harness = Harness()
    for index, size in ((2, 4 * 4096 + 1), (6, 1)):
        harness.partial(index, payload=bytes(size))
    assert harness.round.data_plane.early[0] == 0
    for at in range(200):
        harness.partial(at % 6, ballot=Ballot(9, OTHER), payload=bytes(16))
    assert 0 < harness.round.data_plane.early[0] <= 2 * len(GRID) + 8


@pytest.mark.parametrize(
    "changes",
    [
        {"order": (0, 1)},
        {"order": (0, 1, 1)},
        {"order": (0, 1, 3)},
        {"order": (0, 1, 2, 3)},
        {"order": (0, 1, 2), "idle": (OTHER,)},
        {"adopted": bytes(32), "sources": (OTHER,), "kept": tuple(IDS[:3])},
    ],
)
def test_ring_order_must_have_each_owner_once(harness, changes):
    assert sound(harness.opening(), harness.terms) and sound(harness.opening(order=()), harness.terms)
    assert not sound(harness.opening(**changes), harness.terms)
    straight = RoundTerms(1, 0, tuple(IDS[:3]), BASE, PLAN)
    assert sound(harness.opening(order=()), straight) and not sound(harness.opening(), straight)


def test_ring_order_survives_encoding(harness):
    proposal = harness.opening()
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(proposal), type=Proposal)
    assert again == proposal and name_of(again) != name_of(harness.opening(order=(0, 2, 1)))


def test_peer_does_not_vote_for_ring_below_its_promise(harness):
    """A peer that has promised a later ballot does not vote for the ring that it still finishes."""
    harness.on_message(OTHER, Prepare(1, 0, Ballot(5, OTHER)))
    assert len(harness.sent(Promise)) == 1
    harness.finish()
    assert harness.sent(Vote) == []


def test_message_of_another_data_plane_is_ignored():
    """A message of a hierarchy is well-formed, so a peer may send it in any run."""
    harness = Harness()
    harness.on_message(IDS[1], Subtotal(1, 0, bytes(32), 0), b"x")
    proposal = harness.open()
    harness.on_message(IDS[1], Subtotal(1, 0, bytes(32), 0), b"x")
    assert harness.round.data_plane.proposal == proposal


def test_data_of_another_lineage_is_ignored_although_its_ballot_has_the_same_number(harness):
    """A partial sum has no hash that binds it to the contributions, and an owner signs its record of each lineage."""
    other, wrong = b"l" * 16, {index: bytes(4 * GRID.size(index)) for index in (*MINE, *PASSING, *BEGUN)}
    for index in (*PASSING, *MINE):
        harness.on_message(LEADER, Partial(1, 0, FIRST, index, other), wrong[index])
    for owner, indices in ((LEADER, BEGUN), (OTHER, PASSING)):
        hashes = hashes_of(wrong[index] for index in indices)
        harness.on_message(owner, ResultRecord(1, 0, FIRST, indices, hashes, other))
        for index in indices:
            harness.on_message(owner, Result(1, 0, FIRST, index, other), wrong[index])
    assert harness.round.missing_results == 0 and not any(harness.round.results) and harness.sent(Vote) == []
    harness.finish()
    ((_, vote, _),) = harness.sent(Vote)
    assert vote.digest == digest_of([blake3.blake3(harness.result(i)).digest() for i in range(6)])
    assert harness.blamed() == []
