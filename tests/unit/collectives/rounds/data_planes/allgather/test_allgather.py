"""The all-gather of a round, frame by frame."""

from __future__ import annotations

import gc
import weakref

import blake3
import pytest
from kit.rounds.round_harness import (
    BASE,
    FIRST,
    LEADER,
    ME,
    PEERS,
    PLAN,
    RoundHarness,
    hashes_of,
    ready,
    signature,
)
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import name_of, sound, vote_for
from thinwire.collectives.rounds.data_planes.allgather.allgather import AllGather
from thinwire.collectives.rounds.data_planes.allgather.payload_pieces import (
    EMPTY,
    max_contributors,
    payloads_of,
    pieces_of,
)
from thinwire.collectives.topology.piece_requests import SOON
from thinwire.collectives.topology.shards import Grid
from thinwire.collectives.transport.pending_frames import PendingFrames
from thinwire.compression.core.codec import CodecError
from thinwire.swarm.messages.registry import (
    MAX_GROUP,
    Ask,
    Ballot,
    Blame,
    Chunk,
    Commit,
    Contribution,
    Fetch,
    Proof,
    Ready,
    Result,
    ResultRecord,
    Vote,
)

IDS = PEERS[:3]
OTHER = IDS[2]
CUT = Grid(30, 10)
PAYLOADS = {LEADER: b"leader" * 4, ME: b"me", OTHER: b"x" * 30}


class Honest:
    """Codec of any bytes that do not begin with "bad"; the first byte is the norm."""

    def check(self, payload, n):
        raw = bytes(payload)
        if len(raw) > n:
            raise CodecError("too long", "length")
        if raw.startswith(b"bad"):
            raise CodecError("bad", "encoding")
        return float(raw[0]) ** 2 if raw else 0.0


class Harness(RoundHarness):
    """Peer ME of three: LEADER leads, everyone contributes."""

    def __init__(self, *, tell=(LEADER, OTHER), payloads=PAYLOADS, opens=True):
        super().__init__(AllGather, peers=IDS, screen=Honest(), pieces=CUT)
        self.payloads = payloads
        self.round.announce(pieces_of(payloads[ME], CUT), weight=10, loss=0.0, speed=0.0)
        for peer in tell:
            self.announce(peer)
        if opens:
            self.proposal = self.open()
        self.sent(Ready)

    def announce(self, peer, hashes=None, attempt=1):
        hashes = hashes_of(pieces_of(self.payloads[peer], CUT)) if hashes is None else hashes
        self.on_message(peer, ready(hashes=hashes, attempt=attempt))

    def send(self, peer, index=None, payload=None):
        pieces = pieces_of(self.payloads[peer] if payload is None else payload, CUT)
        for at in range(len(pieces)) if index is None else (index,):
            self.on_message(peer, Chunk(1, 0, 1, at), pieces[at])

    def tick(self, now):
        self.now = now
        self.round.tick()


def slots(*payloads):
    found = []
    for payload in payloads:
        pieces = [bytes(piece) for piece in pieces_of(payload, CUT)]
        found += pieces + [b""] * (len(CUT) - len(pieces))
    return found


def digest_of(*payloads):
    return blake3.blake3(hashes_of(slots(*payloads))).digest()


DIGEST = digest_of(*(PAYLOADS[peer] for peer in IDS))


def test_own_pieces_are_sent_to_each_peer_once():
    harness = Harness()
    assert harness.sent(Chunk) == [(peer, Chunk(1, 0, 1, 0), b"me") for peer in (OTHER, LEADER)]
    harness.open(ballot=Ballot(2, LEADER))
    assert not harness.sent(Chunk)
    harness.round.on_link_down(OTHER)
    harness.round.on_link_up(OTHER)
    assert [to for to, _, _ in harness.sent(Chunk)] == [OTHER]


def test_vote_covers_all_payloads_in_order_of_contributors():
    harness = Harness()
    harness.send(OTHER)
    assert not harness.sent(Vote)
    harness.send(LEADER)
    (vote,) = [message for _, message, _ in harness.sent(Vote)]
    assert vote.digest == DIGEST
    assert [bytes(one) for one in payloads_of(harness.round.results, CUT)] == [PAYLOADS[peer] for peer in IDS]


