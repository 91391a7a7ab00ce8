"""Admission of records to the roster, and revocations."""

from __future__ import annotations

import random

import msgspec
import pytest
from kit.roster_world import EPOCH, IDENTITIES, RUN, record
from thinwire.swarm.frame import sign_message
from thinwire.swarm.identity.admission_token import AdmissionPolicy, Inviter, revoke, token_of
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite, Seed
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership import eviction, exclusions, gossip_items
from thinwire.swarm.membership.presets import WAN
from thinwire.swarm.membership.swim import Roster
from thinwire.swarm.messages.registry import LIFE, Ballot, Evidence, Gossip, PushPull, Vote

AUTHOR, ME, OTHER, NEW = IDENTITIES[:4]
POLICY = AdmissionPolicy(RUN, AUTHOR.public_key, 4)
INVITE = Inviter(AUTHOR, b"", POLICY).invite(Invite(RUN, (Seed("192.0.2.1:7000", b"k" * 32),)))


def admitted(identity, sequence=1):
    token = token_of(INVITE, identity)
    return PeerRecord.create(identity, run_id=RUN, addresses=(), sequence=sequence, issued=EPOCH, token=token)


def roster_of(policy=POLICY):
    roster = Roster(ME, admitted(ME), run_id=RUN, preset=WAN, rng=random.Random(1), now=0.0, wall=lambda: EPOCH)
    roster.set_policy(policy)
    roster.learn(admitted(OTHER), 0.0)
    roster.events.clear()
    return roster


def tell(roster, *items, now=1.0, sender=OTHER):
    return roster.handle(sender.peer_id, Gossip(items), now)


def test_records_without_a_token_are_ignored_wherever_they_come_from():
    roster = roster_of()
    tell(roster, record(3).item)
    roster.learn(record(3), 1.0)
    assert not roster.peers.is_live(NEW.peer_id) and roster.refusal(record(3))
    tell(roster, record(0).item)
    assert roster.peers.is_live(AUTHOR.peer_id), "the author needs none"
    tell(roster, admitted(NEW).item)
    assert roster.peers.is_live(NEW.peer_id)


def test_nothing_is_learned_before_the_manifest_is_known():
    roster = roster_of(None)
    roster.learn(admitted(NEW), 0.0)
    assert not roster.peers.others and roster.refusal(admitted(NEW))


def test_roster_has_the_tokens_of_known_peers_and_judges_those_of_others():
    roster = roster_of()
    assert roster.token_of(ME.peer_id) == admitted(ME).token and roster.token_of(OTHER.peer_id) == admitted(OTHER).token
    assert roster.token_of(NEW.peer_id) == b"" and not roster.is_admitted(NEW.peer_id, b"")
    token = admitted(NEW).token
    assert roster.is_admitted(NEW.peer_id, token) and not roster.is_admitted(OTHER.peer_id, token)
    assert roster.is_admitted(AUTHOR.peer_id, b"") and not roster_of(None).is_admitted(NEW.peer_id, token)
    assert roster_of(AdmissionPolicy(RUN, AUTHOR.public_key)).is_admitted(NEW.peer_id, b""), "an open run needs none"


def test_a_revocation_bans_spreads_and_lasts():
    roster = roster_of()
    tell(roster, admitted(NEW).item)
    item = gossip_items.revocation_item(revoke(AUTHOR, RUN, NEW.peer_id))
    tell(roster, item)
    assert roster.peers.banned == [NEW.peer_id] and "revoked" in roster.peers.ban_reason(NEW.peer_id)
    assert roster.ban_items == (item,) and roster.ban_item_of(NEW.peer_id) == item
    assert [event.kind for event in roster.events][-2:] == ["revoked", "banned"]
    (_, page), *_ = roster.handle(OTHER.peer_id, PushPull(False, ()), 2.0)
    assert item in page.items
    tell(roster, admitted(NEW, 9).item)
    assert not roster.peers.is_live(NEW.peer_id)
    fresh = roster_of()
    fresh.apply_ban_items(roster.ban_items, 0.0)
    tell(fresh, admitted(NEW).item)
    assert not fresh.peers.is_live(NEW.peer_id) and "revoked" in fresh.refusal(admitted(NEW))


