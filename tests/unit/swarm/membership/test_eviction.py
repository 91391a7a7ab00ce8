"""Places in the table of members, above all those of peers on trial, and tokens that spare the trial."""

from __future__ import annotations

import random

import pytest
from kit.roster_world import EPOCH, IDENTITIES, RUN
from thinwire.swarm.identity.admission_token import AdmissionPolicy, Inviter, token_of
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite, Seed
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership import eviction, gossip_items
from thinwire.swarm.membership.presets import WAN
from thinwire.swarm.membership.swim import Roster
from thinwire.swarm.messages.registry import MAX_ENDORSED, Gossip

AUTHOR, ME = IDENTITIES[:2]
POLICY = AdmissionPolicy(RUN, AUTHOR.public_key, 0, 8, 4)
STRANGERS = [Identity.generate((1000 + number).to_bytes(32, "big")) for number in range(MAX_ENDORSED + 8)]
PLAIN = Invite(RUN, (Seed("192.0.2.1:7000", b"k" * 32),))


def record(identity, address="", token=b"", sequence=1):
    addresses = (address,) if address else ()
    return PeerRecord.create(identity, run_id=RUN, addresses=addresses, sequence=sequence, issued=EPOCH, token=token)


def roster_of(policy=POLICY, seed=1):
    roster = Roster(ME, record(ME), run_id=RUN, preset=WAN, rng=random.Random(seed), now=0.0, wall=lambda: EPOCH)
    roster.set_policy(policy)
    return roster


def knock(roster, identity, source="", *, now=0.0, **shown):
    """Let a peer visit our gate."""
    roster.learn(record(identity, **shown), now, authenticated=True, source=source)


def enter(roster, identity, source="", **shown):
    """Let a peer visit our gate and connect."""
    knock(roster, identity, source, **shown)
    roster.on_link_up(identity.peer_id)


def departure(identity, sequence):
    return gossip_items.sign(gossip_items.Departure(identity.peer_id, sequence), identity, RUN)


def vouched(identity):
    return token_of(Inviter(AUTHOR, b"", POLICY).invite(PLAIN, identity.peer_id), identity)


@pytest.mark.parametrize("source", ["198.51.100.{}", "2001:db8:1::{}"])
def test_one_network_has_few_places_for_peers_on_trial_and_all_for_others(source):
    roster = roster_of()
    for number, identity in enumerate(STRANGERS[:8], 1):
        enter(roster, identity, source.format(number))
    assert len(roster.peers.others) == POLICY.per_network
    knock(roster, STRANGERS[8], "203.0.113.1")
    knock(roster, STRANGERS[9], source.format(9), token=vouched(STRANGERS[9]))
    assert roster.peers.is_live(STRANGERS[8].peer_id) and roster.peers.is_live(STRANGERS[9].peer_id)
    assert roster.on_trial(STRANGERS[8].peer_id) and not roster.on_trial(STRANGERS[9].peer_id)


def test_network_of_a_peer_is_the_one_from_which_it_has_come():
    """Homes have the same private addresses, and a peer writes into its record what it likes."""
    roster = roster_of()
    for identity in STRANGERS[:8]:
        roster.learn(record(identity, "192.168.0.5:7000"), 0.0)
    assert len(roster.peers.others) == POLICY.per_network, "others may report any key"
    for number, identity in enumerate(STRANGERS[:8]):  # of eight homes
        enter(roster, identity, f"198.51.{number}.5", address="192.168.0.5:7000")
    assert len(roster.peers.others) == 8
    for number, identity in enumerate(STRANGERS[8:20]):  # of one network; some are reported by others before they come
        claimed = f"8.8.{number}.5:7000"
        if number % 2:
            roster.learn(record(identity, claimed), 0.0)
        enter(roster, identity, f"1.2.3.{number}", address=claimed)
    assert len(roster.peers.others) == 8 + POLICY.per_network
    for identity in STRANGERS[20:28]:  # over a relay: there is no source
        enter(roster, identity, address="192.168.0.5:7000")
    assert len(roster.peers.others) == 16 + POLICY.per_network


def test_visitors_through_a_proxy_of_ours_count_for_the_networks_in_their_records():
    """A container with forwarded ports sees one private source."""
    roster = roster_of()
    for number, identity in enumerate(STRANGERS[:8]):
        enter(roster, identity, "172.17.0.1", address=f"8.8.{number}.5:7000")
    assert len(roster.peers.others) == 8
    for identity in STRANGERS[8:16]:
        enter(roster, identity, "172.17.0.1", address="192.168.0.5:7000")
    assert len(roster.peers.others) == 8 + POLICY.per_network


def test_a_quarter_of_the_largest_group_is_on_trial_and_departed_ones_free_their_places():
    roster = roster_of(AdmissionPolicy(RUN, AUTHOR.public_key, 0, 8, 0))
    for identity in STRANGERS:
        enter(roster, identity)
    assert len(roster.peers.others) == MAX_ENDORSED
    roster.protect({STRANGERS[0].peer_id, STRANGERS[1].peer_id})  # They have become members.
    for identity in STRANGERS[-4:]:
        roster.learn(record(identity), 1.0, authenticated=True)
    assert len(roster.peers.others) == MAX_ENDORSED + 2


@pytest.mark.parametrize(("per_network", "places"), [(0, MAX_ENDORSED), (4, 4)])
def test_peers_that_only_knock_give_their_places_to_one_that_connects(per_network, places):
    """Keys and claimed addresses are free: a flood of them must not keep out a peer that takes part."""
    roster = roster_of(AdmissionPolicy(RUN, AUTHOR.public_key, 0, 8, per_network))
    honest, *flood = STRANGERS
    for number, identity in enumerate(flood):
        knock(roster, identity, f"203.0.113.{number}")
    assert len(roster.peers.others) == places
    enter(roster, honest, "203.0.113.200")
    for number, identity in enumerate(flood):
        knock(roster, identity, f"203.0.113.{number}", now=1.0, sequence=2)
    assert roster.peers.is_live(honest.peer_id) and len(roster.peers.others) == places