@pytest.mark.parametrize("early", ["announcement", "open"])
def test_pieces_before_announcement_or_open_are_kept(early):
    harness = Harness(tell=(LEADER,) if early == "announcement" else (LEADER, OTHER), opens=early == "announcement")
    harness.send(OTHER)
    harness.send(LEADER)
    assert not harness.sent(Vote)
    if early == "announcement":
        assert (OTHER, Ask(1, 0), b"") in harness.queue.sent
        harness.announce(OTHER)
    else:
        harness.open()
    assert [message.digest for _, message, _ in harness.sent(Vote)] == [DIGEST]
    assert harness.round.data_plane.early[0] == 0


def blamed(harness):
    return [(message.peer, message.reason) for _, message, _ in harness.sent(Blame)]


def test_unannounced_piece_is_refused():
    harness = Harness()
    harness.send(OTHER, 0, b"y" * 30)
    assert blamed(harness) == [(OTHER, "hash")]
    harness.send(OTHER, 1, b"z" * 30)
    assert not blamed(harness), "once is enough"


@pytest.mark.parametrize(
    "hashes", [b"", hashes_of([b"1", b"2", b"3", b"4"]), hashes_of([b"1"])[:31], hashes_of([b"1", b""])]
)
def test_announcement_of_too_many_pieces_is_refused_at_once(hashes):
    harness = Harness(tell=(LEADER,))
    harness.announce(OTHER, hashes)
    assert blamed(harness) == [(OTHER, "length")]
    harness.send(LEADER)
    assert not harness.sent(Vote)
    # The next ballot does without.
    both = tuple(Contribution(peer, 1, 10) for peer in (LEADER, ME))
    harness.open(ballot=Ballot(2, LEADER), contributors=both)
    assert [message.digest for _, message, _ in harness.sent(Vote)] == [digest_of(PAYLOADS[LEADER], PAYLOADS[ME])]


@pytest.mark.parametrize(("payload", "reason"), [(b"bad", "encoding"), (b"x" * 31, "length")])
def test_invalid_payload_is_refused_in_every_ballot(payload, reason):
    payloads = {**PAYLOADS, OTHER: payload}
    harness = Harness(payloads=payloads)
    harness.send(OTHER)
    assert blamed(harness) == [(OTHER, reason)]
    harness.send(LEADER)
    assert not harness.sent(Vote)
    harness.open(ballot=Ballot(2, LEADER))
    assert blamed(harness) == [(OTHER, reason)]


def test_pieces_of_uneven_length_are_refused():
    harness = Harness(tell=(LEADER,))
    pieces = [b"x" * 5, b"x" * 10]
    harness.announce(OTHER, hashes_of(pieces))
    for index, piece in enumerate(pieces):
        harness.on_message(OTHER, Chunk(1, 0, 1, index), piece)
    assert blamed(harness) == [(OTHER, "length")]


def test_payload_with_absurd_norm_is_excluded():
    harness = Harness(payloads={LEADER: b"\x01", ME: b"\x01", OTHER: b"\xff" * 3})
    harness.usual[0] = 1e-3
    harness.send(OTHER)
    harness.send(LEADER)
    assert (OTHER, "norm") in blamed(harness) and not harness.sent(Vote)


def test_missing_payload_is_fetched_from_others_then_blamed():
    harness = Harness()
    harness.send(LEADER)
    harness.tick(1.01)
    asked = harness.sent(Fetch)
    assert {to for to, _, _ in asked} == {LEADER, OTHER}
    assert {index for _, message, _ in asked for index in message.indices} == {6, 7, 8}
    key = asked[0][1].digest
    for index, piece in enumerate(pieces_of(PAYLOADS[OTHER], CUT)[:2]):
        harness.on_message(LEADER, Result(1, 0, FIRST, 6 + index), piece)
    assert not blamed(harness)
    harness.tick(3.2)
    assert blamed(harness) == [(OTHER, "chunk missing")]
    # Peers serve what they have.
    harness.on_message(OTHER, Fetch(1, 0, key, (0, 7, 8)))
    served = {(to, message.index) for to, message, _ in harness.sent(Result)}
    assert served == {(OTHER, 0), (OTHER, 7)}
    harness.on_message(LEADER, Result(1, 0, FIRST, 8), pieces_of(PAYLOADS[OTHER], CUT)[2])
    assert [message.digest for _, message, _ in harness.sent(Vote)] == [DIGEST]


