"""Bans by two signed statements about one ballot: evidence, its spread, and the records of banned peers."""

from __future__ import annotations

import random

import msgspec
import pytest
from kit.roster_world import EPOCH, IDENTITIES, RUN, record
from thinwire.swarm.evidence import decode, describe, encode, is_valid
from thinwire.swarm.frame import Frame, sign_message, verify_message
from thinwire.swarm.frame import encode as encode_frame
from thinwire.swarm.membership import gossip_items
from thinwire.swarm.membership.presets import WAN
from thinwire.swarm.membership.swim import Roster
from thinwire.swarm.messages.registry import LIFE, Announced, Ballot, Evidence, Gossip, PushPull, Ready, Verdict, Vote

LIAR, OTHER = IDENTITIES[1], IDENTITIES[2]
BALLOT = Ballot(1, LIAR.peer_id)
ONE = Vote(7, 0, BALLOT, b"o" * 32, b"a" * 32, b"l" * LIFE)
TWO = msgspec.structs.replace(ONE, digest=b"b" * 32)


def evidence(first=ONE, second=TWO, *, key=LIAR, signer=LIAR, run=RUN):
    signatures = tuple(sign_message(one, b"", signer, run) for one in (first, second))
    return Evidence(key.public_key, first, second, signatures)


ITEM = gossip_items.evidence_item(evidence())


def roster_of(index=0, others=4):
    place = IDENTITIES[index], record(index)
    roster = Roster(*place, run_id=RUN, preset=WAN, rng=random.Random(1), now=0.0, wall=lambda: EPOCH)
    for other in range(1, others + 1):
        roster.learn(record(other), 0.0)
    roster.events.clear()
    return roster


def changed(vote, **changes):
    return msgspec.structs.replace(vote, **changes)


def test_two_votes_and_two_proposals_of_a_leader_convict():
    assert is_valid(evidence(), RUN) and describe(evidence()) == "two votes in round 7"
    assert is_valid(evidence(TWO, ONE), RUN) and is_valid(evidence(second=changed(ONE, proposal_digest=b"p" * 32)), RUN)
    proposals = changed(ONE, digest=None), changed(ONE, digest=None, proposal_digest=b"p" * 32)
    assert is_valid(evidence(*proposals), RUN) and describe(evidence(*proposals)) == "two proposals in round 7"
    assert decode(encode(evidence())) == evidence()


SAID = Announced(7, 0, 9, b"l" * LIFE, b"b" * 32, b"a" * 32)


def test_two_announcements_with_one_number_in_one_life_convict():
    found = evidence(SAID, changed(SAID, digest=b"b" * 32))
    assert is_valid(found, RUN) and describe(found) == "two announcements in round 7" and decode(encode(found)) == found
    assert len(gossip_items.evidence_item(found)) < 600
    others = [{"round": 8}, {"fragment": 1}, {"attempt": 10}, {"life": b"m" * LIFE}, {"digest": SAID.digest}]
    for other in others:
        assert not is_valid(evidence(SAID, changed(SAID, **{"digest": b"b" * 32, **other})), RUN)
    unlived = changed(SAID, life=b"")
    assert not is_valid(evidence(unlived, changed(unlived, digest=b"b" * 32)), RUN), "an average has no lives"
    assert not is_valid(evidence(SAID, ONE), RUN) and not is_valid(evidence(ONE, SAID), RUN)


def test_signature_of_an_announcement_is_evidence():
    ready = Ready(7, 0, 9, b"b" * 32, b"p" * 32, 1, b"h" * 32, True, 0.0, 0.0, life=b"l" * LIFE)
    wire = encode_frame(Frame(ready), LIAR, RUN)
    assert verify_message(ready.statement(), wire[-64:], LIAR.public_key, RUN)
    other = changed(ready, hashes=b"i" * 32)
    assert not verify_message(other, wire[-64:], LIAR.public_key, RUN) and other.digest != ready.digest


