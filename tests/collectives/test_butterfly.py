"""The data plane of a round, frame by frame: what is owed is sent, what is wrong is not taken."""

from __future__ import annotations

import blake3
import numpy as np
import pytest
from aids.tray import Tray, hashes_of, signature
from thinwire.collectives.aggregate import RULES
from thinwire.collectives.agreement import Agreement
from thinwire.collectives.butterfly import Butterfly
from thinwire.collectives.electorate import ORPHANED
from thinwire.collectives.exchange import Exchange
from thinwire.collectives.plane import STIRRING
from thinwire.collectives.proposal import Terms, name_of
from thinwire.collectives.results import digest_of
from thinwire.collectives.shards import grid
from thinwire.collectives.statesync import IN_FLIGHT
from thinwire.compression import registry
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import (
    Ask,
    Ballot,
    Blame,
    Chunk,
    Commit,
    Contribution,
    Fetch,
    Open,
    Prepare,
    Promise,
    Proof,
    Ready,
    Record,
    Result,
    Vote,
)

IDS = [bytes([i]) * 32 for i in range(3)]
LEADER, ME, OTHER = IDS
BASE, PLAN = bytes(32), bytes([1]) * 32
CODEC = registry.parse("fp32")
GRID = grid(6 * 4096 - 100, CODEC)
FIRST = Ballot(1, LEADER)


def payloads(seed):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(GRID.size(i)).astype(np.float32).tobytes() for i in range(len(GRID))]


def ready(chunks, attempt=1):
    return Ready(1, 0, attempt, BASE, PLAN, 10, hashes_of(chunks), True, 0.0, 0.0)


class Seat:
    """Peer ME of three: LEADER leads, everyone contributes; ME owns chunks 2 and 3."""

    def __init__(self):
        self.now, self.tray, self.usual = 0.0, Tray(), {}
        self.sources = {peer: payloads(seed) for seed, peer in enumerate(IDS)}
        terms = Terms(1, 0, tuple(IDS), BASE, PLAN)
        agreement = Agreement(
            ME,
            terms,
            sign=lambda message: signature(ME, message),
            verify=lambda peer, message, proof: proof == signature(peer, message),
            live=IDS,
        )
        exchange = Exchange(
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
        for peer in (LEADER, OTHER):
            self.hear(peer, ready(self.sources[peer]))
        self.opened = self.open()
        self.tray.of(Ready)

    def hear(self, sender, message, payload=b""):
        self.fly.hear(sender, Frame(message, payload, signature(sender, message)))

    def open(self, **changes):
        given = dict(
            round=1,
            fragment=0,
            ballot=FIRST,
            group=tuple(IDS),
            alive=tuple(IDS),
            contributors=tuple(Contribution(peer, 1, 10) for peer in IDS),
            excluded=(),
            adopted=None,
            sources=(),
        )
        opened = Open(**(given | changes))
        self.hear(opened.ballot.leader, opened)
        return opened

    def chunk(self, sender, index, payload=None, attempt=1):
        chunk = self.sources[sender][index] if payload is None else payload
        self.hear(sender, Chunk(1, 0, attempt, index), chunk)

    def mean(self, index):
        """The result of a chunk, as its owner would send it."""
        parts = [np.frombuffer(self.sources[peer][index], np.float32) for peer in IDS]
        out = np.empty(parts[0].size, np.float32)
        RULES["mean"](CODEC, [part.view(np.uint8) for part in parts], [10.0] * 3, out)
        return out.tobytes()

    def results_of(self, owner, indices, ballot=FIRST):
        for index in indices:
            self.hear(owner, Result(1, 0, ballot, index), self.mean(index))

    def record_of(self, owner, indices, ballot=FIRST):
        hashes = b"".join(blake3.blake3(self.mean(index)).digest() for index in indices)
        self.hear(owner, Record(1, 0, ballot, tuple(indices), hashes))

    def blamed(self):
        return [(message.peer, message.reason) for _, message, _ in self.tray.of(Blame)]

    def finish(self):
        """All that is missing for a vote."""
        for peer in (LEADER, OTHER):
            for index in (2, 3):
                self.chunk(peer, index)
        for owner, indices in ((LEADER, (0, 1)), (OTHER, (4, 5))):
            self.results_of(owner, indices)
            self.record_of(owner, indices)


@pytest.fixture
def seat():
    return Seat()


def test_six_chunks_two_each(seat):
    assert len(GRID) == 6
    assert seat.fly.exchange.owners == (LEADER, LEADER, ME, ME, OTHER, OTHER)


def test_honest_round(seat):
    sent = {(to, message.index): payload for to, message, payload in seat.tray.of(Chunk)}
    assert sent == {
        (to, index): seat.sources[ME][index] for to, index in ((LEADER, 0), (LEADER, 1), (OTHER, 4), (OTHER, 5))
    }
    seat.finish()
    results = seat.tray.of(Result)
    assert {(to, message.index) for to, message, _ in results} == {(p, i) for p in (LEADER, OTHER) for i in (2, 3)}
    assert all(payload == seat.mean(message.index) for _, message, payload in results)
    ((to, vote, _),) = seat.tray.of(Vote)
    wanted = digest_of([blake3.blake3(seat.mean(i)).digest() for i in range(6)])
    assert to == LEADER and vote.digest == wanted and seat.blamed() == []


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (lambda right: bytes([right[0] ^ 1]) + right[1:], "hash"),
        (lambda right: right[:-4], "hash"),
        (lambda right: b"", "hash"),
    ],
)
def test_chunk_that_was_not_announced_so_is_blamed(seat, payload, reason):
    seat.chunk(OTHER, 2, payload(seat.sources[OTHER][2]))
    assert seat.blamed() == [(OTHER, reason)]
    seat.chunk(LEADER, 2)
    assert seat.tray.of(Result) == []


