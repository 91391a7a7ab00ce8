"""The two-level plane, frame by frame: what a relay owes and takes, and who is named when something is missing."""

from __future__ import annotations

from statistics import median_high

import blake3
import numpy as np
import pytest
from aids.tray import Tray, hashes_of, signature
from thinwire.collectives.aggregate import RULES, outliers
from thinwire.collectives.agreement import Agreement
from thinwire.collectives.butterfly import Butterfly
from thinwire.collectives.clusters import clusters
from thinwire.collectives.complaints import Complaints
from thinwire.collectives.hierarchy import Hierarchy
from thinwire.collectives.proposal import Terms, propose, sound
from thinwire.collectives.routes import Routes
from thinwire.collectives.shards import grid
from thinwire.compression import registry
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import (
    Ballot,
    Blame,
    Chunk,
    Contribution,
    Open,
    Ready,
    Record,
    Result,
    Subtotal,
    Vote,
)

IDS = [bytes([i]) * 32 for i in range(5)]
LEADER, ME, FAR, FURTHER, ALONE = IDS
SITES = dict(zip(IDS, ("a", "a", "b", "b", ""), strict=True))
BASE, PLAN = bytes(32), bytes([1]) * 32
CODEC = registry.parse("fp32")
GRID = grid(6 * 4096 - 100, CODEC)
FIRST, SECOND = Ballot(1, LEADER), Ballot(2, LEADER)


def payloads(seed):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(GRID.size(i)).astype(np.float32).tobytes() for i in range(len(GRID))]


def ready(peer, chunks, attempt=1):
    return Ready(1, 0, attempt, BASE, PLAN, 10, hashes_of(chunks), True, 0.0, 0.0, site=SITES[peer])


def opening(**changes):
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
        sites=clusters(IDS, SITES),
    )
    return Open(**(given | changes))