@pytest.mark.parametrize(
    "found",
    [
        evidence(ONE, ONE),
        evidence(second=changed(TWO, round=8)),
        evidence(second=changed(TWO, fragment=1)),
        evidence(second=changed(TWO, ballot=Ballot(2, LIAR.peer_id))),
        evidence(second=changed(TWO, lineage=b"m" * LIFE)),
        evidence(changed(ONE, lineage=b""), changed(TWO, lineage=b"")),
        evidence(second=changed(TWO, digest=None)),
        evidence(signer=OTHER),
        evidence(key=OTHER),
        evidence(run=bytes(32)),
        evidence(
            changed(ONE, digest=None, ballot=Ballot(1, OTHER.peer_id)),
            changed(ONE, digest=None, proposal_digest=b"p" * 32, ballot=Ballot(1, OTHER.peer_id)),
        ),
    ],
)
def test_other_statements_convict_no_peer(found):
    assert not is_valid(found, RUN)
    roster = roster_of()
    roster.handle(OTHER.peer_id, Gossip((gossip_items.evidence_item(found),)), 1.0)
    assert not roster.peers.banned and not roster.events and not roster.ban_items


@pytest.mark.parametrize("item", [ITEM[:-1], ITEM + b"x", ITEM[:1], b"\x05" + bytes(100), b"\x05" + b"\x93" * 2000])
def test_malformed_evidence_is_ignored(item):
    roster = roster_of()
    roster.handle(OTHER.peer_id, Gossip((item,)), 1.0)
    assert not roster.peers.banned and not roster.ban_items


def test_evidence_bans_is_passed_on_and_outlasts_later_records():
    roster = roster_of()
    roster.handle(OTHER.peer_id, Gossip((ITEM, ITEM)), 1.0)
    assert [(event.kind, event.peer) for event in roster.events] == [("banned", LIAR.peer_id)]
    assert roster.peers.ban_reason(LIAR.peer_id) == "two votes in round 7" and LIAR.peer_id not in roster.peers.view
    sent = [item for _, message in roster.tick(1.0) for item in message.items]
    assert ITEM in sent
    roster.handle(OTHER.peer_id, Gossip((record(1, 9).item,)), 2.0)
    assert roster.peers.states()[LIAR.peer_id] == "banned"
    (_, page), *_ = roster.handle(OTHER.peer_id, PushPull(False, ()), 3.0)
    assert ITEM in page.items, "newcomers get it from the table"


def test_evidence_against_an_unknown_peer_bans_it_when_it_comes():
    roster = roster_of(others=0)
    roster.apply_ban_items((ITEM,), 0.0)
    assert not roster.peers.banned and roster.ban_items == (ITEM,) and roster.ban_item_of(LIAR.peer_id) == ITEM
    (_, page), *_ = roster.handle(OTHER.peer_id, PushPull(False, ()), 0.5)
    assert ITEM in page.items
    roster.learn(record(1), 1.0)
    assert roster.peers.banned == [LIAR.peer_id] and LIAR.peer_id not in roster.peers.view
    assert [event.kind for event in roster.events] == ["banned"]


def test_peer_learns_of_evidence_against_itself():
    roster = roster_of(1, others=0)
    roster.handle(OTHER.peer_id, Gossip((ITEM,)), 1.0)
    assert [(event.kind, event.peer, event.detail) for event in roster.events] == [
        ("banned", LIAR.peer_id, "two votes in round 7")
    ]


def test_one_piece_of_evidence_is_stored_for_each_peer():
    roster = roster_of()
    other = gossip_items.evidence_item(evidence(changed(ONE, round=8), changed(TWO, round=8)))
    roster.apply_ban_items((ITEM, other), 1.0)
    assert roster.ban_items == (ITEM,) and len(ITEM) < 600


def test_verdict_bans_lasts_and_is_not_spread():
    """Others cannot check it: each peer judges by the members that tell it."""
    roster, item = roster_of(), gossip_items.verdict_item(Verdict(7, 0, 3, LIAR.peer_id, b"l" * LIFE), b"l" * LIFE, 8)
    roster.apply_ban_items((item,), 1.0)
    assert roster.peers.banned == [LIAR.peer_id]
    assert roster.peers.ban_reason(LIAR.peer_id) == "a false result of chunk 3 in round 7"
    assert roster.ban_items == (item,) and roster.ban_item_of(LIAR.peer_id) == item
    sent = [letter for now in range(1, 100) for letter in roster.tick(float(now))]
    assert all(item not in getattr(message, "items", ()) for _, message in sent)
    again = roster_of(others=0)
    again.apply_ban_items(roster.ban_items, 0.0)
    again.learn(record(1), 1.0)
    assert again.peers.banned == [LIAR.peer_id]