def test_revocation_excludes_peers_that_are_not_in_the_table():
    """A member could name a key that no other peer has met, with a token of a revoked invite."""
    roster, token = roster_of(), admitted(NEW).token
    assert not roster.is_excluded(NEW.peer_id, token)
    tell(roster, gossip_items.revocation_item(revoke(AUTHOR, RUN, Identity.generate(INVITE.secret).peer_id)))
    assert roster.is_excluded(NEW.peer_id, token) and roster.is_admitted(NEW.peer_id, token)
    assert not roster.is_excluded(NEW.peer_id, b"") and not roster.is_excluded(AUTHOR.peer_id, token)
    assert roster.is_excluded(OTHER.peer_id, b""), "it is banned: it came by that invite"


@pytest.mark.parametrize("target", [AUTHOR.peer_id, Identity.generate(INVITE.secret).peer_id])
def test_no_revocation_touches_the_author_that_came_back_by_an_invite(target):
    roster = roster_of()
    tell(roster, admitted(AUTHOR).item)
    tell(roster, gossip_items.revocation_item(revoke(AUTHOR, RUN, target)))
    assert roster.peers.is_live(AUTHOR.peer_id) and not roster.refusal(admitted(AUTHOR, 2))


def test_the_revocation_of_an_invite_excludes_all_that_came_by_it():
    roster = roster_of()
    tell(roster, gossip_items.revocation_item(revoke(AUTHOR, RUN, Identity.generate(INVITE.secret).peer_id[:8])))
    assert roster.peers.banned == [OTHER.peer_id]
    assert [event.peer for event in roster.events if event.kind == "banned"] == [ME.peer_id, OTHER.peer_id]


@pytest.mark.parametrize("signer", [OTHER, NEW])
def test_revocations_of_others_are_ignored(signer):
    roster = roster_of()
    tell(roster, gossip_items.revocation_item(revoke(signer, RUN, AUTHOR.peer_id)))
    tell(roster, b"\x06", b"\x06" + bytes(72))
    assert not roster.peers.banned and not roster.ban_items


def test_an_open_run_can_revoke_too():
    roster = roster_of(AdmissionPolicy(RUN, AUTHOR.public_key))
    tell(roster, record(3).item)
    assert roster.peers.is_live(NEW.peer_id)
    tell(roster, gossip_items.revocation_item(revoke(AUTHOR, RUN, NEW.peer_id)))
    assert not roster.peers.is_live(NEW.peer_id)


def test_a_full_table_gives_way_to_peers_that_come_in_person_and_keeps_those(monkeypatch):
    monkeypatch.setattr(eviction, "MAX_PEERS", 6)
    roster = roster_of(AdmissionPolicy(RUN, AUTHOR.public_key))
    strangers = [Identity.generate(bytes([100 + number]) * 32) for number in range(12)]
    tell(roster, *(admitted(stranger).item for stranger in strangers[:6]))
    assert roster.peers.is_live(OTHER.peer_id) and len(roster.peers.states()) == 6
    roster.learn(admitted(NEW), 2.0)
    assert not roster.peers.is_live(NEW.peer_id), "told peers push nobody out"
    for identity in (NEW, *strangers[6:]):
        roster.learn(admitted(identity), 2.0, authenticated=True)
    assert roster.peers.is_live(OTHER.peer_id) and roster.peers.is_live(NEW.peer_id) and len(roster.peers.states()) == 6
    assert set(roster.peers.others) == {OTHER.peer_id, NEW.peer_id, *(one.peer_id for one in strangers[6:10])}
    assert set(roster.peers.view.peers) == {ME.peer_id, *roster.peers.others}


