"""Audits of one peer, without a network: choice of chunks, requests, verdicts and their limits."""

from __future__ import annotations

from types import SimpleNamespace

import blake3
import numpy as np
import pytest
from kit.rounds.round_harness import CODEC, GRID, FakeSendQueue, dense_payloads, hashes_of, mean
from thinwire.collectives.aggregation.rule_factory import RULES
from thinwire.collectives.consensus.chain import founded
from thinwire.collectives.rounds.data_planes.butterfly import Butterfly
from thinwire.collectives.rounds.data_planes.owner_results import AuditData, Reducer
from thinwire.collectives.topology.peer_backoff import PeerBackoff
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.node.outer.verification.own_contributions import name_of
from thinwire.node.outer.verification.owner_audits import REFUTED, Audits
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.lineage import lineage_of
from thinwire.swarm.manifest.parser import parse
from thinwire.swarm.membership import gossip_items
from thinwire.swarm.messages.registry import Chunk, Contribution, Fetch, Fork, Verdict

KEYS = {one.peer_id: one for one in (Identity.generate(bytes([number]) * 32) for number in range(5))}
ME, ANN, BEN, CAT, DAN = KEYS
RUN = b"r" * 32
CHAIN = founded((), Fork(0, bytes(32), (), (ANN,), bytes(16), ()))
LINEAGE = lineage_of(CHAIN)
SOURCES = {peer: dense_payloads(seed) for seed, peer in enumerate(KEYS)}


class Exchange(Butterfly):
    """Data plane of a round that is over."""

    def __init__(self, audit_data):
        self.audit_data, self.refused = audit_data, {}


class Scene:
    """Audits of peer ME. ANN owns all chunks of each round and falsifies those in `false`."""

    def __init__(self, audit="1.0", false=(), members=tuple(KEYS)):
        self.queue, self.events, self.expelled, self.false = FakeSendQueue(), [], [], false
        self.lifted = []
        self.members, self.backoff = members, PeerBackoff()
        self.roster = SimpleNamespace(peers=SimpleNamespace(banned=[]), ban_items=())
        self.live = set(KEYS) - {ME}
        presence = SimpleNamespace(
            roster=self.roster, send_queue=self.queue, live=self.live, expel=self.expel, lift_verdict=self.lifted.append
        )
        self.replica = SimpleNamespace(members=members, chain=CHAIN, lineage=LINEAGE, round=1)
        self.audits = Audits(
            KEYS[ME],
            parse(f"[exchange]\ncodec = 'fp32'\naudit = {audit}"),
            RUN,
            replica=self.replica,
            presence=presence,
            own_contributions=SimpleNamespace(of=lambda round: SOURCES[ME]),
            fragment=0,
            backoff=self.backoff,
            emit=lambda name, fields: self.events.append(name),
        )

    def expel(self, verdict, lineage, round):
        self.expelled.append(verdict)
        self.roster.ban_items = (*self.roster.ban_items, gossip_items.verdict_item(verdict, lineage, round))

    def round(self, number, digest=None, *, doubted=False):
        """End a round. doubted: only members that may lie had reported votes for its results."""
        contributors = tuple(Contribution(peer, 1, 10) for peer in KEYS)
        claims = {}
        for index in range(len(GRID)):
            right = mean([SOURCES[peer][index] for peer in KEYS], [10.0] * len(KEYS))
            result = bytes(len(right)) if index in self.false else right
            claims[index] = ANN, blake3.blake3(result).digest()
        audit_data = AuditData(
            number,
            0,
            LINEAGE,
            digest or bytes([number]) * 32,
            contributors,
            {peer: hashes_of(SOURCES[peer]) for peer in KEYS},
            claims,
            Reducer(CODEC, RULES["mean"], BufferPool()),
            GRID,
        )
        terms, decision = SimpleNamespace(members=self.members), SimpleNamespace(doubted=doubted)
        agreement = SimpleNamespace(terms=terms, ready={}, decision=decision)
        self.audits.begin(SimpleNamespace(round=number, data_plane=Exchange(audit_data), agreement=agreement))

    def fetched(self):
        """Return the requests since the last call: (peer, message)."""
        return [(peer, message) for peer, message, _ in self.queue.of(Fetch)]

    def chunk(self, sender, index, payload, number=1):
        return self.audits.takes(sender, Frame(Chunk(number, 0, 1, index), payload))

    def serve(self, index, number=1, but=(), sender=None):
        for peer in set(KEYS) - {*but}:
            self.chunk(sender or peer, index, SOURCES[peer][index], number)

    def accuse(self, sender, index, number=1, owner=ANN):
        self.audits.takes(sender, Frame(Verdict(number, 0, index, owner, LINEAGE)))