def test_peer_on_trial_that_others_tell_of_displaces_none():
    roster = roster_of(AdmissionPolicy(RUN, AUTHOR.public_key, 0, 8, 0))
    for identity in STRANGERS[:MAX_ENDORSED]:
        roster.learn(record(identity), 0.0, authenticated=True)
    roster.learn(record(STRANGERS[-1]), 1.0)
    assert not roster.peers.is_live(STRANGERS[-1].peer_id)
    roster.learn(record(STRANGERS[-2]), 1.0, authenticated=True)  # one of the flood leaves
    assert len(roster.peers.others) == MAX_ENDORSED and roster.peers.is_live(STRANGERS[-2].peer_id)


def test_newcomer_outlasts_a_flood_of_knocks_with_the_probability_of_a_random_choice():
    """After four knocks for four places the oldest newcomer would be gone; a random choice keeps (1 - 1/4)⁴ = 0.32."""
    kept = 0
    for seed in range(100):
        roster = roster_of(seed=seed)
        honest, *flood = STRANGERS[: 2 * POLICY.per_network]
        for number, identity in enumerate((*flood[:3], honest, *flood[3:])):
            knock(roster, identity, f"203.0.113.{number}")
        kept += roster.peers.is_live(honest.peer_id)
    assert 18 <= kept <= 46  # three standard deviations


def test_newcomer_takes_the_place_of_one_that_has_failed_which_takes_none():
    """Otherwise liars with links would keep out all newcomers for ever."""
    roster = roster_of(AdmissionPolicy(RUN, AUTHOR.public_key, 0, 8, 0))
    liars, honest = STRANGERS[:MAX_ENDORSED], STRANGERS[-1]
    for identity in liars:
        enter(roster, identity)
    roster.protect((), [identity.peer_id for identity in liars])
    roster.events.clear()
    roster.learn(record(honest), 1.0)
    assert not roster.events, "others may tell of any key"
    enter(roster, honest)
    assert roster.peers.is_live(honest.peer_id) and len(roster.peers.others) == MAX_ENDORSED
    kinds = {event.kind: (event.peer, event.detail) for event in roster.events}
    gone, detail = kinds["dead"]
    assert gone in {identity.peer_id for identity in liars} and detail == "forgotten: it has failed on trial"
    roster.events.clear()
    roster.learn(record(next(one for one in liars if one.peer_id == gone), sequence=2), 2.0, authenticated=True)
    assert not roster.events and roster.peers.is_live(honest.peer_id)


def test_peers_on_trial_that_come_back_need_a_place():
    """Otherwise a network could have any number of keys: by departures, and returns that others report."""
    roster = roster_of()
    for number, identity in enumerate(STRANGERS[:12]):
        enter(roster, identity, f"203.0.113.{number}")
        roster.handle(identity.peer_id, Gossip((departure(identity, 1),)), 1.0)
    assert not roster.peers.others
    for number, identity in enumerate(STRANGERS[:12]):
        if number % 3 == 1:
            roster.learn(record(identity, sequence=2), 2.0)
        if number % 3 == 2:  # over its own link, with another network in the record
            again = record(identity, f"8.8.{number}.5:7000", sequence=2)
            roster.handle(identity.peer_id, Gossip((again.item,)), 2.0)
        enter(roster, identity, f"203.0.113.{number}", sequence=3)
    assert len(roster.peers.others) == POLICY.per_network
    assert sum(roster.peers.record_of(one.peer_id) is not None for one in STRANGERS[:12]) == POLICY.per_network


def test_link_of_a_peer_that_comes_back_over_it_counts():
    roster = roster_of()
    back, *others = STRANGERS[:5]
    for number, identity in enumerate((back, *others[:3])):
        enter(roster, identity, f"203.0.113.{number}")
    roster.handle(back.peer_id, Gossip((departure(back, 1),)), 1.0)
    roster.handle(back.peer_id, Gossip((record(back, sequence=2).item,)), 2.0)
    knock(roster, others[3], "203.0.113.9")
    assert roster.peers.is_live(back.peer_id) and not roster.peers.is_live(others[3].peer_id)


def test_newcomers_never_take_the_place_of_a_member_that_is_only_told_of(monkeypatch):
    monkeypatch.setattr(eviction, "MAX_PEERS", 4)
    roster = roster_of()
    member, *others = STRANGERS[:12]
    roster.learn(record(member), 0.0)
    roster.protect({member.peer_id})
    for number, identity in enumerate(others):
        knock(roster, identity, f"198.51.{number}.1", now=1.0)
    assert roster.peers.is_live(member.peer_id) and len(roster.peers.others) == 4


def test_only_invites_of_the_author_for_a_key_spare_the_trial():
    inviter = Inviter(AUTHOR, b"", POLICY)
    assert inviter.invite(PLAIN) == PLAIN and not inviter.invite(PLAIN).secret
    assert not POLICY.on_trial(vouched(ME), ME.peer_id) and not POLICY.on_trial(b"", AUTHOR.peer_id)
    assert POLICY.on_trial(b"", ME.peer_id) and POLICY.on_trial(vouched(ME), STRANGERS[0].peer_id)
    assert Inviter(ME, vouched(ME), POLICY).invite(PLAIN, STRANGERS[0].peer_id) == PLAIN
    assert not AdmissionPolicy(RUN, AUTHOR.public_key).on_trial(b"", ME.peer_id)