def _nan(right):
    return np.array([np.nan], np.float32).tobytes() + right[4:]


@pytest.mark.parametrize(("payload", "reason"), [(_nan, "not finite"), (lambda right: right[:-4], "length")])
def test_chunk_that_was_announced_and_is_wrong_is_blamed(payload, reason):
    seat = Seat()
    bad = list(seat.sources[OTHER])
    bad[2] = payload(bad[2])
    seat.sources[OTHER] = bad
    seat.hear(OTHER, ready(bad, attempt=2))
    seat.open(ballot=Ballot(2, LEADER), contributors=tuple(Contribution(p, 1 + (p == OTHER), 10) for p in IDS))
    seat.tray.of(Blame)
    seat.chunk(OTHER, 2, attempt=2)
    assert seat.blamed() == [(OTHER, reason)]


def test_chunk_of_an_old_attempt_or_of_no_index_is_ignored(seat):
    seat.hear(OTHER, ready(payloads(9), attempt=2))
    seat.chunk(OTHER, 2)
    seat.chunk(LEADER, 60, b"x")
    seat.chunk(LEADER, 2)
    assert seat.tray.of(Result) == [] and seat.blamed() == []


def test_second_contribution_to_a_round_is_sent_like_the_first(seat):
    """A round that was given up goes on with what has been trained since."""
    seat.tray.of(Chunk)
    again = payloads(11)
    seat.fly.announce(again, weight=10, loss=0.0, speed=0.0)
    contributors = tuple(Contribution(peer, 1 + (peer == ME), 10) for peer in IDS)
    seat.open(ballot=Ballot(2, LEADER), contributors=contributors)
    sent = {(to, message.attempt, message.index): payload for to, message, payload in seat.tray.of(Chunk)}
    assert sent == {(to, 2, i): again[i] for to, i in ((LEADER, 0), (LEADER, 1), (OTHER, 4), (OTHER, 5))}


