"""The data plane of a ring, frame by frame: what comes from the left goes on to the right, what is wrong is not taken."""

from __future__ import annotations

import blake3
import msgspec
import numpy as np
import pytest
from aids.tray import Tray, hashes_of, signature
from thinwire.collectives.aggregate import RULES
from thinwire.collectives.agreement import Agreement
from thinwire.collectives.butterfly import Butterfly
from thinwire.collectives.proposal import Terms, name_of, sound
from thinwire.collectives.results import digest_of
from thinwire.collectives.ring import Ring
from thinwire.collectives.shards import grid
from thinwire.compression import registry
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import (
    Ballot,
    Blame,
    Chunk,
    Commit,
    Contribution,
    Fetch,
    Open,
    Partial,
    Prepare,
    Promise,
    Proof,
    Ready,
    Record,
    Result,
    Subtotal,
    Vote,
)

IDS = [bytes([i]) * 32 for i in range(4)]
LEADER, ME, OTHER, NEW = IDS
BASE, PLAN = bytes(32), bytes([1]) * 32
CODEC = registry.parse("fp32")
GRID = grid(6 * 4096 - 100, CODEC)
FIRST, SECOND = Ballot(1, LEADER), Ballot(2, LEADER)
MINE, PASSING, BEGUN = (2, 3), (4, 5), (0, 1)
"""Chunks that ME owns, that it stands in the middle of, and that begin with it: the ring is LEADER, ME, OTHER."""


def payloads(seed):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(GRID.size(i)).astype(np.float32).tobytes() for i in range(len(GRID))]


def ready(chunks, attempt=1):
    return Ready(1, 0, attempt, BASE, PLAN, 10, hashes_of(chunks), True, 0.0, 0.0)


class Seat:
    """Peer ME of three in a ring, all of which contribute; NEW stands outside it where it takes part."""

    def __init__(self, peers=3):
        self.now, self.tray, self.usual, self.peers = 0.0, Tray(), {}, IDS[:peers]
        self.sources = {peer: payloads(seed) for seed, peer in enumerate(self.peers)}
        terms = Terms(1, 0, tuple(IDS[:3]), BASE, PLAN, ring=tuple)
        self.terms = terms
        agreement = Agreement(
            ME,
            terms,
            sign=lambda message: signature(ME, message),
            verify=lambda peer, message, proof: proof == signature(peer, message),
            live=self.peers,
        )
        exchange = Ring(
            agreement,
            codec=CODEC,
            grid=GRID,
            rule=RULES["mean"],
            seed=b"seed",
            outbox=self.tray,
            now=lambda: self.now,
            usual=self.usual,
        )
        self.fly = Butterfly(agreement, exchange, outbox=self.tray, now=lambda: self.now)
        self.fly.announce(self.sources[ME], weight=10, loss=0.0, speed=0.0)
        for peer in self.peers:
            if peer != ME:
                self.hear(peer, ready(self.sources[peer]))
        self.tray.of(Ready)

    def hear(self, sender, message, payload=b""):
        self.fly.hear(sender, Frame(message, payload, signature(sender, message)))

    def ballot(self, ballot=FIRST, **changes):
        peers = tuple(self.peers)
        given = dict(
            round=1,
            fragment=0,
            ballot=ballot,
            group=peers,
            alive=peers,
            contributors=tuple(Contribution(peer, 1, 10) for peer in peers),
            excluded=(),
            adopted=None,
            sources=(),
            idle=peers[3:],
            order=(0, 1, 2),
        )
        return Open(**(given | changes))

    def open(self, ballot=FIRST, **changes):
        opened = self.ballot(ballot, **changes)
        self.hear(opened.ballot.leader, opened)
        return opened

    def mean(self, index, *peers):
        """What a chunk is after these."""
        so_far = self.sources[peers[0]][index]
        for count, peer in enumerate(peers[1:], 1):
            out = np.empty(GRID.size(index), np.float32)
            CODEC.mean([so_far, self.sources[peer][index]], [10.0 * count, 10.0], out)
            so_far = out.tobytes()
        return so_far

    def result(self, index):
        owner = index // 2
        return self.mean(index, *(IDS[(owner + 1 + at) % 3] for at in range(3)))

    def partial(self, index, sender=LEADER, payload=None, ballot=FIRST):
        before = {MINE: (OTHER, LEADER), PASSING: (LEADER,)}
        peers = next((peers for chunks, peers in before.items() if index in chunks), (LEADER,))
        self.hear(sender, Partial(1, 0, ballot, index), self.mean(index, *peers) if payload is None else payload)

    def record_of(self, owner, indices, ballot=FIRST, results=None):
        made = [results[i] if results else self.result(i) for i in indices]
        self.hear(owner, Record(1, 0, ballot, tuple(indices), hashes_of(made)))

    def result_of(self, index, sender=LEADER, ballot=FIRST, payload=None):
        self.hear(sender, Result(1, 0, ballot, index), self.result(index) if payload is None else payload)

    def blamed(self):
        return [(message.peer, message.reason) for _, message, _ in self.tray.of(Blame)]

    def finish(self, ballot=FIRST):
        """All that is missing for a vote."""
        for index in (*PASSING, *MINE):
            self.partial(index, ballot=ballot)
        for owner, indices in ((LEADER, BEGUN), (OTHER, PASSING)):
            self.record_of(owner, indices, ballot)
            for index in indices:
                self.result_of(index, ballot=ballot)


