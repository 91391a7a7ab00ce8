"""The two-level hierarchy of a round, frame by frame: duties of relays, and blame for missing data."""

from __future__ import annotations

from statistics import median_high

import blake3
import numpy as np
import pytest
from kit.rounds.round_harness import (
    BASE,
    FIRST,
    GRID,
    PEERS,
    PLAN,
    SECOND,
    DenseHarness,
    dense_payloads,
    mean,
    opening,
    ready,
)
from thinwire.collectives.aggregation.screening import outliers
from thinwire.collectives.consensus.blame import BlameBook
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import propose, sound
from thinwire.collectives.rounds.data_planes.hierarchy import Hierarchy
from thinwire.collectives.topology.clusters import clusters
from thinwire.collectives.topology.hierarchy_routes import Routes
from thinwire.swarm.messages.registry import (
    Ballot,
    Blame,
    Chunk,
    Contribution,
    Ready,
    Result,
    ResultRecord,
    Subtotal,
    Vote,
)

IDS = PEERS
LEADER, ME, FAR, FURTHER, ALONE = IDS
SITES = dict(zip(IDS, ("a", "a", "b", "b", ""), strict=True))


def proposal_with(**changes):
    return opening(IDS, **({"sites": clusters(IDS, SITES)} | changes))


class Harness(DenseHarness):
    """Peer ME of five at two sites and alone. ME owns chunk 3, and is its site's relay for 4 and 5."""

    def __init__(self, *, proposal=True):
        terms = RoundTerms(1, 0, IDS, BASE, PLAN, sited=True)
        super().__init__(Hierarchy, peers=IDS, sites=SITES.values(), terms=terms, groups={})
        if proposal:
            self.open()

    def opening(self, **changes):
        return proposal_with(**changes)

    def chunk(self, sender, index, payload=None):
        self.on_message(sender, Chunk(1, 0, 1, index), self.sources[sender][index] if payload is None else payload)

    def total(self, peers, index):
        return mean([self.sources[peer][index] for peer in peers], [10.0] * len(peers))

    def subtotal(self, sender, index, payload=None, *, proposal=None, peers=(FAR, FURTHER)):
        number = 1
        name = Routes(proposal or proposal_with(), len(GRID), b"seed").clusters[number].name
        self.on_message(sender, Subtotal(1, 0, name, index), self.total(peers, index) if payload is None else payload)

    def result(self, index):
        sites = [self.total((LEADER, ME), index), self.total((FAR, FURTHER), index), self.sources[ALONE][index]]
        return mean(sites, [20.0, 20.0, 10.0])

    def owned(self):
        """Deliver all contributions to chunk 3."""
        self.chunk(LEADER, 3)
        self.subtotal(FURTHER, 3)
        self.chunk(ALONE, 3)


@pytest.fixture
def harness():
    return Harness()


def test_chunks_are_assigned_to_sites_and_within_sites(harness):
    assert harness.round.data_plane.owners == (LEADER, FAR, ALONE, ME, FURTHER, ALONE)
    assert [message.site for _, message, _ in harness.sent(Ready)][0] == "a"


def test_contributions_go_to_relay_of_own_site(harness):
    sent = {(to, message.index): payload for to, message, payload in harness.sent(Chunk)}
    assert sent == {(LEADER, index): harness.sources[ME][index] for index in (0, 1, 2)}


def test_relay_sends_site_mean_to_owner(harness):
    for index in (4, 5):
        harness.chunk(LEADER, index)
    sent = [(to, message.index, payload) for to, message, payload in harness.sent(Subtotal)]
    assert sent == [(owner, i, harness.total((LEADER, ME), i)) for owner, i in ((FURTHER, 4), (ALONE, 5))]
    assert harness.sent(Result) == [] and harness.blamed() == []


def test_owner_averages_sites_by_weight_and_sends_to_relays(harness):
    harness.owned()
    sent = [(to, payload) for to, message, payload in harness.sent(Result)]
    assert sorted(to for to, _ in sent) == [LEADER, FURTHER, ALONE]
    assert {payload for _, payload in sent} == {harness.result(3)}
    assert [to for to, _, _ in harness.sent(ResultRecord)] == [LEADER, FAR, FURTHER, ALONE]


def test_relay_forwards_results_within_its_site(harness):
    harness.results_of(FURTHER, 4)
    assert [(to, message.index, p) for to, message, p in harness.sent(Result)] == [(LEADER, 4, harness.result(4))]
    harness.results_of(LEADER, 0, 1)
    assert harness.sent(Result) == [], "these are for others to hand on"


def test_hierarchy_round_with_honest_peers_votes(harness):
    harness.owned()
    for index in (4, 5):
        harness.chunk(LEADER, index)
    harness.results_of(LEADER, 0, 1, 2)
    harness.results_of(FURTHER, 4)
    harness.results_of(ALONE, 5)
    assert harness.sent(Vote) == []
    for owner, indices in ((LEADER, (0,)), (FAR, (1,)), (ALONE, (2, 5)), (FURTHER, (4,))):
        harness.record_of(owner, *indices)
    ((to, vote, _),) = harness.sent(Vote)
    hashes = b"".join(blake3.blake3(harness.result(index)).digest() for index in range(6))
    assert to == LEADER and vote.digest == blake3.blake3(hashes).digest() and harness.blamed() == []