def test_chunk_before_its_announcement_waits():
    seat = Seat()
    later = payloads(7)
    seat.chunk(OTHER, 3, later[3], attempt=2)
    assert seat.blamed() == []
    seat.sources[OTHER] = later
    seat.hear(OTHER, ready(later, attempt=2))
    seat.open(ballot=Ballot(2, LEADER), contributors=tuple(Contribution(p, 1 + (p == OTHER), 10) for p in IDS))
    seat.chunk(LEADER, 3)
    results = seat.tray.of(Result)
    assert {message.index for _, message, _ in results} == {3} and results[0][2] == seat.mean(3)


def test_repeated_chunk_changes_nothing(seat):
    for _ in range(3):
        for peer in (LEADER, OTHER):
            seat.chunk(peer, 2)
    assert len(seat.tray.of(Result)) == 2 and seat.blamed() == []


def test_result_of_one_who_does_not_own_it_is_not_taken(seat):
    seat.hear(OTHER, Result(1, 0, FIRST, 0), seat.mean(0))
    assert seat.fly.results[0] is None and seat.blamed() == []


@pytest.mark.parametrize("payload", [b"", bytes(8), None])
def test_result_that_cannot_be_is_blamed(seat, payload):
    wrong = _nan(seat.mean(0)) if payload is None else payload
    seat.hear(LEADER, Result(1, 0, FIRST, 0), wrong)
    assert seat.fly.results[0] is None and seat.blamed() == [(LEADER, "result")]


def test_result_against_its_owners_record_is_blamed(seat):
    seat.record_of(LEADER, (0, 1))
    seat.hear(LEADER, Result(1, 0, FIRST, 0), seat.mean(0)[:-4] + bytes(4))
    assert seat.fly.results[0] is None and seat.blamed() == [(LEADER, "result")]
    seat.results_of(LEADER, (0,))
    assert bytes(seat.fly.results[0]) == seat.mean(0)


def test_record_that_contradicts_a_result_makes_it_missing(seat):
    seat.hear(LEADER, Result(1, 0, FIRST, 0), seat.mean(0)[:-4] + bytes(4))
    assert seat.fly.results[0] is not None
    seat.record_of(LEADER, (0, 1))
    assert seat.fly.results[0] is None
    seat.finish()
    assert len(seat.tray.of(Vote)) == 1


@pytest.mark.parametrize(
    "record",
    [
        Record(1, 0, FIRST, (0, 1), bytes(32)),  # fewer hashes than indices
        Record(1, 0, FIRST, (0, 99), bytes(64)),
        Record(1, 0, FIRST, (2, 3), bytes(64)),  # ours
        Record(1, 0, FIRST, (4, 5), bytes(64)),  # of somebody else
    ],
)
def test_record_of_what_one_does_not_own_is_not_believed(seat, record):
    seat.hear(LEADER, record)
    seat.finish()
    assert len(seat.tray.of(Vote)) == 1 and seat.blamed() == []


def test_owner_that_changes_its_word_is_no_progress(seat):
    """With a Record and a Result that fits it, and then others, an owner could seem busy for ever."""
    first, second = (bytes(4 * GRID.size(0)), np.ones(GRID.size(0), np.float32).tobytes())
    for at in range(100):
        seat.now = float(at)
        chunk = (first, second)[at % 2]
        seat.hear(LEADER, Record(1, 0, FIRST, (0,), hashes_of([chunk])))
        seat.hear(LEADER, Result(1, 0, FIRST, 0), chunk)
    assert seat.fly.moved == 0.0 and bytes(seat.fly.results[0]) == first


def test_chunk_that_nobody_waits_for_is_no_progress(seat):
    for attempt in range(2, 50):
        seat.now = float(attempt)
        seat.hear(OTHER, ready(seat.sources[OTHER], attempt))
        seat.chunk(OTHER, 2, attempt=attempt)
    assert seat.fly.moved == 0.0
    seat.chunk(LEADER, 2)
    assert seat.fly.moved == seat.now


