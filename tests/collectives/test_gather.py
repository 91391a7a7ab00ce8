"""An all-gather, frame by frame: what is announced is sent to all, what is wrong is not taken, what is lacking is asked for."""

from __future__ import annotations

import blake3
import pytest
from aids.tray import Tray, hashes_of, signature
from thinwire.collectives.agreement import Agreement
from thinwire.collectives.butterfly import Butterfly
from thinwire.collectives.gather import SOON, Gather
from thinwire.collectives.payload import EMPTY, cut_up, put_together, room
from thinwire.collectives.proposal import Terms, name_of, sound
from thinwire.collectives.shards import Grid
from thinwire.compression.codec import CodecError
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import (
    MAX_GROUP,
    Ask,
    Ballot,
    Blame,
    Chunk,
    Commit,
    Contribution,
    Fetch,
    Open,
    Proof,
    Ready,
    Record,
    Result,
    Vote,
)

IDS = [bytes([i]) * 32 for i in range(3)]
LEADER, ME, OTHER = IDS
BASE, PLAN = bytes(32), bytes([1]) * 32
FIRST = Ballot(1, LEADER)
CUT = Grid(30, 10)
PAYLOADS = {LEADER: b"leader" * 4, ME: b"me", OTHER: b"x" * 30}


class Honest:
    """Any payload that does not say so is one, and as long as its first byte says."""

    def check(self, payload, n):
        raw = bytes(payload)
        if len(raw) > n:
            raise CodecError("too long", "length")
        if raw.startswith(b"bad"):
            raise CodecError("bad", "encoding")
        return float(raw[0]) ** 2 if raw else 0.0


class Seat:
    """Peer ME of three: LEADER leads, everyone contributes."""

    def __init__(self, *, tell=(LEADER, OTHER), payloads=PAYLOADS, opens=True):
        self.now, self.tray, self.usual, self.payloads = 0.0, Tray(), {}, payloads
        agreement = Agreement(
            ME,
            Terms(1, 0, tuple(IDS), BASE, PLAN),
            sign=lambda message: signature(ME, message),
            verify=lambda peer, message, proof: proof == signature(peer, message),
            live=IDS,
        )
        gather = Gather(
            agreement, screen=Honest(), pieces=CUT, outbox=self.tray, now=lambda: self.now, usual=self.usual
        )
        self.fly = Butterfly(agreement, gather, outbox=self.tray, now=lambda: self.now)
        self.fly.announce(cut_up(payloads[ME], CUT), weight=10, loss=0.0, speed=0.0)
        for peer in tell:
            self.ready(peer)
        if opens:
            self.opened = self.open()
        self.tray.of(Ready)

    def hear(self, sender, message, payload=b""):
        self.fly.hear(sender, Frame(message, payload, signature(sender, message)))

    def ready(self, peer, hashes=None, attempt=1):
        hashes = hashes_of(cut_up(self.payloads[peer], CUT)) if hashes is None else hashes
        self.hear(peer, Ready(1, 0, attempt, BASE, PLAN, 10, hashes, True, 0.0, 0.0))

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

    def send(self, peer, index=None, payload=None):
        pieces = cut_up(self.payloads[peer] if payload is None else payload, CUT)
        for at in range(len(pieces)) if index is None else (index,):
            self.hear(peer, Chunk(1, 0, 1, at), pieces[at])

    def tick(self, now):
        self.now = now
        self.fly.tick()


def slots(*payloads):
    found = []
    for payload in payloads:
        pieces = [bytes(piece) for piece in cut_up(payload, CUT)]
        found += pieces + [b""] * (len(CUT) - len(pieces))
    return found


def digest_of(*payloads):
    return blake3.blake3(hashes_of(slots(*payloads))).digest()


DIGEST = digest_of(*(PAYLOADS[peer] for peer in IDS))


def test_our_pieces_go_to_everybody_once():
    seat = Seat()
    assert seat.tray.of(Chunk) == [(peer, Chunk(1, 0, 1, 0), b"me") for peer in (OTHER, LEADER)]
    seat.open(ballot=Ballot(2, LEADER))
    assert not seat.tray.of(Chunk)
    seat.fly.lost(OTHER, gone=False)
    seat.fly.reach(OTHER)
    assert [to for to, _, _ in seat.tray.of(Chunk)] == [OTHER]