def test_site_means_before_the_ballot_are_kept():
    harness = Harness(proposal=False)
    harness.owned()
    assert harness.sent(Result) == []
    harness.open()
    assert len(harness.sent(Result)) == 3 and bytes(harness.round.results[3]) == harness.result(3)


@pytest.mark.parametrize("sender", [LEADER, FAR, ALONE])
def test_site_mean_from_other_than_its_relay_is_ignored(harness, sender):
    harness.chunk(LEADER, 3)
    harness.chunk(ALONE, 3)
    harness.subtotal(sender, 3)
    assert harness.round.results[3] is None and harness.blamed() == []
    harness.subtotal(FURTHER, 3)
    assert bytes(harness.round.results[3]) == harness.result(3)


@pytest.mark.parametrize("index", [0, 5, 6, 60])
def test_site_mean_of_unowned_chunk_is_ignored(harness, index):
    harness.subtotal(FURTHER, min(index, 5)) if index < 6 else harness.on_message(
        FURTHER, Subtotal(1, 0, bytes(32), index), b"x"
    )
    assert harness.sent(Result) == [] and harness.blamed() == []


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
def test_invalid_site_mean_is_blamed_on_its_relay(harness, payload):
    harness.chunk(LEADER, 3)
    harness.chunk(ALONE, 3)
    harness.subtotal(FURTHER, 3, payload)
    assert set(harness.blamed()) == {(FURTHER, "subtotal")} and harness.round.results[3] is None


def test_relay_screens_contributions(harness):
    harness.chunk(LEADER, 4, bytes([1]) + harness.sources[LEADER][4][1:])
    assert harness.blamed() == [(LEADER, "hash")]
    assert harness.sent(Subtotal) == []


def test_missing_data_is_blamed_in_order_of_the_route(harness):
    harness.now = 2.5
    harness.round.tick()
    assert harness.blamed() == [(LEADER, "chunk missing")]
    for index in (3, 4, 5):
        harness.chunk(LEADER, index)
    assert harness.round.data_plane.culprit(harness.round.data_plane.proposal) == (ALONE, "chunk missing")
    harness.chunk(ALONE, 3)
    assert harness.round.data_plane.culprit(harness.round.data_plane.proposal) == (FURTHER, "subtotal missing")
    harness.subtotal(FURTHER, 3)
    assert harness.round.data_plane.culprit(harness.round.data_plane.proposal) == (LEADER, "result missing")
    harness.results_of(LEADER, 0)
    assert harness.round.data_plane.culprit(harness.round.data_plane.proposal) == (FAR, "result missing"), (
        "the owner has not signed"
    )
    harness.record_of(FAR, 1)
    assert harness.round.data_plane.culprit(harness.round.data_plane.proposal) == (LEADER, "result missing"), (
        "so its relay has it"
    )


def test_forwarded_result_that_differs_is_refused(harness):
    wrong = harness.result(1)[:-4] + bytes(4)
    harness.on_message(LEADER, Result(1, 0, FIRST, 1), wrong)
    assert bytes(harness.round.results[1]) == wrong
    harness.record_of(FAR, 1)
    assert harness.round.results[1] is None
    harness.on_message(LEADER, Result(1, 0, FIRST, 1), wrong)
    assert harness.blamed() == [(LEADER, "result")]


def test_replacement_relay_does_not_resend_known_site_mean(harness):
    harness.owned()
    for index in (4, 5):
        harness.chunk(LEADER, index)
    for kind in (Subtotal, Result, ResultRecord):
        harness.sent(kind)
    harness.open(ballot=SECOND, idle=(FURTHER,))
    assert harness.round.data_plane.owners == (LEADER, FAR, ALONE, ME, FAR, ALONE)
    assert [(to, message.index) for to, message, _ in harness.sent(Subtotal)] == [(FAR, 4)]
    assert sorted(to for to, message, _ in harness.sent(Result)) == [LEADER, FAR, ALONE]


def test_reinstated_relay_resends_dropped_site_mean(harness):
    for index in (4, 5):
        harness.chunk(LEADER, index)
    told = [(to, message.index) for to, message, _ in harness.sent(Subtotal)]
    assert len(told) == 2
    harness.open(ballot=Ballot(2, LEADER), idle=(ME,))
    assert not harness.sent(Subtotal)
    harness.open(ballot=Ballot(3, LEADER))
    assert [(to, message.index) for to, message, _ in harness.sent(Subtotal)] == told


def test_site_mean_of_replaced_relay_is_not_used(harness):
    """The old relay may have lied to us as well; another one reports the site's value."""
    harness.chunk(LEADER, 3)
    harness.subtotal(FURTHER, 3, np.ones(GRID.size(3), np.float32).tobytes())
    harness.open(ballot=SECOND, idle=(FURTHER,))
    harness.chunk(ALONE, 3)
    assert harness.round.results[3] is None
    harness.subtotal(FAR, 3)
    assert bytes(harness.round.results[3]) == harness.result(3)