def mean(chunks, weights):
    out = np.empty(len(chunks[0]) // 4, np.float32)
    RULES["mean"](CODEC, [np.frombuffer(chunk, np.uint8) for chunk in chunks], weights, out)
    return out.tobytes()


class Seat:
    """Peer ME of five at two sites and alone. ME owns chunk 3, and is its site's relay for 4 and 5."""

    def __init__(self, *, opened=True):
        self.now, self.tray = 0.0, Tray()
        self.sources = {peer: payloads(seed) for seed, peer in enumerate(IDS)}
        agreement = Agreement(
            ME,
            Terms(1, 0, tuple(IDS), BASE, PLAN, sited=True),
            sign=lambda message: signature(ME, message),
            verify=lambda peer, message, proof: proof == signature(peer, message),
            live=IDS,
        )
        exchange = Hierarchy(
            agreement,
            codec=CODEC,
            grid=GRID,
            rule=RULES["mean"],
            seed=b"seed",
            outbox=self.tray,
            now=lambda: self.now,
            usual={},
            groups={},
        )
        self.fly = Butterfly(agreement, exchange, outbox=self.tray, now=lambda: self.now, site="a")
        self.fly.announce(self.sources[ME], weight=10, loss=0.0, speed=0.0)
        for peer in IDS:
            if peer != ME:
                self.hear(peer, ready(peer, self.sources[peer]))
        if opened:
            self.open()

    def hear(self, sender, message, payload=b""):
        self.fly.hear(sender, Frame(message, payload, signature(sender, message)))

    def open(self, **changes):
        opened = opening(**changes)
        self.hear(opened.ballot.leader, opened)
        return opened

    def chunk(self, sender, index, payload=None):
        self.hear(sender, Chunk(1, 0, 1, index), self.sources[sender][index] if payload is None else payload)

    def total(self, peers, index):
        return mean([self.sources[peer][index] for peer in peers], [10.0] * len(peers))

    def subtotal(self, sender, index, payload=None, *, opened=None, peers=(FAR, FURTHER)):
        number = 1
        name = Routes(opened or opening(), len(GRID), b"seed").clusters[number].name
        self.hear(sender, Subtotal(1, 0, name, index), self.total(peers, index) if payload is None else payload)

    def result(self, index):
        sites = [self.total((LEADER, ME), index), self.total((FAR, FURTHER), index), self.sources[ALONE][index]]
        return mean(sites, [20.0, 20.0, 10.0])

    def owned(self):
        """All that chunk 3 is made of."""
        self.chunk(LEADER, 3)
        self.subtotal(FURTHER, 3)
        self.chunk(ALONE, 3)

    def results_of(self, sender, *indices, ballot=FIRST):
        for index in indices:
            self.hear(sender, Result(1, 0, ballot, index), self.result(index))

    def record_of(self, owner, *indices, ballot=FIRST):
        hashes = b"".join(blake3.blake3(self.result(index)).digest() for index in indices)
        self.hear(owner, Record(1, 0, ballot, indices, hashes))

    def blamed(self):
        return [(message.peer, message.reason) for _, message, _ in self.tray.of(Blame)]


@pytest.fixture
def seat():
    return Seat()


def test_chunks_are_dealt_out_to_sites_and_within_them(seat):
    assert seat.fly.exchange.owners == (LEADER, FAR, ALONE, ME, FURTHER, ALONE)
    assert [message.site for _, message, _ in seat.tray.of(Ready)][0] == "a"


def test_contributions_go_to_the_relay_of_their_own_site(seat):
    sent = {(to, message.index): payload for to, message, payload in seat.tray.of(Chunk)}
    assert sent == {(LEADER, index): seat.sources[ME][index] for index in (0, 1, 2)}


def test_relay_sends_the_mean_of_its_site_to_the_owner(seat):
    for index in (4, 5):
        seat.chunk(LEADER, index)
    sent = [(to, message.index, payload) for to, message, payload in seat.tray.of(Subtotal)]
    assert sent == [(owner, i, seat.total((LEADER, ME), i)) for owner, i in ((FURTHER, 4), (ALONE, 5))]
    assert seat.tray.of(Result) == [] and seat.blamed() == []


def test_owner_averages_sites_by_weight_and_sends_to_relays(seat):
    seat.owned()
    sent = [(to, payload) for to, message, payload in seat.tray.of(Result)]
    assert sorted(to for to, _ in sent) == [LEADER, FURTHER, ALONE]
    assert {payload for _, payload in sent} == {seat.result(3)}
    assert [to for to, _, _ in seat.tray.of(Record)] == [LEADER, FAR, FURTHER, ALONE]


def test_relay_hands_results_on_within_its_site(seat):
    seat.results_of(FURTHER, 4)
    assert [(to, message.index, p) for to, message, p in seat.tray.of(Result)] == [(LEADER, 4, seat.result(4))]
    seat.results_of(LEADER, 0, 1)
    assert seat.tray.of(Result) == [], "these are for others to hand on"


def test_whole_round(seat):
    seat.owned()
    for index in (4, 5):
        seat.chunk(LEADER, index)
    seat.results_of(LEADER, 0, 1, 2)
    seat.results_of(FURTHER, 4)
    seat.results_of(ALONE, 5)
    assert seat.tray.of(Vote) == []
    for owner, indices in ((LEADER, (0,)), (FAR, (1,)), (ALONE, (2, 5)), (FURTHER, (4,))):
        seat.record_of(owner, *indices)
    ((to, vote, _),) = seat.tray.of(Vote)
    hashes = b"".join(blake3.blake3(seat.result(index)).digest() for index in range(6))
    assert to == LEADER and vote.digest == blake3.blake3(hashes).digest() and seat.blamed() == []


def test_values_that_come_before_the_ballot_wait():
    seat = Seat(opened=False)
    seat.owned()
    assert seat.tray.of(Result) == []
    seat.open()
    assert len(seat.tray.of(Result)) == 3 and bytes(seat.fly.results[3]) == seat.result(3)


@pytest.mark.parametrize("sender", [LEADER, FAR, ALONE])
def test_value_of_a_site_from_another_than_its_relay_is_not_taken(seat, sender):
    seat.chunk(LEADER, 3)
    seat.chunk(ALONE, 3)
    seat.subtotal(sender, 3)
    assert seat.fly.results[3] is None and seat.blamed() == []
    seat.subtotal(FURTHER, 3)
    assert bytes(seat.fly.results[3]) == seat.result(3)


@pytest.mark.parametrize("index", [0, 5, 6, 60])
def test_value_of_a_chunk_that_is_not_ours_is_not_taken(seat, index):
    seat.subtotal(FURTHER, min(index, 5)) if index < 6 else seat.hear(FURTHER, Subtotal(1, 0, bytes(32), index), b"x")
    assert seat.tray.of(Result) == [] and seat.blamed() == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        bytes(8),
        np.full(GRID.size(3), np.nan, np.float32).tobytes(),
        np.full(GRID.size(3), 1e6, np.float32).tobytes(),
    ],
    ids=["empty", "short", "nan", "huge"],
)
def test_value_that_cannot_be_is_blamed_on_the_relay(seat, payload):
    seat.chunk(LEADER, 3)
    seat.chunk(ALONE, 3)
    seat.subtotal(FURTHER, 3, payload)
    assert set(seat.blamed()) == {(FURTHER, "subtotal")} and seat.fly.results[3] is None