def test_auditor_asks_each_contributor_for_one_chunk_and_accuses_the_owner_of_a_false_result():
    scene = Scene(false=range(6))
    scene.round(1)
    asked = scene.fetched()
    assert {peer for peer, _ in asked} == set(KEYS) - {ME}
    (index,) = {message.indices[0] for _, message in asked}
    assert all(message.digest == name_of(hashes_of(SOURCES[peer])) for peer, message in asked)
    scene.serve(index)
    told = scene.queue.of(Verdict)
    assert {peer for peer, _, _ in told} == set(KEYS) - {ME}
    assert {message for _, message, _ in told} == {Verdict(1, 0, index, ANN, LINEAGE)}
    assert scene.expelled == []  # one verdict of five


def test_doubted_results_are_audited_more_often():
    """Of five members three audit on average, whatever the probability of usual audits is."""
    audited = {False: 0, True: 0}
    for doubted in audited:
        for number in range(1, 101):
            scene = Scene(audit="0.01")
            scene.round(number, doubted=doubted)
            audited[doubted] += bool(scene.fetched())
    assert audited[False] <= 10 and 45 <= audited[True] <= 75


def test_right_result_is_not_accused():
    scene = Scene()
    scene.round(1)
    scene.serve(scene.fetched()[0][1].indices[0])
    assert scene.events == ["audited"] and scene.queue.of(Verdict) == []


def test_probability_and_chunks_are_as_the_manifest_says_and_cannot_be_foreseen_from_the_digest():
    chosen = []
    for number in range(1, 1001):
        scene = Scene("0.25")
        scene.round(number, blake3.blake3(number.to_bytes(4)).digest())
        asked = scene.fetched()
        chosen.append(asked[0][1].indices[0] if asked else -1)
    count = np.bincount(np.array(chosen) + 1, minlength=7)
    assert 680 < count[0] < 820 and count[1:].min() > 15
    again = Scene("0.25")
    again.round(1, blake3.blake3((1).to_bytes(4)).digest())
    assert [message.indices[0] for _, message in again.fetched()][:1] == [one for one in chosen[:1] if one >= 0]


def test_without_audits_all_is_ignored():
    scene = Scene("0.0")
    scene.round(1)
    scene.accuse(BEN, 2)
    assert scene.queue.sent == [] and scene.expelled == []


def test_chunks_with_other_hashes_are_not_taken():
    scene = Scene()
    scene.round(1)
    index = scene.fetched()[0][1].indices[0]
    assert not scene.chunk(BEN, index, bytes(4 * GRID.size(index)))
    assert not scene.chunk(BEN, index, SOURCES[BEN][index], number=2)


def test_accusation_is_examined_with_the_contributions_of_the_accuser():
    scene = Scene("0.000001", false=[2])
    scene.round(1)
    scene.accuse(BEN, 2)
    ((to, asked),) = scene.fetched()
    assert to == BEN and asked.indices == (2,)
    scene.serve(2, sender=BEN)
    assert {message for _, message, _ in scene.queue.of(Verdict)} == {Verdict(1, 0, 2, ANN, LINEAGE)}
    assert scene.expelled == []  # BEN and ME are two of five
    scene.accuse(CAT, 2)
    assert [one.owner for one in scene.expelled] == [ANN]


def test_member_that_agrees_serves_the_contributions_once_to_each():
    scene = Scene("0.000001", false=[2])
    scene.round(1)
    scene.accuse(BEN, 2)
    ((_, asked),) = scene.fetched()
    scene.serve(2, sender=BEN)
    for _ in range(2):
        assert scene.audits.takes(CAT, Frame(asked))
    served = [(to, payload) for to, _, payload in scene.queue.of(Chunk)]
    assert served == [(CAT, SOURCES[peer][2]) for peer in KEYS]


def test_quorum_of_verdicts_excludes_without_an_examination_and_is_passed_on():
    scene = Scene("0.000001")
    for peer in (BEN, CAT, DAN):
        scene.accuse(peer, 2)
    assert [one.owner for one in scene.expelled] == [ANN]
    assert {peer for peer, _, _ in scene.queue.of(Verdict)} == set(KEYS) - {ME}


def test_two_members_exclude_no_peer():
    scene = Scene("0.000001", members=(BEN, ANN))
    scene.accuse(BEN, 2)
    assert scene.expelled == []


def test_strangers_have_no_say():
    scene = Scene("0.000001", members=(ME, ANN, BEN))
    scene.round(1)
    for peer in (CAT, DAN):
        scene.accuse(peer, 2)
    assert scene.fetched() == [] and scene.expelled == []


def test_refuted_accuser_is_followed_a_few_times_only():
    scene = Scene("0.000001")
    for number in range(1, REFUTED + 3):
        scene.round(number)
        scene.accuse(BEN, 2, number)
        assert bool(scene.fetched()) is (number <= REFUTED)
        scene.serve(2, number, sender=BEN)
    assert scene.events.count("audit_refuted") == REFUTED and scene.queue.of(Verdict) == []