def test_the_vote_is_for_all_payloads_in_the_order_of_the_record():
    seat = Seat()
    seat.send(OTHER)
    assert not seat.tray.of(Vote)
    seat.send(LEADER)
    (vote,) = [message for _, message, _ in seat.tray.of(Vote)]
    assert vote.digest == DIGEST
    assert [bytes(one) for one in put_together(seat.fly.results, CUT)] == [PAYLOADS[peer] for peer in IDS]


@pytest.mark.parametrize("early", ["announcement", "open"])
def test_what_comes_before_its_meaning_is_kept(early):
    seat = Seat(tell=(LEADER,) if early == "announcement" else (LEADER, OTHER), opens=early == "announcement")
    seat.send(OTHER)
    seat.send(LEADER)
    assert not seat.tray.of(Vote)
    if early == "announcement":
        assert (OTHER, Ask(1, 0), b"") in seat.tray.sent
        seat.ready(OTHER)
    else:
        seat.open()
    assert [message.digest for _, message, _ in seat.tray.of(Vote)] == [DIGEST]
    assert seat.fly.exchange.early[0] == 0


def blamed(seat):
    return [(message.peer, message.reason) for _, message, _ in seat.tray.of(Blame)]


def test_a_piece_that_was_not_announced_is_refused():
    seat = Seat()
    seat.send(OTHER, 0, b"y" * 30)
    assert blamed(seat) == [(OTHER, "hash")]
    seat.send(OTHER, 1, b"z" * 30)
    assert not blamed(seat), "once is enough"


@pytest.mark.parametrize(
    "hashes", [b"", hashes_of([b"1", b"2", b"3", b"4"]), hashes_of([b"1"])[:31], hashes_of([b"1", b""])]
)
def test_an_announcement_of_too_many_pieces_is_refused_before_any_comes(hashes):
    seat = Seat(tell=(LEADER,))
    seat.ready(OTHER, hashes)
    assert blamed(seat) == [(OTHER, "length")]
    seat.send(LEADER)
    assert not seat.tray.of(Vote)
    # The next ballot does without.
    both = tuple(Contribution(peer, 1, 10) for peer in (LEADER, ME))
    seat.open(ballot=Ballot(2, LEADER), contributors=both)
    assert [message.digest for _, message, _ in seat.tray.of(Vote)] == [digest_of(PAYLOADS[LEADER], PAYLOADS[ME])]


@pytest.mark.parametrize(("payload", "reason"), [(b"bad", "encoding"), (b"x" * 31, "length")])
def test_a_payload_that_is_none_is_refused_and_so_in_every_ballot(payload, reason):
    payloads = {**PAYLOADS, OTHER: payload}
    seat = Seat(payloads=payloads)
    seat.send(OTHER)
    assert blamed(seat) == [(OTHER, reason)]
    seat.send(LEADER)
    assert not seat.tray.of(Vote)
    seat.open(ballot=Ballot(2, LEADER))
    assert blamed(seat) == [(OTHER, reason)]


def test_ragged_pieces_are_no_payload():
    seat = Seat(tell=(LEADER,))
    pieces = [b"x" * 5, b"x" * 10]
    seat.ready(OTHER, hashes_of(pieces))
    for index, piece in enumerate(pieces):
        seat.hear(OTHER, Chunk(1, 0, 1, index), piece)
    assert blamed(seat) == [(OTHER, "length")]


def test_an_absurdly_long_one_is_out():
    seat = Seat(payloads={LEADER: b"\x01", ME: b"\x01", OTHER: b"\xff" * 3})
    seat.fly.exchange._contributions._usual[0] = 1e-3
    seat.send(OTHER)
    seat.send(LEADER)
    assert (OTHER, "norm") in blamed(seat) and not seat.tray.of(Vote)