def test_payload_of_unreachable_peer_is_soon_fetched_from_others():
    harness = Harness()
    harness.send(LEADER)
    harness.round.on_link_down(OTHER)
    harness.tick(SOON * 2.0 + 0.01)
    assert {to for to, _, _ in harness.sent(Fetch)} == {LEADER}


def test_wrong_fetched_piece_is_asked_again_without_blame():
    harness = Harness()
    harness.send(LEADER)
    harness.on_message(LEADER, Result(1, 0, FIRST, 6), b"something!")
    assert not blamed(harness) and not harness.sent(Vote)
    harness.send(OTHER)
    assert len(harness.sent(Vote)) == 1


def commit_of(proposal, digest):
    vote = vote_for(proposal, digest)
    return Commit(proposal, digest, tuple(Proof(peer, signature(peer, vote)) for peer in (LEADER, OTHER)))


def test_committed_payload_is_fetched_from_voters_despite_other_announcement():
    """OTHER has announced another payload to us than to the rest: the payload of the voters counts."""
    harness = Harness(tell=(LEADER,))
    harness.announce(OTHER, hashes_of([b"a lie"]))
    harness.send(LEADER)
    harness.on_message(OTHER, Chunk(1, 0, 1, 0), b"a lie")
    assert len(harness.sent(Vote)) == 1, "we cannot know"
    harness.on_message(LEADER, commit_of(harness.proposal, DIGEST))
    harness.tick(0.3)
    assert harness.sent(Fetch) and not harness.round.complete
    everything = tuple(range(9))
    wrong = ResultRecord(1, 0, FIRST, everything, hashes_of(slots(b"1", b"2", b"3")))
    harness.on_message(LEADER, wrong)
    pieces = slots(*(PAYLOADS[peer] for peer in IDS))
    harness.on_message(LEADER, Result(1, 0, FIRST, 8), pieces[8])  # it may arrive before its hashes
    harness.on_message(LEADER, ResultRecord(1, 0, FIRST, everything, hashes_of(pieces)))
    for index in (6, 7):
        harness.on_message(LEADER, Result(1, 0, FIRST, index), pieces[index])
    assert harness.round.complete
    assert [bytes(one) for one in payloads_of(harness.round.results, CUT)] == [PAYLOADS[peer] for peer in IDS]


def test_follower_is_served_hashes_and_pieces():
    harness = Harness()
    harness.send(OTHER)
    harness.send(LEADER)
    harness.on_message(LEADER, commit_of(harness.proposal, DIGEST))
    assert harness.round.complete
    harness.queue.sent.clear()
    harness.on_message(OTHER, Fetch(1, 0, DIGEST, (0, 1, 6)))
    (record,) = [message for _, message, _ in harness.sent(ResultRecord)]
    assert len(record.indices) == 9 and record.hashes[32 * 5 : 32 * 6] == EMPTY
    assert {message.index for _, message, _ in harness.sent(Result)} == {0, 1, 6}
    harness.on_message(OTHER, Fetch(1, 0, bytes(32), (0,)))
    assert not harness.sent(Result)


def test_contributors_are_limited_to_what_fits_in_a_round():
    assert max_contributors(Grid(1 << 20, 1 << 20)) == MAX_GROUP and max_contributors(Grid(30 << 20, 1 << 20)) == 34
    proposal = Harness().proposal
    assert sound(proposal, RoundTerms(1, 0, tuple(IDS), BASE, PLAN, max_contributors=3))
    assert not sound(proposal, RoundTerms(1, 0, tuple(IDS), BASE, PLAN, max_contributors=2))