def test_contribution_to_the_relay_is_screened(seat):
    seat.chunk(LEADER, 4, bytes([1]) + seat.sources[LEADER][4][1:])
    assert seat.blamed() == [(LEADER, "hash")]
    assert seat.tray.of(Subtotal) == []


def test_who_holds_us_up_is_named_in_the_order_of_the_way(seat):
    seat.now = 2.5
    seat.fly.tick()
    assert seat.blamed() == [(LEADER, "chunk missing")]
    for index in (3, 4, 5):
        seat.chunk(LEADER, index)
    assert seat.fly.exchange.culprit(seat.fly.exchange.opened) == (ALONE, "chunk missing")
    seat.chunk(ALONE, 3)
    assert seat.fly.exchange.culprit(seat.fly.exchange.opened) == (FURTHER, "subtotal missing")
    seat.subtotal(FURTHER, 3)
    assert seat.fly.exchange.culprit(seat.fly.exchange.opened) == (LEADER, "result missing")
    seat.results_of(LEADER, 0)
    assert seat.fly.exchange.culprit(seat.fly.exchange.opened) == (FAR, "result missing"), "the owner has not signed"
    seat.record_of(FAR, 1)
    assert seat.fly.exchange.culprit(seat.fly.exchange.opened) == (LEADER, "result missing"), "so its relay has it"


def test_relay_that_hands_on_another_result_is_not_believed(seat):
    wrong = seat.result(1)[:-4] + bytes(4)
    seat.hear(LEADER, Result(1, 0, FIRST, 1), wrong)
    assert bytes(seat.fly.results[1]) == wrong
    seat.record_of(FAR, 1)
    assert seat.fly.results[1] is None
    seat.hear(LEADER, Result(1, 0, FIRST, 1), wrong)
    assert seat.blamed() == [(LEADER, "result")]


def test_another_relay_takes_over_and_what_was_told_is_not_told_again(seat):
    seat.owned()
    for index in (4, 5):
        seat.chunk(LEADER, index)
    for kind in (Subtotal, Result, Record):
        seat.tray.of(kind)
    seat.open(ballot=SECOND, idle=(FURTHER,))
    assert seat.fly.exchange.owners == (LEADER, FAR, ALONE, ME, FAR, ALONE)
    assert [(to, message.index) for to, message, _ in seat.tray.of(Subtotal)] == [(FAR, 4)]
    assert sorted(to for to, message, _ in seat.tray.of(Result)) == [LEADER, FAR, ALONE]


def test_who_is_relay_again_says_again_what_the_owner_has_dropped(seat):
    for index in (4, 5):
        seat.chunk(LEADER, index)
    told = [(to, message.index) for to, message, _ in seat.tray.of(Subtotal)]
    assert len(told) == 2
    seat.open(ballot=Ballot(2, LEADER), idle=(ME,))
    assert not seat.tray.of(Subtotal)
    seat.open(ballot=Ballot(3, LEADER))
    assert [(to, message.index) for to, message, _ in seat.tray.of(Subtotal)] == told


def test_value_of_a_relay_that_is_none_any_more_is_not_used(seat):
    """It may have lied to us as well; another says what the site's value is."""
    seat.chunk(LEADER, 3)
    seat.subtotal(FURTHER, 3, np.ones(GRID.size(3), np.float32).tobytes())
    seat.open(ballot=SECOND, idle=(FURTHER,))
    seat.chunk(ALONE, 3)
    assert seat.fly.results[3] is None
    seat.subtotal(FAR, 3)
    assert bytes(seat.fly.results[3]) == seat.result(3)


def test_two_sites_that_differ_much_are_both_heard():
    """Of two there is no middle: a site whose part of the model hardly moves must not make the other one absurd."""
    norms = {FAR: 1.0, FURTHER: 900.0}
    usual = 0.0
    for _ in range(50):
        out, usual = outliers(norms, usual, median_high)
        norms[FAR] = 1e-3
        assert out == ()
    assert outliers({FAR: 1.0, FURTHER: 1e7}, usual, median_high)[0] == (FURTHER,)