def begun():
    seat = Seat()
    seat.open()
    return seat


@pytest.fixture
def seat():
    return begun()


def sent(entries):
    return {(to, message.index): payload for to, message, payload in entries}


def test_honest_round(seat):
    assert sent(seat.tray.of(Partial)) == {(OTHER, index): seat.sources[ME][index] for index in BEGUN}
    assert seat.tray.of(Chunk) == [], "nobody gets a contribution as it is"
    seat.finish()
    assert sent(seat.tray.of(Partial)) == {(OTHER, index): seat.mean(index, LEADER, ME) for index in PASSING}
    wanted = {(OTHER, index): seat.result(index) for index in (*MINE, *BEGUN)}
    assert sent(seat.tray.of(Result)) == wanted, "OTHER has its own"
    records = seat.tray.of(Record)
    assert {to for to, _, _ in records} == {LEADER, OTHER} and records[0][1].indices == MINE
    ((to, vote, _),) = seat.tray.of(Vote)
    digest = digest_of([blake3.blake3(seat.result(i)).digest() for i in range(6)])
    assert to == LEADER and vote.digest == digest and seat.blamed() == []


def test_the_result_is_the_mean(seat):
    seat.finish()
    for index, chunk in enumerate(seat.fly.results):
        exact = np.mean([np.frombuffer(seat.sources[peer][index], np.float32) for peer in IDS[:3]], axis=0)
        np.testing.assert_allclose(np.frombuffer(chunk, np.float32), exact, atol=1e-6)


def test_only_the_left_neighbour_passes_on_and_only_once(seat):
    seat.tray.of(Partial)
    for index, sender in ((4, OTHER), (0, LEADER), (0, OTHER), (77, LEADER)):
        seat.partial(index, sender, payload=bytes(4 * 4096))
    assert seat.tray.of(Partial) == [] and seat.blamed() == []
    for _ in range(3):
        seat.partial(4)
    seat.partial(4, payload=bytes(4 * 4096))
    assert sent(seat.tray.of(Partial)) == {(OTHER, 4): seat.mean(4, LEADER, ME)}


def _nan(right):
    return np.array([np.nan], np.float32).tobytes() + right[4:]


@pytest.mark.parametrize("spoil", [_nan, lambda right: right[:-4], lambda right: b""])
@pytest.mark.parametrize("index", [*PASSING, *MINE])
def test_what_cannot_be_added_breaks_the_ring(seat, spoil, index):
    """Nobody is put out for it: who of those before it was can only be seen without a ring."""
    seat.tray.of(Partial)
    seat.partial(index, payload=spoil(seat.mean(index, LEADER)))
    assert seat.blamed() == [(LEADER, "ring")]
    assert seat.tray.of(Partial) == seat.tray.of(Result) == []