@pytest.mark.parametrize(
    ("index", "number", "owner"), [(2, 9, ANN), (2, 1, CAT), (2, 1, ME), (2, 1, BEN), (99, 1, ANN)]
)
def test_accusation_of_another_result_than_the_owner_has_signed_is_not_examined(index, number, owner):
    scene = Scene("0.000001")
    scene.round(1)
    scene.accuse(BEN, index, number, owner)
    assert scene.fetched() == []


def test_refusing_contributor_loses_ownership_and_the_owner_is_audited_again():
    scene = Scene("0.000001")
    scene.round(1)
    assert scene.fetched() == []
    certain = Scene("1.0")
    certain.round(1)
    certain.serve(certain.fetched()[0][1].indices[0], but=[DAN])
    certain.round(2)
    assert certain.backoff.resting(3) == {DAN} and certain.events == ["unaudited"]


def test_new_link_is_told_of_excluded_owners():
    scene = Scene()
    verdict = Verdict(1, 0, 2, ANN, LINEAGE)
    scene.roster.ban_items = (gossip_items.verdict_item(verdict, LINEAGE, 1),)
    scene.audits.on_link_up(DAN)
    assert [(to, message) for to, message, _ in scene.queue.of(Verdict)] == [(DAN, verdict)]


def test_verdicts_of_another_lineage_exclude_no_peer():
    scene = Scene()
    scene.round(1)
    for sender in (BEN, CAT, DAN):
        scene.audits.takes(sender, Frame(Verdict(1, 0, 2, ANN, b"other lineage 16")))
    assert scene.expelled == []


def test_verdict_ends_with_the_rounds_of_its_quorum():
    """Not with those of the false result: the quorum of a lost lineage may have named a result of the common history."""

    def bans(fragment, lineage, round, owner=ANN):
        return gossip_items.verdict_item(Verdict(1, fragment, 2, owner, LINEAGE), lineage, round)

    scene = Scene()
    lost = founded(CHAIN, Fork(5, bytes(32), (ANN,), (BEN,), bytes(16), ()))
    kept = [bans(0, LINEAGE, 5), bans(0, LINEAGE, 9), bans(1, lineage_of(lost), 6)]
    scene.roster.ban_items = (*kept, bans(0, lineage_of(lost), 6, BEN))
    scene.audits.lift_verdicts()
    assert scene.lifted == [BEN], "of the lineage that gave way to ours"
    other = founded(CHAIN, Fork(7, bytes(32), (ANN,), (CAT,), bytes(16), ()))
    scene.replica.chain, scene.lifted[:] = other, []
    scene.roster.ban_items = (bans(0, LINEAGE, 7, CAT), bans(0, LINEAGE, 8, DAN), bans(0, lineage_of(other), 8, BEN))
    scene.audits.lift_verdicts()
    assert scene.lifted == [DAN], "after the fork of ours"
    scene.replica.chain, scene.lifted[:] = (), []
    scene.audits.lift_verdicts()
    assert scene.lifted == [], "a peer without a state knows nothing better"


def test_verdict_is_stored_with_the_lineage_and_round_of_its_quorum():
    scene = Scene()
    scene.replica.round = 3
    for sender in (BEN, CAT, DAN):
        scene.accuse(sender, 2)
    stored = gossip_items.read_stored(scene.roster.ban_items[0])
    assert (stored.verdict, stored.lineage, stored.round) == (Verdict(1, 0, 2, ANN, LINEAGE), LINEAGE, 3)


def test_half_of_the_members_exclude_no_peer():
    scene = Scene(members=(BEN, ANN, CAT, ME))
    scene.round(1)
    for sender in (BEN, CAT):
        scene.accuse(sender, 2)
    assert scene.expelled == []


def test_verdicts_of_many_strangers_are_forgotten_when_their_links_are_gone():
    scene = Scene()
    scene.round(1)
    strangers = [bytes([number, 7] * 16) for number in range(50)]
    scene.live.update(strangers)
    for sender in strangers:
        scene.accuse(sender, 2, owner=bytes(32))
    scene.live.difference_update(strangers)
    scene.accuse(strangers[0], 2, owner=bytes(32))
    scene.round(2)
    assert scene.audits.accusers <= {*KEYS}


def test_accusation_of_a_known_liar_costs_the_accuser_nothing():
    scene = Scene(false=range(len(GRID)))
    scene.round(1)
    index = scene.fetched()[0][1].indices[0]
    scene.serve(index)
    scene.accuse(BEN, index)
    for number in range(2, 8):
        scene.round(number)
    assert "audit_refuted" not in scene.events