def test_verdict_of_another_peer_by_gossip_bans_no_peer():
    roster, item = roster_of(), gossip_items.verdict_item(Verdict(7, 0, 3, LIAR.peer_id, b"l" * LIFE), b"l" * LIFE, 8)
    roster.handle(OTHER.peer_id, Gossip((item,)), 1.0)
    roster.handle(OTHER.peer_id, PushPull(True, (item,)), 1.0)
    assert roster.peers.banned == [] and roster.ban_items == ()


def verdict_on(identity):
    return gossip_items.verdict_item(Verdict(7, 0, 3, identity.peer_id, b"l" * LIFE), b"l" * LIFE, 8)


def test_peer_is_as_unknown_after_the_end_of_a_verdict_and_comes_back_with_its_record():
    roster = roster_of()
    roster.apply_ban_items((verdict_on(LIAR),), 1.0)
    roster.events.clear()
    roster.end_verdict(LIAR.peer_id)
    assert [(event.kind, event.peer) for event in roster.events] == [("pardoned", LIAR.peer_id)]
    assert roster.peers.banned == [] and roster.ban_items == () and roster.peers.ban_reason(LIAR.peer_id) == ""
    roster.learn(record(1), 2.0)
    assert roster.peers.is_live(LIAR.peer_id) and roster.events[-1].kind == "joined"
    roster.events.clear()
    roster.end_verdict(LIAR.peer_id)
    assert roster.peers.is_live(LIAR.peer_id) and not roster.events, "there is nothing to end"


def test_verdict_on_an_unknown_peer_ends_too():
    roster = roster_of(others=0)
    roster.apply_ban_items((verdict_on(LIAR),), 1.0)
    roster.end_verdict(LIAR.peer_id)
    roster.learn(record(1), 2.0)
    assert roster.peers.banned == [] and roster.peers.is_live(LIAR.peer_id)


@pytest.mark.parametrize("first", ["evidence", "verdict"])
def test_evidence_outlasts_a_verdict_whichever_comes_first(first):
    roster, items = roster_of(), [ITEM, verdict_on(LIAR)]
    for item in items if first == "evidence" else reversed(items):
        roster.apply_ban_items((item,), 1.0)
    assert roster.ban_items == (ITEM,)
    roster.end_verdict(LIAR.peer_id)
    assert roster.peers.banned == [LIAR.peer_id] and roster.peers.ban_reason(LIAR.peer_id) == "two votes in round 7"
    sent = [letter for now in range(1, 100) for letter in roster.tick(float(now))]
    assert any(ITEM in getattr(message, "items", ()) for _, message in sent), "others learn of it"


def test_evidence_of_other_peers_outlasts_a_verdict_of_ours():
    roster = roster_of()
    roster.apply_ban_items((verdict_on(LIAR),), 1.0)
    roster.handle(OTHER.peer_id, Gossip((ITEM,)), 2.0)
    roster.end_verdict(LIAR.peer_id)
    assert roster.peers.banned == [LIAR.peer_id] and roster.peers.ban_reason(LIAR.peer_id) == "two votes in round 7"


@pytest.mark.parametrize("first", ["proof", "verdict"])
def test_proof_of_two_records_outlasts_a_verdict_whichever_comes_first(first):
    roster, proof = roster_of(), gossip_items.proof_item(record(1), record(1, port=4001))
    steps = [
        lambda: roster.handle(OTHER.peer_id, Gossip((proof,)), 1.0),
        lambda: roster.apply_ban_items((verdict_on(LIAR),), 1.0),
    ]
    for step in steps if first == "proof" else reversed(steps):
        step()
    roster.events.clear()
    roster.end_verdict(LIAR.peer_id)
    assert roster.peers.banned == [LIAR.peer_id] and not roster.events
    roster.learn(record(1, sequence=2), 2.0)
    assert not roster.peers.is_live(LIAR.peer_id)


def test_verdict_on_oneself_is_not_stored_but_evidence_is():
    """The peer may have followed a lineage that has lost since; others repeat a verdict that still counts."""
    roster = roster_of(index=1, others=0)
    roster.apply_ban_items((verdict_on(LIAR),), 1.0)
    assert [event.kind for event in roster.events] == ["banned"] and roster.ban_items == ()
    roster.apply_ban_items((ITEM,), 1.0)
    assert roster.ban_items == (ITEM,)