def test_what_is_absurdly_long_breaks_the_ring(seat):
    seat.partial(4, payload=(np.frombuffer(seat.mean(4, LEADER), np.float32) * np.float32(1e5)).tobytes())
    assert seat.blamed() == [(LEADER, "ring")]


def test_our_own_that_cannot_be_used_is_withdrawn():
    seat = Seat()
    bad = list(seat.sources[ME])
    bad[4] = _nan(bad[4])
    seat.fly.announce(bad, weight=10, loss=0.0, speed=0.0)
    seat.open(contributors=tuple(Contribution(peer, 1 + (peer == ME), 10) for peer in IDS[:3]))
    assert seat.blamed() == []
    seat.partial(4)
    assert seat.blamed() == [(ME, "not finite")]


def test_a_result_goes_on_when_its_owner_has_signed_for_it(seat):
    seat.result_of(0)
    assert seat.fly.results[0] is None and seat.tray.of(Result) == []
    seat.record_of(OTHER, BEGUN)
    assert seat.fly.results[0] is None, "it is not OTHER's"
    seat.record_of(LEADER, BEGUN)
    assert bytes(seat.fly.results[0]) == seat.result(0)
    assert sent(seat.tray.of(Result)) == {(OTHER, 0): seat.result(0)}
    seat.result_of(0)
    assert seat.tray.of(Result) == []


def test_a_result_that_a_neighbour_has_changed_breaks_the_ring(seat):
    seat.record_of(OTHER, PASSING)
    seat.result_of(4, payload=seat.result(5))
    assert seat.fly.results[4] is None and seat.blamed() == [(LEADER, "ring")]
    seat.result_of(4, OTHER)
    assert bytes(seat.fly.results[4]) == seat.result(4), "whoever has the right one may give it"


def test_no_vote_before_every_owner_has_signed(seat):
    for index in (*PASSING, *MINE):
        seat.partial(index)
    for index in (*BEGUN, *PASSING):
        seat.result_of(index)
    seat.record_of(LEADER, BEGUN)
    assert seat.tray.of(Vote) == []
    seat.record_of(OTHER, PASSING)
    assert len(seat.tray.of(Vote)) == 1


def test_who_waits_longer_than_a_patience_says_that_the_ring_is_broken(seat):
    seat.partial(4)
    seat.now = 1.9
    seat.fly.tick()
    assert seat.blamed() == []
    seat.now = 2.1
    seat.fly.tick()
    seat.fly.tick()
    assert seat.blamed() == [(LEADER, "ring")], "once a ballot"


def test_frames_of_another_ring_are_not_taken(seat):
    """Late ones of a ballot that came to nothing; in between the ring has turned round."""
    seat.partial(4)
    seat.open(SECOND, order=(0, 2, 1))
    assert seat.tray.recalled == 1
    # Now OTHER sends to ME and ME to LEADER, and the chunks of OTHER begin with ME.
    fresh = seat.tray.of(Partial)
    assert {(to, message.index) for to, message, _ in fresh if message.ballot == SECOND} == {(LEADER, 2), (LEADER, 3)}
    for ballot in (FIRST, Ballot(1, OTHER)):
        for index in range(6):
            seat.partial(index, ballot=ballot)
            seat.partial(index, OTHER, payload=seat.mean(index, LEADER), ballot=ballot)
            seat.result_of(index, OTHER, ballot=ballot)
        seat.record_of(OTHER, PASSING, ballot)
        seat.record_of(LEADER, BEGUN, ballot)
    assert seat.tray.of(Partial) == seat.tray.of(Result) == seat.tray.of(Vote) == [] and seat.blamed() == []
    assert list(seat.fly.results) == [None] * 6


def test_frames_of_a_ballot_with_the_same_ring_are_as_good(seat):
    seat.tray.of(Partial)
    seat.open(SECOND)
    assert seat.tray.of(Partial) == [], "what has been sent is not sent again"
    seat.finish(FIRST)
    assert len(seat.tray.of(Vote)) == 1