def test_who_lost_its_chunks_or_signed_for_others_than_what_was_settled_has_failed(seat):
    seat.finish()
    assert not seat.fly.exchange.failed
    others = payloads(9)
    right = [seat.mean(index) for index in range(4)]
    digest = blake3.blake3(hashes_of(right + others[4:])).digest()
    seat.open(ballot=Ballot(2, LEADER), adopted=digest, sources=(LEADER,), kept=tuple(IDS), idle=(LEADER,))
    seat.hear(LEADER, Record(1, 0, Ballot(2, LEADER), tuple(range(6)), hashes_of(right + others[4:])))
    assert seat.fly.exchange.failed == {LEADER, OTHER}


def test_no_vote_before_every_owner_has_signed(seat):
    for peer in (LEADER, OTHER):
        for index in (2, 3):
            seat.chunk(peer, index)
    seat.results_of(LEADER, (0, 1))
    seat.results_of(OTHER, (4, 5))
    seat.record_of(LEADER, (0, 1))
    assert seat.tray.of(Vote) == []
    seat.record_of(OTHER, (4, 5))
    assert len(seat.tray.of(Vote)) == 1


def test_who_sends_nothing_is_named_after_a_patience(seat):
    seat.chunk(LEADER, 2)
    seat.chunk(LEADER, 3)
    seat.now = 1.0
    seat.fly.tick()
    assert seat.blamed() == []
    seat.now = 2.5
    seat.fly.tick()
    assert seat.blamed() == [(OTHER, "chunk missing")]
    seat.fly.tick()
    assert seat.blamed() == [], "once a ballot"


def test_contributor_that_we_have_not_heard_is_asked():
    seat = Seat()
    seat.tray.of(Ask)
    stranger = bytes([9]) * 32
    group = (*IDS, stranger)
    seat.open(
        ballot=Ballot(2, LEADER),
        group=group,
        alive=group,
        contributors=tuple(Contribution(peer, 1, 10) for peer in group),
    )
    assert [to for to, _, _ in seat.tray.of(Ask)] == [stranger]


def _commit(opened, seat, voters=(LEADER, OTHER)):
    digest = digest_of([blake3.blake3(seat.mean(i)).digest() for i in range(6)])
    vote = Vote(1, 0, opened.ballot, name_of(opened), digest)
    return Commit(opened, digest, tuple(Proof(peer, signature(peer, vote)) for peer in voters))


def test_who_was_left_out_of_the_round_fetches_the_results(seat):
    """Left out of the ballot that commits, it asks the voters, half each, and believes what fits the verdict's digest."""
    opened = Open(
        1,
        0,
        Ballot(3, OTHER),
        (LEADER, OTHER),
        (LEADER, OTHER),
        tuple(Contribution(peer, 1, 10) for peer in (LEADER, OTHER)),
        (),
        None,
        (),
    )
    commit = _commit(opened, seat)
    seat.hear(LEADER, commit)
    asked = seat.tray.of(Fetch)
    assert {to for to, _, _ in asked} == {LEADER, OTHER}
    assert sorted(index for _, message, _ in asked for index in message.indices) == list(range(6))
    hashes = b"".join(blake3.blake3(seat.mean(i)).digest() for i in range(6))
    # A lie about all of it does not fit the digest, and its results are not taken.
    seat.hear(OTHER, Record(1, 0, opened.ballot, tuple(range(6)), bytes(192)))
    seat.hear(OTHER, Result(1, 0, opened.ballot, 0), seat.mean(0)[:-4] + bytes(4))
    seat.hear(LEADER, Record(1, 0, opened.ballot, tuple(range(6)), hashes))
    for index in range(6):
        seat.hear(LEADER, Result(1, 0, opened.ballot, index), seat.mean(index))
    assert seat.fly.complete
    assert [bytes(result) for result in seat.fly.results] == [seat.mean(i) for i in range(6)]