def test_what_does_not_come_is_asked_of_others_and_then_complained_of():
    seat = Seat()
    seat.send(LEADER)
    seat.tick(1.01)
    asked = seat.tray.of(Fetch)
    assert {to for to, _, _ in asked} == {LEADER, OTHER}
    assert {index for _, message, _ in asked for index in message.indices} == {6, 7, 8}
    key = asked[0][1].digest
    for index, piece in enumerate(cut_up(PAYLOADS[OTHER], CUT)[:2]):
        seat.hear(LEADER, Result(1, 0, FIRST, 6 + index), piece)
    assert not blamed(seat)
    seat.tick(3.2)
    assert blamed(seat) == [(OTHER, "chunk missing")]
    # We serve what we have ourselves.
    seat.hear(OTHER, Fetch(1, 0, key, (0, 7, 8)))
    served = {(to, message.index) for to, message, _ in seat.tray.of(Result)}
    assert served == {(OTHER, 0), (OTHER, 7)}
    seat.hear(LEADER, Result(1, 0, FIRST, 8), cut_up(PAYLOADS[OTHER], CUT)[2])
    assert [message.digest for _, message, _ in seat.tray.of(Vote)] == [DIGEST]


def test_of_who_is_out_of_reach_others_are_asked_soon():
    seat = Seat()
    seat.send(LEADER)
    seat.fly.lost(OTHER, gone=False)
    seat.tick(SOON * 2.0 + 0.01)
    assert {to for to, _, _ in seat.tray.of(Fetch)} == {LEADER}


def test_a_wrong_answer_is_nobodys_fault_and_asked_again():
    seat = Seat()
    seat.send(LEADER)
    seat.hear(LEADER, Result(1, 0, FIRST, 6), b"something!")
    assert not blamed(seat) and not seat.tray.of(Vote)
    seat.send(OTHER)
    assert len(seat.tray.of(Vote)) == 1


def commit_of(opened, digest):
    vote = Vote(1, 0, opened.ballot, name_of(opened), digest)
    return Commit(opened, digest, tuple(Proof(peer, signature(peer, vote)) for peer in (LEADER, OTHER)))


def test_what_was_committed_is_taken_from_those_who_voted_even_when_others_were_announced_to_us():
    """OTHER has told us of another payload than the rest: what they hold counts."""
    seat = Seat(tell=(LEADER,))
    seat.ready(OTHER, hashes_of([b"a lie"]))
    seat.send(LEADER)
    seat.hear(OTHER, Chunk(1, 0, 1, 0), b"a lie")
    assert len(seat.tray.of(Vote)) == 1, "we cannot know"
    seat.hear(LEADER, commit_of(seat.opened, DIGEST))
    seat.tick(0.3)
    assert seat.tray.of(Fetch) and not seat.fly.complete
    everything = tuple(range(9))
    wrong = Record(1, 0, FIRST, everything, hashes_of(slots(b"1", b"2", b"3")))
    seat.hear(LEADER, wrong)
    pieces = slots(*(PAYLOADS[peer] for peer in IDS))
    seat.hear(LEADER, Result(1, 0, FIRST, 8), pieces[8])  # it may come before the word of what it is
    seat.hear(LEADER, Record(1, 0, FIRST, everything, hashes_of(pieces)))
    for index in (6, 7):
        seat.hear(LEADER, Result(1, 0, FIRST, index), pieces[index])
    assert seat.fly.complete
    assert [bytes(one) for one in put_together(seat.fly.results, CUT)] == [PAYLOADS[peer] for peer in IDS]


def test_a_follower_is_served_the_hashes_and_the_pieces():
    seat = Seat()
    seat.send(OTHER)
    seat.send(LEADER)
    seat.hear(LEADER, commit_of(seat.opened, DIGEST))
    assert seat.fly.complete
    seat.tray.sent.clear()
    seat.hear(OTHER, Fetch(1, 0, DIGEST, (0, 1, 6)))
    (record,) = [message for _, message, _ in seat.tray.of(Record)]
    assert len(record.indices) == 9 and record.hashes[32 * 5 : 32 * 6] == EMPTY
    assert {message.index for _, message, _ in seat.tray.of(Result)} == {0, 1, 6}
    seat.hear(OTHER, Fetch(1, 0, bytes(32), (0,)))
    assert not seat.tray.of(Result)


def test_no_more_contribute_than_fit_in_a_round():
    assert room(Grid(1 << 20, 1 << 20)) == MAX_GROUP and room(Grid(30 << 20, 1 << 20)) == 34
    opened = Seat().opened
    assert sound(opened, Terms(1, 0, tuple(IDS), BASE, PLAN, room=3))
    assert not sound(opened, Terms(1, 0, tuple(IDS), BASE, PLAN, room=2))