def test_partials_that_overtake_the_ballot_wait_for_it():
    seat = Seat()
    for index in (*PASSING, *MINE):
        seat.partial(index)
    assert seat.tray.of(Partial) == []
    seat.open()
    found = sent(seat.tray.of(Partial))
    assert found[OTHER, 4] == seat.mean(4, LEADER, ME) and set(sent(seat.tray.of(Result))) == {(OTHER, 2), (OTHER, 3)}


def test_a_neighbour_that_was_away_gets_all_again(seat):
    for index in (*PASSING, *MINE):
        seat.partial(index)
    seat.tray.sent.clear()
    seat.fly.reach(OTHER)
    assert seat.tray.of(Partial) == [], "it has it all"
    seat.fly.lost(OTHER, gone=False)
    seat.tray.sent.clear()
    seat.fly.reach(OTHER)
    assert {index for _, index in sent(seat.tray.of(Partial))} == {*BEGUN, *PASSING}
    assert {index for _, index in sent(seat.tray.of(Result))} == {*MINE}


def test_who_is_outside_sends_its_own_to_where_a_chunk_begins_and_gets_results_from_owners():
    seat = Seat(4)
    seat.open()
    assert seat.tray.of(Partial) == [], "the chunks that begin with us lack what NEW brings"
    for index in (*BEGUN, 2, 4):
        seat.hear(NEW, Chunk(1, 0, 1, index), seat.sources[NEW][index])
    out = np.empty(GRID.size(0), np.float32)
    CODEC.mean([seat.sources[ME][0], seat.sources[NEW][0]], [10.0, 10.0], out)
    found = sent(seat.tray.of(Partial))
    assert set(found) == {(OTHER, 0), (OTHER, 1)} and found[OTHER, 0] == out.tobytes()
    for index in MINE:
        seat.partial(index)
    assert {to for to, _ in sent(seat.tray.of(Result))} == {OTHER, NEW}
    assert seat.blamed() == []


@pytest.mark.parametrize(("spoil", "reason"), [(_nan, "hash"), (None, "chunk missing")])
def test_who_is_outside_answers_for_its_own(spoil, reason):
    seat = Seat(4)
    seat.open()
    if spoil:
        seat.hear(NEW, Chunk(1, 0, 1, 0), spoil(seat.sources[NEW][0]))
    seat.now = 2.1
    seat.fly.tick()
    assert seat.blamed()[0] == (NEW, reason)


def test_without_a_ring_it_is_a_butterfly(seat):
    seat.tray.sent.clear()
    seat.open(SECOND, order=())
    assert set(sent(seat.tray.of(Chunk))) == {(LEADER, 0), (LEADER, 1), (OTHER, 4), (OTHER, 5)}
    for peer in (LEADER, OTHER):
        for index in MINE:
            seat.hear(peer, Chunk(1, 0, 1, index), seat.sources[peer][index])
    results = sent(seat.tray.of(Result))
    assert set(results) == {(peer, index) for peer in (LEADER, OTHER) for index in MINE}
    assert seat.fly.exchange.broken


def _settled(seat):
    """Vote in a ring; then another ballot, in which nothing comes of it."""
    seat.finish()
    ((_, vote, _),) = seat.tray.of(Vote)
    made = [bytes(chunk) for chunk in seat.fly.results]
    return vote.digest, made


def test_what_was_voted_for_can_be_adopted_after_another_ballot(seat):
    """A ballot without a ring has other bits; but who adopts those of the ring finds them with those who voted."""
    digest, made = _settled(seat)
    seat.open(SECOND, order=())
    assert list(seat.fly.results) == [None] * 6
    third = Ballot(3, LEADER)
    seat.open(third, order=(), adopted=digest, sources=(ME, OTHER), kept=tuple(IDS[:3]))
    assert [bytes(chunk) for chunk in seat.fly.results] == made
    ((_, vote, _),) = seat.tray.of(Vote)
    assert vote.digest == digest
    seat.hear(OTHER, Fetch(1, 0, digest, (3,)))
    assert any(message.index == 3 and payload == made[3] for _, message, payload in seat.tray.of(Result))