def test_who_is_gone_and_not_back_is_gone_in_the_next_round_too():
    """It may be a member of that: members are settled by the ballot that first had what is decided."""
    late, dead, back = (bytes([n]) * 32 for n in (7, 8, 9))
    seat = Seat()
    seat.fly.exchange.opened = seat.fly.agreement.opened = None  # it was paused when the round opened
    for peer in (dead, back):
        seat.fly.lost(peer, gone=True)
    seat.fly.lost(late, gone=False)
    assert seat.fly.departed == {dead, back}
    group = tuple(sorted((*IDS, back)))
    seat.open(ballot=Ballot(2, LEADER), group=group, alive=group)
    assert seat.fly.departed == {dead}
    seat.fly.lost(OTHER, gone=True)
    assert seat.fly.departed == {dead, OTHER}


def test_who_keeps_nothing_any_more_is_not_waited_for():
    """What it was asked for is asked of another at once; when nobody is left, the state is all there is to fetch."""
    seat = Seat()
    group = (LEADER, OTHER)
    entries = tuple(Contribution(peer, 1, 10) for peer in group)
    seat.hear(LEADER, _commit(Open(1, 0, Ballot(3, OTHER), group, group, entries, (), None, ()), seat))
    asked = {to: message.indices for to, message, _ in seat.tray.of(Fetch)}
    assert asked.keys() == {LEADER, OTHER} and not seat.fly.forsaken
    seat.fly.spent(OTHER)
    again = seat.tray.of(Fetch)
    assert [(to, message.indices) for to, message, _ in again] == [(LEADER, asked[OTHER])]
    seat.fly.spent(OTHER)
    assert not seat.tray.of(Fetch) and not seat.fly.forsaken
    seat.fly.spent(LEADER)
    assert not seat.tray.of(Fetch) and seat.fly.forsaken
    seat.hear(LEADER, _commit(seat.fly.agreement.commit.opened, seat))
    assert not seat.fly.forsaken, "what it had said was about another round"


def test_one_of_many_that_may_keep_results_is_not_waited_for_alone():
    """Its link may be the one that loses what we ask; the others have gone on, and so has it."""
    seat, third = Seat(), bytes([9]) * 32
    seat.fly.reach(third)
    group = (LEADER, OTHER, third)
    entries = tuple(Contribution(peer, 1, 10) for peer in group)
    opened = Open(1, 0, Ballot(3, OTHER), group, group, entries, (), None, ())
    seat.hear(LEADER, _commit(opened, seat, voters=group))
    seat.fly.spent(OTHER)
    assert not seat.fly.forsaken
    seat.fly.spent(third)
    assert seat.fly.forsaken


@pytest.mark.parametrize("owes", [True, False])
def test_bytes_on_their_way_are_progress_when_they_are_owed_and_for_a_while(owes):
    """LEADER withholds its results, while OTHER sends on at 2.5 kB/s: what it owes, or what is of no use."""
    seat = Seat()
    for index in (2, 3):
        for peer in (LEADER, OTHER):
            seat.chunk(peer, index)
    if not owes:
        seat.results_of(OTHER, (4, 5))
        seat.record_of(OTHER, (4, 5))
    patience = seat.fly.agreement.terms.patience
    since = seat.now
    while not seat.blamed() and seat.now < since + 100 * patience:
        seat.now += patience / 8
        seat.tray.stirring[OTHER] = int(2500 * seat.now)
        seat.fly.tick()
    assert (seat.now - since) / patience == pytest.approx(STIRRING + 1 if owes else 1, abs=0.5)