def test_two_very_different_site_means_are_both_used():
    """Two values have no median: a site that hardly changes the model must not make the other one an outlier."""
    norms = {FAR: 1.0, FURTHER: 900.0}
    usual = 0.0
    for _ in range(50):
        out, usual = outliers(norms, usual, median_high)
        norms[FAR] = 1e-3
        assert out == ()
    assert outliers({FAR: 1.0, FURTHER: 1e7}, usual, median_high)[0] == (FURTHER,)


def test_site_without_working_relay_sends_to_owner(harness):
    harness.open(ballot=SECOND, idle=(FAR, FURTHER))
    harness.chunk(LEADER, 3)
    harness.chunk(ALONE, 3)
    for peer in (FAR, FURTHER):
        harness.chunk(peer, 3)
    assert bytes(harness.round.results[3]) == harness.result(3), "the same as with a relay"
    sent = harness.sent(Result)
    assert {to for to, message, _ in sent if message.index == 3} == {LEADER, FAR, FURTHER, ALONE}


def test_site_mean_of_other_contributors_is_not_used(harness):
    """The site's old value is late: FAR has been excluded since, and must not count."""
    left = tuple(Contribution(peer, 1, 10) for peer in IDS if peer != FAR)
    proposal = harness.open(ballot=SECOND, contributors=left)
    harness.chunk(LEADER, 3)
    harness.chunk(ALONE, 3)
    harness.subtotal(FURTHER, 3)
    assert harness.round.results[3] is None
    harness.chunk(FURTHER, 3)
    site = harness.total((LEADER, ME), 3)
    wanted = mean([site, harness.sources[FURTHER][3], harness.sources[ALONE][3]], [20.0, 10.0, 10.0])
    assert bytes(harness.round.results[3]) == wanted and not Routes(proposal, 6, b"seed").clusters[1].sums


def test_site_mean_is_kept_when_another_site_changes(harness):
    harness.subtotal(FURTHER, 3)
    left = tuple(Contribution(peer, 1, 10) for peer in IDS if peer != ALONE)
    harness.open(ballot=SECOND, contributors=left)
    harness.chunk(LEADER, 3)
    wanted = mean([harness.total((LEADER, ME), 3), harness.total((FAR, FURTHER), 3)], [20.0, 20.0])
    assert bytes(harness.round.results[3]) == wanted


def test_reconnected_peer_gets_missed_frames(harness):
    harness.owned()
    for index in (4, 5):
        harness.chunk(LEADER, index)
    for kind in (Subtotal, Result, Chunk):
        harness.sent(kind)
    harness.round.on_link_down(FURTHER)
    harness.round.on_link_up(FURTHER)
    assert [(to, message.index) for to, message, _ in harness.sent(Subtotal)] == [(FURTHER, 4)]
    assert [(to, message.index) for to, message, _ in harness.sent(Result)] == [(FURTHER, 3)]
    harness.round.on_link_down(LEADER)
    harness.round.on_link_up(LEADER)
    assert [(to, message.index) for to, message, _ in harness.sent(Chunk)] == [(LEADER, i) for i in (0, 1, 2)]


# --- the agreement's part


def test_ballot_without_sites_is_not_followed():
    terms = RoundTerms(1, 0, tuple(IDS), BASE, PLAN, sited=True)
    said = {peer: ready(dense_payloads(0), site=SITES[peer]) for peer in IDS}
    proposal = propose(FIRST, terms, tuple(IDS), said, {}, rejected={}, idle=(), before=None)
    assert proposal is not None and proposal.sites == (0, 0, 1, 1, 2) and sound(proposal, terms)
    for sites in ((), (0, 0, 1, 1), (0, 0, 1, 1, 3), (1, 1, 0, 0, 2)):
        assert not sound(proposal_with(sites=sites), terms)
    assert not sound(proposal, RoundTerms(1, 0, tuple(IDS), BASE, PLAN))


def test_blame_of_relay_costs_both_chunks_unless_leader_blames():
    proposal = proposal_with()
    for reason in ("subtotal", "subtotal missing"):
        blame_book = BlameBook()
        blame = Blame(1, 0, FIRST, FURTHER, reason)
        assert blame_book.on_message(ME, blame, proposal, lambda peers: True) and blame_book.idle == {ME, FURTHER}
        assert not blame_book.on_message(ALONE, blame, proposal, lambda peers: True), "it is known"
        assert not blame_book.on_message(ALONE, Blame(1, 0, FIRST, ALONE, reason), proposal, lambda peers: True)
        assert not blame_book.rejected
        blame_book = BlameBook()
        assert blame_book.on_message(LEADER, blame, proposal, lambda peers: True) and blame_book.idle == {FURTHER}


def test_one_peer_always_keeps_working():
    proposal = proposal_with(idle=(FAR, FURTHER, ALONE))
    blame_book = BlameBook(proposal.idle)
    assert blame_book.on_message(ME, Blame(1, 0, FIRST, LEADER, "subtotal"), proposal, lambda peers: True)
    assert blame_book.idle == {ME, FAR, FURTHER, ALONE}
