"""The relay plan: as fast as uplinks allow, equal on every peer, and bounded against liars."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import sound
from thinwire.collectives.topology.bandwidth_shares import MOST, PeerLoad
from thinwire.collectives.topology.relay_plan import (
    FASTEST,
    MEDIAN,
    PARTS,
    RelayPlan,
    deal,
    quotas,
    seconds,
    shares,
    stand_in,
    turns,
)
from thinwire.swarm.messages.registry import Ballot, Contribution, Proposal

IDS = tuple(bytes([i]) * 32 for i in range(8))
WEAK = IDS[2]


def level(uplinks):
    """The least time by water-filling, in payloads per byte/s."""
    return max(1 / min(uplinks), len(uplinks) * (len(uplinks) - 1) / sum(uplinks))


@given(st.lists(st.integers(80, 320), min_size=3, max_size=12))
def test_relay_plan_uses_the_sum_of_uplinks(uplinks):
    everyone = [True] * len(uplinks)
    took = seconds(uplinks, everyone, deal(uplinks, everyone, everyone))
    one = (len(uplinks) - 2) / PARTS / min(uplinks)
    assert max(took) <= level(uplinks) + one


@given(st.lists(st.tuples(st.integers(1, FASTEST), st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_relay_plan_is_never_slower_than_direct_and_bounded(peers):
    uplinks, gives, helps = zip(*peers, strict=True)
    given_ = deal(uplinks, gives, helps)
    directly = [(len(peers) - 1) * one / uplink for uplink, one in zip(uplinks, gives, strict=True)]
    assert max(seconds(uplinks, gives, given_)) <= max(directly) * (1 + 1e-12)
    for source, found in enumerate(given_):
        assert sum(found.values()) <= PARTS * gives[source] and source not in found
        assert all(helps[helper] and not given_[helper] for helper in found)
    for helper in range(len(peers)):
        assert sum(found.get(helper, 0) for found in given_) <= MOST * PARTS


def test_weak_peer_of_eight_sends_each_piece_once():
    uplinks = [1000] * 7 + [100]
    given_ = deal(uplinks, [True] * 8, [True] * 8)
    assert sum(given_[7].values()) == PARTS and len(given_[7]) == 7 and not any(given_[:7])
    assert max(seconds(uplinks, [True] * 8, given_)) == pytest.approx(1 / 100) == level(uplinks)


def test_open_has_uplinks_only_where_relaying_helps():
    alike = [PeerLoad(1000, 1000)] * 4
    assert shares(alike) == shares([PeerLoad(0, 0)] * 4) == shares([PeerLoad(10, 10), PeerLoad(1000, 1000)]) == ()
    assert shares([*alike, PeerLoad(900, 1000)]) == ()
    assert shares([*alike, PeerLoad(100, 1000), PeerLoad(2**40, 2**40)]) == (MEDIAN,) * 4 + (26, FASTEST)
    assert shares([*(PeerLoad(1000, 1000, owns=False) for _ in range(4)), PeerLoad(100, 1000)]) == (), "nobody may help"


def proposal_of(**changes):
    given_ = dict(
        round=1,
        fragment=0,
        ballot=Ballot(1, IDS[0]),
        group=IDS,
        alive=IDS,
        contributors=tuple(Contribution(peer, 1, 10) for peer in IDS),
        excluded=(),
        adopted=None,
        sources=(),
        electorate=RoundTerms(1, 0, IDS, bytes(32), bytes(32)).electorate,
        shares=tuple(26 if peer == WEAK else MEDIAN for peer in IDS),
    )
    return Proposal(**(given_ | changes))


def test_open_shares_must_cover_group_and_need_relaying():
    terms = RoundTerms(1, 0, IDS, bytes(32), bytes(32), relays=True)
    assert sound(proposal_of(), terms) and sound(proposal_of(shares=()), terms)
    assert not sound(proposal_of(shares=(1,) * 7), terms) and not sound(proposal_of(shares=(0,) * 8), terms)
    assert not sound(proposal_of(), RoundTerms(1, 0, IDS, bytes(32), bytes(32)))


def test_idle_or_gone_peer_relays_nothing():
    found = quotas(proposal_of(idle=(IDS[0],), alive=IDS[:7]))
    assert set(found) == {WEAK} and {helper for helper, _ in found[WEAK]} == set(IDS[1:7]) - {WEAK}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 64))
def test_relay_turns_follow_quota_at_every_point(parts, count):
    quota = tuple(zip(IDS, parts, strict=False))
    found = turns(quota, count)
    for helper, part in quota:
        for upto in range(1, count + 1):
            assert abs(found[:upto].count(helper) - part * upto / PARTS) < len(quota) + 1


def test_piece_stays_with_its_relay_while_possible():
    mine = RelayPlan(WEAK)
    mine.open(proposal_of(), changed=True)
    first = [mine.relay(index, 16, set(IDS)) for index in range(16)]
    assert set(first) == set(IDS) - {WEAK}
    lost = first[0]
    mine.open(proposal_of(alive=tuple(p for p in IDS if p != lost), ballot=Ballot(2, IDS[0])), changed=False)
    second = [mine.relay(index, 16, set(IDS) - {lost}) for index in range(16)]
    assert all(after == before for before, after in zip(first, second, strict=True) if before != lost)
    assert lost not in second


def test_relays_of_earlier_ballot_are_kept():
    key, others = (WEAK, 1), [peer for peer in IDS if peer != WEAK]
    helping = RelayPlan(others[0])
    helping.open(proposal_of(), changed=True)
    index = next(i for i in range(16) if helping.helper(WEAK, i, 16) == others[0])
    helping.open(proposal_of(shares=(), ballot=Ballot(2, IDS[0])), changed=False)
    assert helping.charge(key, index, 16) and not helping.charge((IDS[5], 1), index, 16)
    assert set(helping.receivers(key, index, IDS)) == set(others[1:]) and not helping.receivers(key, index, IDS)
    helping.on_link_down(others[3])
    assert helping.receivers(key, index, IDS) == [others[3]]


def test_substitute_relays_are_able_and_vary():
    found = {stand_in(proposal_of(idle=(IDS[1],)), WEAK, IDS[0], slot) for slot in range(20)}
    assert found == set(IDS) - {WEAK, IDS[0], IDS[1]}
    assert stand_in(proposal_of(alive=(IDS[0], WEAK)), WEAK, IDS[0], 3) is None


def test_relay_failed_when_piece_came_from_another():
    mine = RelayPlan(IDS[1])
    assert mine.note_late(5, IDS[0], linked=True) and not mine.note_late(5, IDS[0], linked=True)
    assert not mine.note_arrival(4, WEAK) and not mine.note_arrival(5, IDS[0]) and not mine.failed
    assert mine.note_arrival(5, WEAK) and mine.failed == {IDS[0]}


def test_relay_failed_after_requests_of_two_peers():
    mine = RelayPlan(WEAK)
    mine.open(proposal_of(), changed=True)
    helper = mine.relay(0, 16, set(IDS))
    one, two = [peer for peer in IDS if peer not in (WEAK, helper)][:2]
    mine.note_request(one, [0])
    mine.note_request(one, [0])
    mine.note_request(helper, [0])
    assert not mine.failed
    mine.note_request(two, [0])
    assert mine.failed == {helper}