def test_what_is_adopted_is_fetched_and_not_computed(seat):
    digest, made = _settled(begun())
    seat.tray.sent.clear()
    seat.open(SECOND, order=(), adopted=digest, sources=(OTHER,), kept=tuple(IDS[:3]))
    assert seat.tray.of(Chunk) == [] and {to for to, _, _ in seat.tray.of(Fetch)} == {OTHER}
    for peer in (LEADER, OTHER):  # contributions, and results of an owner of before, say nothing about it
        for index in range(6):
            seat.hear(peer, Chunk(1, 0, 1, index), seat.sources[peer][index])
            seat.hear(peer, Result(1, 0, SECOND, index), seat.sources[peer][index])
    assert list(seat.fly.results) == [None] * 6 and seat.tray.of(Record) == []
    for index in range(5):
        seat.hear(OTHER, Result(1, 0, FIRST, index), made[index])
    seat.hear(OTHER, Record(1, 0, FIRST, tuple(range(6)), hashes_of(made)))
    seat.hear(OTHER, Result(1, 0, FIRST, 5), made[5])
    assert [bytes(chunk) for chunk in seat.fly.results] == made
    ((_, vote, _),) = seat.tray.of(Vote)
    assert vote.digest == digest and seat.blamed() == [] and not seat.fly.exchange.failed


def test_results_still_go_round_once_there_is_a_verdict(seat):
    for index in (*PASSING, *MINE):
        seat.partial(index)
    seat.tray.of(Result)
    digest = digest_of([blake3.blake3(seat.result(i)).digest() for i in range(6)])
    opened = seat.fly.exchange.opened
    vote = Vote(1, 0, FIRST, name_of(opened), digest)
    proofs = tuple(Proof(peer, signature(peer, vote)) for peer in (LEADER, OTHER))
    seat.hear(LEADER, Commit(opened, digest, proofs))
    seat.record_of(LEADER, BEGUN)
    for index in BEGUN:
        seat.result_of(index)
    assert {(to, index) for to, index in sent(seat.tray.of(Result))} == {(OTHER, 0), (OTHER, 1)}
    seat.record_of(OTHER, PASSING)
    for index in PASSING:
        seat.result_of(index)
    assert seat.fly.complete


def test_early_frames_are_bounded_and_must_fit():
    seat = Seat()
    for index, size in ((2, 4 * 4096 + 1), (6, 1)):
        seat.partial(index, payload=bytes(size))
    assert len(seat.fly.exchange._early) == 0
    for at in range(200):
        seat.partial(at % 6, ballot=Ballot(9, OTHER), payload=bytes(16))
    assert 0 < len(seat.fly.exchange._early) <= 2 * len(GRID) + 8


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
def test_a_ring_has_each_owner_once_and_is_for_free_choices(seat, changes):
    assert sound(seat.ballot(), seat.terms) and sound(seat.ballot(order=()), seat.terms)
    assert not sound(seat.ballot(**changes), seat.terms)
    straight = Terms(1, 0, tuple(IDS[:3]), BASE, PLAN)
    assert sound(seat.ballot(order=()), straight) and not sound(seat.ballot(), straight)


def test_the_order_survives_the_wire(seat):
    opened = seat.ballot()
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(opened), type=Open)
    assert again == opened and name_of(again) != name_of(seat.ballot(order=(0, 2, 1)))


def test_what_was_promised_holds(seat):
    """A peer that has promised a later ballot does not vote for the ring that it still finishes."""
    seat.hear(OTHER, Prepare(1, 0, Ballot(5, OTHER)))
    assert len(seat.tray.of(Promise)) == 1
    seat.finish()
    assert seat.tray.of(Vote) == []


def test_the_message_of_another_plane_is_ignored():
    """One of a hierarchy is well-formed, so anybody can send it in any run."""
    seat = Seat()
    seat.hear(IDS[1], Subtotal(1, 0, bytes(32), 0), b"x")
    opened = seat.open()
    seat.hear(IDS[1], Subtotal(1, 0, bytes(32), 0), b"x")
    assert seat.fly.exchange.opened == opened