def test_site_without_a_working_relay_sends_to_the_owner(seat):
    seat.open(ballot=SECOND, idle=(FAR, FURTHER))
    seat.chunk(LEADER, 3)
    seat.chunk(ALONE, 3)
    for peer in (FAR, FURTHER):
        seat.chunk(peer, 3)
    assert bytes(seat.fly.results[3]) == seat.result(3), "the same as with a relay"
    sent = seat.tray.of(Result)
    assert {to for to, message, _ in sent if message.index == 3} == {LEADER, FAR, FURTHER, ALONE}


def test_value_of_a_ballot_with_other_contributors_is_not_used(seat):
    """The site's old value is late: FAR is out since, and it must not count."""
    left = tuple(Contribution(peer, 1, 10) for peer in IDS if peer != FAR)
    opened = seat.open(ballot=SECOND, contributors=left)
    seat.chunk(LEADER, 3)
    seat.chunk(ALONE, 3)
    seat.subtotal(FURTHER, 3)
    assert seat.fly.results[3] is None
    seat.chunk(FURTHER, 3)
    site = seat.total((LEADER, ME), 3)
    wanted = mean([site, seat.sources[FURTHER][3], seat.sources[ALONE][3]], [20.0, 10.0, 10.0])
    assert bytes(seat.fly.results[3]) == wanted and not Routes(opened, 6, b"seed").clusters[1].sums


def test_value_of_a_site_outlives_a_ballot_that_changes_another(seat):
    seat.subtotal(FURTHER, 3)
    left = tuple(Contribution(peer, 1, 10) for peer in IDS if peer != ALONE)
    seat.open(ballot=SECOND, contributors=left)
    seat.chunk(LEADER, 3)
    wanted = mean([seat.total((LEADER, ME), 3), seat.total((FAR, FURTHER), 3)], [20.0, 20.0])
    assert bytes(seat.fly.results[3]) == wanted


def test_peer_that_is_back_gets_what_it_missed(seat):
    seat.owned()
    for index in (4, 5):
        seat.chunk(LEADER, index)
    for kind in (Subtotal, Result, Chunk):
        seat.tray.of(kind)
    seat.fly.lost(FURTHER, gone=False)
    seat.fly.reach(FURTHER)
    assert [(to, message.index) for to, message, _ in seat.tray.of(Subtotal)] == [(FURTHER, 4)]
    assert [(to, message.index) for to, message, _ in seat.tray.of(Result)] == [(FURTHER, 3)]
    seat.fly.lost(LEADER, gone=False)
    seat.fly.reach(LEADER)
    assert [(to, message.index) for to, message, _ in seat.tray.of(Chunk)] == [(LEADER, i) for i in (0, 1, 2)]


# --- the agreement's part


def test_leader_names_sites_and_a_ballot_without_them_is_not_followed():
    terms = Terms(1, 0, tuple(IDS), BASE, PLAN, sited=True)
    said = {peer: ready(peer, payloads(0)) for peer in IDS}
    opened = propose(FIRST, terms, tuple(IDS), said, {}, rejected={}, idle=(), before=None)
    assert opened is not None and opened.sites == (0, 0, 1, 1, 2) and sound(opened, terms)
    for sites in ((), (0, 0, 1, 1), (0, 0, 1, 1, 3), (1, 1, 0, 0, 2)):
        assert not sound(opening(sites=sites), terms)
    assert not sound(opened, Terms(1, 0, tuple(IDS), BASE, PLAN))


def test_word_against_a_relay_costs_both_their_chunks_and_the_leaders_only_the_relay():
    opened = opening()
    for reason in ("subtotal", "subtotal missing"):
        complaints = Complaints()
        blame = Blame(1, 0, FIRST, FURTHER, reason)
        assert complaints.hear(ME, blame, opened, lambda peers: True) and complaints.idle == {ME, FURTHER}
        assert not complaints.hear(ALONE, blame, opened, lambda peers: True), "it is known"
        assert not complaints.hear(ALONE, Blame(1, 0, FIRST, ALONE, reason), opened, lambda peers: True)
        assert not complaints.rejected
        complaints = Complaints()
        assert complaints.hear(LEADER, blame, opened, lambda peers: True) and complaints.idle == {FURTHER}


def test_somebody_is_left_to_work():
    opened = opening(idle=(FAR, FURTHER, ALONE))
    complaints = Complaints(opened.idle)
    assert complaints.hear(ME, Blame(1, 0, FIRST, LEADER, "subtotal"), opened, lambda peers: True)
    assert complaints.idle == {ME, FAR, FURTHER, ALONE}