def test_full_table_of_banned_peers_gives_way_to_newcomers(monkeypatch):
    """Each key that visits a gate twice, with two records of one sequence, is banned by a proof: keys are free."""
    monkeypatch.setattr(eviction, "MAX_PEERS", 6)
    roster = roster_of(AdmissionPolicy(RUN, AUTHOR.public_key))
    roster.protect({OTHER.peer_id})
    for number in range(12):
        stranger = Identity.generate(bytes([100 + number]) * 32)
        for name in ("", "x"):
            shown = PeerRecord.create(stranger, run_id=RUN, addresses=(), sequence=1, issued=EPOCH, name=name)
            roster.learn(shown, 2.0, authenticated=True)
    assert len(roster.peers.banned) == 5 and len(roster.peers.states()) == 6
    for most in (0, 2, 9):  # a status does not list all
        assert len(roster.peers.states(absent=most)) == 1 + min(most, 5)
    roster.learn(admitted(NEW), 3.0, authenticated=True)
    assert roster.peers.is_live(NEW.peer_id) and roster.peers.is_live(OTHER.peer_id)
    items = {roster.peers.record_of(peer).item for peer in roster.peers.states()}
    assert len(roster.peers.known_items - items) == len(roster.peers.banned), "what is forgotten takes no memory"


def test_proofs_that_change_nothing_cost_no_checks():
    """Otherwise a table full of banned keys would leave no checks for revocations and evidence."""
    teller, roster = (roster_of(AdmissionPolicy(RUN, AUTHOR.public_key)) for _ in range(2))
    for number in range(300):
        stranger = Identity.generate((1000 + number).to_bytes(32, "big"))
        one, two, three, four = (
            PeerRecord.create(stranger, run_id=RUN, addresses=(), sequence=1, issued=EPOCH, name=name)
            for name in "abcd"
        )
        unknown, other = gossip_items.proof_item(one, two), gossip_items.proof_item(three, four)
        tell(roster, unknown)
        for shown in (one, two):
            teller.learn(shown, float(number), authenticated=True)
        tell(teller, other, now=300.0)
    for each in (roster, teller):
        tell(each, gossip_items.revocation_item(revoke(AUTHOR, RUN, OTHER.peer_id)), now=300.0)
        assert OTHER.peer_id in each.peers.banned
    assert len(teller.peers.banned) == 301 and len(roster.peers.banned) == 1
    items = [item for _, page in teller.handle(NEW.peer_id, PushPull(False, ()), 9000.0) for item in page.items]
    proofs = [item for item in items if gossip_items.is_proof(item)]
    assert len(proofs) == 64 and {teller.peers.entries[gossip_items.accused(one)].since for one in proofs} == {
        float(number) for number in range(236, 300)
    }


def test_evidence_against_members_takes_the_place_of_that_against_other_known_peers(monkeypatch):
    monkeypatch.setattr(exclusions, "MAX_BAN_ITEMS", 3)
    roster = roster_of(AdmissionPolicy(RUN, AUTHOR.public_key))
    roster.protect({OTHER.peer_id})
    strangers = [Identity.generate(bytes([n]) * 32) for n in range(90, 94)]
    for one in strangers:
        roster.learn(admitted(one), 1.0, authenticated=True)
    roster.apply_ban_items(tuple(map(evidence_against, (*strangers, OTHER))), 2.0)
    assert len(roster.ban_items) == 3 and OTHER.peer_id in roster.peers.banned
    assert strangers[3].peer_id not in roster.peers.banned, "there is no room for evidence against it"


def test_evidence_against_unknown_peers_gives_way_to_that_against_known_ones(monkeypatch):
    monkeypatch.setattr(exclusions, "MAX_BAN_ITEMS", 3)
    roster = roster_of()
    roster.apply_ban_items(
        tuple(map(evidence_against, (AUTHOR, *(Identity.generate(bytes([n]) * 32) for n in range(90, 93))))), 1.0
    )
    assert len(roster.ban_items) == 3 and not roster.peers.banned
    roster.apply_ban_items((evidence_against(OTHER),), 1.0)
    assert len(roster.ban_items) == 3 and roster.peers.banned == [OTHER.peer_id]


def evidence_against(identity):
    one = Vote(7, 0, Ballot(1, identity.peer_id), b"o" * 32, b"a" * 32, b"l" * LIFE)
    votes = one, msgspec.structs.replace(one, digest=b"b" * 32)
    signatures = tuple(sign_message(vote, b"", identity, RUN) for vote in votes)
    return gossip_items.evidence_item(Evidence(identity.public_key, *votes, signatures))