@pytest.mark.parametrize("told", [hashes_of([b"x" * 10, b"y" * 10]), b""], ids=["more", "nothing"])
def test_adopted_payload_overrides_equivocating_announcement(told):
    """It announced one payload to the others and another, or none, to us."""
    paid = {**PAYLOADS, OTHER: b"x" * 10}
    whole = slots(*(paid[peer] for peer in IDS))
    harness = Harness(tell=(LEADER,))
    harness.announce(OTHER, told)
    for peer in (LEADER, OTHER):
        harness.send(peer, 0, paid[peer])
    vote = Vote(1, 0, harness.proposal.ballot, name_of(harness.proposal), digest_of(*(paid[peer] for peer in IDS)))
    proofs = tuple(Proof(peer, signature(peer, vote)) for peer in (LEADER, OTHER))
    harness.on_message(LEADER, Commit(harness.proposal, vote.digest, proofs))
    harness.on_message(LEADER, ResultRecord(1, 0, FIRST, tuple(range(len(whole))), hashes_of(whole)))
    first = len(whole) // len(IDS) * IDS.index(OTHER)
    for slot in (*range(first, len(whole)), *range(first)):
        harness.on_message(LEADER, Result(1, 0, FIRST, slot), whole[slot])
        harness.announce(OTHER, told)
    assert harness.round.complete


class Piece(bytearray):
    """Payload whose end can be observed with a weak reference."""


def send_piece(harness, attempt, content):
    """Let the one piece of OTHER's payload arrive; return a weak reference to it."""
    piece = Piece(content)
    harness.on_message(OTHER, Chunk(1, 0, attempt, 0), piece)
    return weakref.ref(piece)


def test_unvouched_records_are_not_hashed_repeatedly(monkeypatch):
    harness, hashed = Harness(tell=(LEADER,)), []
    for index in range(6, 9):
        harness.on_message(OTHER, Result(1, 0, FIRST, index), b"y" * 10)
    assert harness.round.data_plane.early[0] == 3

    class Counting:
        @staticmethod
        def blake3(chunk):
            hashed.append(bytes(chunk))
            return blake3.blake3(chunk)

    monkeypatch.setattr("thinwire.swarm.frame.blake3", Counting)
    replays, take = [], PendingFrames.take
    monkeypatch.setattr(PendingFrames, "take", lambda self: replays.append(1) or take(self))
    for _ in range(5):
        harness.announce(LEADER)
    assert not replays
    harness.announce(LEADER, attempt=2)
    assert replays and not hashed and harness.round.data_plane.early[0] == 3
    harness.send(LEADER)
    harness.announce(OTHER)
    assert harness.round.data_plane.early[0] == 0 and b"y" * 10 in hashed, "judged as soon as they mean something"


def test_early_payloads_are_bounded_by_round_size(monkeypatch):
    bounds = []

    class Noted(PendingFrames):
        def __init__(self, total, each, nbytes=None):
            super().__init__(total, each, nbytes)
            bounds.append(nbytes)

    monkeypatch.setattr("thinwire.collectives.rounds.data_planes.data_plane.PendingFrames", Noted)
    Harness()
    assert bounds == [max_contributors(CUT) * CUT.total]


def test_payloads_of_replaced_announcements_are_freed():
    harness = Harness(payloads=PAYLOADS | {OTHER: b"x" * 10})
    old = send_piece(harness, 1, b"x" * 10)
    assert old() is not None
    harness.announce(OTHER, hashes_of([b"z" * 10]), attempt=2)
    entries = tuple(Contribution(peer, 1 + (peer == OTHER), 10) for peer in IDS)
    harness.open(ballot=Ballot(2, LEADER), contributors=entries)
    new = send_piece(harness, 2, b"z" * 10)
    gc.collect()
    assert old() is None and new() is not None


def test_voted_payloads_are_kept_for_other_peers():
    harness = Harness()
    harness.send(OTHER)
    harness.send(LEADER)
    assert harness.sent(Vote)
    harness.announce(OTHER, hashes_of([b"z" * 10]), attempt=2)
    entries = tuple(Contribution(peer, 1 + (peer == OTHER), 10) for peer in IDS)
    harness.open(ballot=Ballot(2, LEADER), contributors=entries)
    harness.open(ballot=Ballot(3, LEADER), adopted=DIGEST, sources=(LEADER,), kept=tuple(IDS))
    hashes = hashes_of(slots(*(PAYLOADS[peer] for peer in IDS)))
    harness.on_message(LEADER, ResultRecord(1, 0, Ballot(3, LEADER), tuple(range(9)), hashes))
    assert [message.digest for _, message, _ in harness.sent(Vote)] == [DIGEST], "no piece had to come again"