@pytest.mark.parametrize("honest", [True, False])
def test_when_all_voters_are_dead_those_who_have_gone_on_are_asked(honest):
    """A newcomer has followed the round and is in the next: it has the results too, or lies until the verdict is void."""
    seat, guest = Seat(), bytes([9]) * 32
    seat.fly.reach(guest)
    group = (LEADER, OTHER)
    entries = tuple(Contribution(peer, 1, 10) for peer in group)
    opened = Open(1, 0, Ballot(3, OTHER), group, group, entries, (), None, ())
    seat.hear(LEADER, _commit(opened, seat))
    for peer in group:
        seat.fly.lost(peer, gone=True)
    seat.tray.sent.clear()
    seat.fly.agreement.passed(guest)
    patience = seat.fly.agreement.terms.patience
    for _ in range(2 * ORPHANED):
        seat.now += 0.99 * patience
        seat.fly.tick()
    asked = seat.tray.of(Fetch)
    assert {to for to, _, _ in asked} == {guest} and {i for _, message, _ in asked for i in message.indices} == {
        *range(6)
    }
    assert seat.fly.agreement.commit is not None
    if honest:
        hashes = b"".join(blake3.blake3(seat.mean(i)).digest() for i in range(6))
        seat.hear(guest, Record(1, 0, opened.ballot, tuple(range(6)), hashes))
        for index in range(6):
            seat.hear(guest, Result(1, 0, opened.ballot, index), seat.mean(index))
    seat.now += patience
    seat.fly.tick()
    assert seat.fly.complete == honest == (seat.fly.agreement.commit is not None)


def test_results_that_overtake_the_record_which_vouches_for_them_are_kept(seat):
    """Records travel with the control messages, results on streams of their own; who asked for them must not ask again."""
    group = (LEADER, OTHER)
    entries = tuple(Contribution(peer, 1, 10) for peer in group)
    opened = Open(1, 0, Ballot(3, OTHER), group, group, entries, (), None, ())
    seat.hear(LEADER, _commit(opened, seat))
    hashes = b"".join(blake3.blake3(seat.mean(i)).digest() for i in range(6))
    seat.hear(OTHER, Result(1, 0, opened.ballot, 1), seat.mean(1)[:-4] + bytes(4))
    for index in range(6):
        seat.hear(LEADER, Result(1, 0, opened.ballot, index), seat.mean(index))
    seat.hear(LEADER, Record(1, 0, opened.ballot, tuple(range(6)), hashes))
    assert seat.fly.complete
    assert [bytes(result) for result in seat.fly.results] == [seat.mean(i) for i in range(6)]


def test_who_has_the_verdict_asks_for_lost_results_while_others_still_have_them(seat):
    """Its patience may be longer than the next round of the others takes, after which they keep these results no more."""
    opened = seat.opened
    for index in (0, 1, 4):
        owner = seat.fly.exchange.owners[index]
        seat.hear(owner, Result(1, 0, opened.ballot, index), seat.mean(index))
    seat.hear(LEADER, _commit(opened, seat))
    assert not seat.fly.complete and not seat.tray.of(Fetch)
    seat.now += 0.3 * seat.fly.agreement.terms.patience
    seat.fly.tick()
    missing = [index for _, message, _ in seat.tray.of(Fetch) for index in message.indices]
    assert sorted(missing) == seat.fly.exchange.results.lacks() != []
    seat.now += 0.3 * seat.fly.agreement.terms.patience
    seat.fly.tick()
    assert not seat.tray.of(Fetch)


def test_results_are_served_to_who_missed_them_and_only_the_right_ones(seat):
    seat.finish()
    seat.tray.sent.clear()
    digest = digest_of([blake3.blake3(seat.mean(i)).digest() for i in range(6)])
    seat.hear(OTHER, Fetch(1, 0, bytes(32), (0, 1)))
    assert seat.tray.sent == []
    seat.hear(OTHER, Fetch(1, 0, digest, (5, 0, 5, 77)))
    ((_, record, _),) = seat.tray.of(Record)
    assert record.indices == tuple(range(6))
    assert [(message.index, payload) for _, message, payload in seat.tray.of(Result)] == [
        (5, seat.mean(5)),
        (0, seat.mean(0)),
    ]


def test_who_does_not_read_its_answers_gets_no_more(seat):
    seat.finish()
    digest = digest_of([blake3.blake3(seat.mean(i)).digest() for i in range(6)])
    seat.tray.sent.clear()
    seat.tray.waiting = 2 * IN_FLIGHT
    seat.hear(OTHER, Fetch(1, 0, digest, (0,)))
    assert len(seat.tray.of(Result)) == len(seat.tray.of(Record)) == 1
    seat.tray.waiting += 1
    seat.hear(OTHER, Fetch(1, 0, digest, (0,)))
    assert seat.tray.sent == []