@pytest.mark.parametrize("told", [hashes_of([b"x" * 10, b"y" * 10]), b""], ids=["more", "nothing"])
def test_what_is_settled_counts_whatever_a_contributor_had_told_us_alone(told):
    """It announced one payload to the others and another, or none at all, to us."""
    paid = {**PAYLOADS, OTHER: b"x" * 10}
    whole = slots(*(paid[peer] for peer in IDS))
    seat = Seat(tell=(LEADER,))
    seat.ready(OTHER, told)
    for peer in (LEADER, OTHER):
        seat.send(peer, 0, paid[peer])
    vote = Vote(1, 0, seat.opened.ballot, name_of(seat.opened), digest_of(*(paid[peer] for peer in IDS)))
    proofs = tuple(Proof(peer, signature(peer, vote)) for peer in (LEADER, OTHER))
    seat.hear(LEADER, Commit(seat.opened, vote.digest, proofs))
    seat.hear(LEADER, Record(1, 0, FIRST, tuple(range(len(whole))), hashes_of(whole)))
    first = len(whole) // len(IDS) * IDS.index(OTHER)
    for slot in (*range(first, len(whole)), *range(first)):
        seat.hear(LEADER, Result(1, 0, FIRST, slot), whole[slot])
        seat.ready(OTHER, told)
    assert seat.fly.complete


def held(seat):
    return {key: sorted(map(bytes, pieces.values())) for key, pieces in seat.fly.exchange._store.items()}


def test_what_nobody_vouches_for_costs_nothing_however_often_others_say_the_same_again(monkeypatch):
    seat, hashed = Seat(tell=(LEADER,)), []
    for index in range(6, 9):
        seat.hear(OTHER, Result(1, 0, FIRST, index), b"y" * 10)
    assert seat.fly.exchange.early[0] == 3

    class Counting:
        @staticmethod
        def blake3(chunk):
            hashed.append(bytes(chunk))
            return blake3.blake3(chunk)

    monkeypatch.setattr("thinwire.swarm.frame.blake3", Counting)
    replays, take = [], seat.fly.exchange._early.take
    monkeypatch.setattr(seat.fly.exchange._early, "take", lambda: replays.append(1) or take())
    for _ in range(5):
        seat.ready(LEADER)
    assert not replays
    seat.ready(LEADER, attempt=2)
    assert replays and not hashed and seat.fly.exchange.early[0] == 3
    seat.send(LEADER)
    seat.ready(OTHER)
    assert seat.fly.exchange.early[0] == 0 and b"y" * 10 in hashed, "judged as soon as they mean something"


def test_early_payloads_are_bounded_by_what_a_round_can_have():
    assert Seat().fly.exchange._early._most == room(CUT) * CUT.total


def test_payloads_of_announcements_that_count_no_more_are_freed():
    seat = Seat()
    seat.send(OTHER)
    assert held(seat) == {(ME, 1): [b"me"], (OTHER, 1): [b"x" * 10]}
    seat.ready(OTHER, hashes_of([b"z" * 10]), attempt=2)
    entries = tuple(Contribution(peer, 1 + (peer == OTHER), 10) for peer in IDS)
    seat.open(ballot=Ballot(2, LEADER), contributors=entries)
    seat.hear(OTHER, Chunk(1, 0, 2, 0), b"z" * 10)
    assert held(seat) == {(ME, 1): [b"me"], (OTHER, 2): [b"z" * 10]}
    assert (OTHER, 1) not in seat.fly.exchange._contributions._norms


def test_payloads_that_we_have_voted_for_are_kept_for_those_who_may_need_them():
    seat = Seat()
    seat.send(OTHER)
    seat.send(LEADER)
    assert seat.tray.of(Vote)
    seat.ready(OTHER, hashes_of([b"z" * 10]), attempt=2)
    entries = tuple(Contribution(peer, 1 + (peer == OTHER), 10) for peer in IDS)
    seat.open(ballot=Ballot(2, LEADER), contributors=entries)
    assert held(seat)[(OTHER, 1)] == [b"x" * 10]
    seat.open(ballot=Ballot(3, LEADER), adopted=DIGEST, sources=(LEADER,), kept=tuple(IDS))
    hashes = hashes_of(slots(*(PAYLOADS[peer] for peer in IDS)))
    seat.hear(LEADER, Record(1, 0, Ballot(3, LEADER), tuple(range(9)), hashes))
    assert [message.digest for _, message, _ in seat.tray.of(Vote)] == [DIGEST], "no piece had to come again"