def test_usual_norm_is_what_was_committed(seat):
    """Tries that came to nothing leave no trace."""
    for peer in (LEADER, OTHER):
        for index in (2, 3):
            seat.chunk(peer, index)
    assert seat.usual == {}
    louder = [(np.frombuffer(chunk, np.float32) * np.float32(2)).tobytes() for chunk in seat.sources[OTHER]]
    seat.sources[OTHER] = louder
    seat.hear(OTHER, ready(louder, attempt=2))
    contributors = tuple(Contribution(peer, 1 + (peer == OTHER), 10) for peer in IDS)
    opened = seat.open(ballot=Ballot(2, LEADER), contributors=contributors)
    for index in (2, 3):
        seat.chunk(OTHER, index, attempt=2)
    for owner, indices in ((LEADER, (0, 1)), (OTHER, (4, 5))):
        seat.results_of(owner, indices, Ballot(2, LEADER))
        seat.record_of(owner, indices, Ballot(2, LEADER))
    assert seat.usual == {}
    seat.hear(LEADER, _commit(opened, seat))
    # Of LEADER's and OTHER's, the lower one: LEADER's, now that OTHER has doubled its own.
    norms = {i: np.linalg.norm(np.frombuffer(seat.sources[LEADER][i], np.float32)) for i in (2, 3)}
    assert seat.usual == {i: pytest.approx(float(norm), rel=1e-5) for i, norm in norms.items()}


def test_early_frames_of_one_leave_room_for_those_of_others():
    seat = Seat()
    later, stranger = payloads(7), bytes([9]) * 32
    for _ in range(5):
        for index in range(6):
            seat.chunk(LEADER, index, bytes(4096 * 4), attempt=7)
            seat.hear(stranger, Chunk(1, 0, 1, index), bytes(4096 * 4))
    for index in (2, 3):
        seat.chunk(OTHER, index, later[index], attempt=2)
    seat.sources[OTHER] = later
    seat.hear(OTHER, ready(later, attempt=2))
    seat.open(ballot=Ballot(2, LEADER), contributors=tuple(Contribution(p, 1 + (p == OTHER), 10) for p in IDS))
    for index in (2, 3):
        seat.chunk(LEADER, index)
    assert {message.index for _, message, _ in seat.tray.of(Result)} == {2, 3}


def test_early_frame_that_is_too_long_is_not_kept():
    seat = Seat()
    for index, size in ((2, 4 * 4096 + 1), (6, 1)):
        seat.chunk(OTHER, index, bytes(size), attempt=2)
    assert len(seat.fly.exchange._early) == 0
    seat.chunk(OTHER, 2, bytes(4 * 4096), attempt=2)
    assert len(seat.fly.exchange._early) == 1


def test_what_was_promised_holds_when_a_round_is_taken_up_again():
    """A peer that gave a round up for a swarm that is ahead, and found none, must not vote twice in it."""
    seat = Seat()
    seat.hear(OTHER, Prepare(1, 0, Ballot(5, OTHER)))
    assert len(seat.tray.of(Promise)) == 1
    seat.fly.agreement.overtaken()
    seat.fly.pump()
    seat.fly.resume()
    seat.finish()
    assert seat.tray.of(Vote) == [] and not seat.fly.agreement.diverged
    opened = seat.open(ballot=Ballot(5, OTHER))
    assert seat.fly.exchange.opened == opened and len(seat.tray.of(Vote)) == 1


def test_frames_of_another_fragment_are_ignored(seat):
    before = len(seat.tray.sent)
    seat.hear(OTHER, Chunk(1, 1, 1, 2), b"x")
    seat.hear(LEADER, Result(1, 1, FIRST, 0), b"x")
    seat.hear(LEADER, Open(1, 1, Ballot(2, LEADER), (ME,), (ME,), (), (), None, ()))
    assert len(seat.tray.sent) == before and seat.fly.agreement.opened == seat.opened
