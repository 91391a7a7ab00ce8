"""Proposals of a leader: chunk shares from announced bandwidths, uplinks and sites."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from thinwire.collectives.consensus.proposal import AcceptedValue, RoundTerms, adopt, propose, sound
from thinwire.swarm.messages.registry import Ballot, Open, Ready, Span

IDS = tuple(bytes([number]) * 32 for number in range(6))
BASE, PLAN = bytes(32), bytes(32)
TERMS = RoundTerms(5, 0, IDS[:4], BASE, PLAN, chunks=60)
FIRST, SECOND = Ballot(1, IDS[0]), Ballot(2, IDS[1])


def ready(rate, weight=10):
    return Ready(5, 0, 1, BASE, PLAN, weight, b"", True, 0.0, 0.0, rate, rate)


def said(*rates):
    return {peer: ready(rate) for peer, rate in zip(IDS, rates, strict=False)}


def opened(known, *, terms=TERMS, able=None, idle=(), before=None, ballot=FIRST) -> Open:
    able = tuple(known) if able is None else able
    found = propose(ballot, terms, able, known, {}, rejected={}, idle=idle, before=before)
    assert found is not None and sound(found, terms)
    return found


def test_shares_follow_announced_bandwidths():
    assert opened(said(100, 100, 100, 10)).shares == (20, 20, 20, 0)
    assert opened(said(100, 100, 100, 0)).shares == (), "unknown counts as usual"
    assert opened(said(0, 0, 0, 0)).shares == ()
    assert opened(said(100, 100, 100, 10), terms=equal()).shares == ()


def equal():
    return RoundTerms(5, 0, IDS[:4], BASE, PLAN)


def test_idle_peer_gets_no_share():
    found = opened(said(100, 100, 100, 10), idle={IDS[1]})
    assert found.idle == (IDS[1],) and found.shares == (30, 0, 30, 0)


def test_later_ballot_keeps_shares_of_its_group():
    known = said(100, 100, 100, 10)
    before = opened(known)
    known[IDS[3]] = ready(10**9)
    later = opened(known, able=IDS[1:4], before=before, ballot=SECOND)
    assert (later.group, later.shares) == (before.group, before.shares), "only chunks of who left move"
    anew = opened(known, able=IDS[1:4], ballot=SECOND)
    assert anew.group == IDS[1:4] and anew.shares != before.shares


def test_adopted_ballot_keeps_shares_of_the_vote():
    before = opened(said(100, 100, 100, 10))
    choice = AcceptedValue(before, bytes(32), (IDS[2],))
    found = adopt(SECOND, TERMS, (IDS[1], IDS[2], IDS[4]), choice, {}, idle=())
    assert sound(found, TERMS)
    assert dict(zip(found.group, found.shares, strict=True)) == dict(zip(IDS, (20, 20, 20, 0, 0), strict=False))
    plain = adopt(SECOND, TERMS, IDS[1:3], AcceptedValue(opened(said(1, 1, 1)), bytes(32), (IDS[2],)), {}, idle=())
    assert plain.shares == () and sound(plain, TERMS)


def test_allgather_proposal_omits_uplinks_when_one_is_unknown():
    """An uplink is never 0: all peers would refuse such a ballot, and no voted results could be adopted."""
    terms = replace(TERMS, chunks=0, hands=True)
    before = opened(said(100, 100, 100, 10), terms=terms)
    assert before.shares and sound(before, terms)
    choice = AcceptedValue(before, bytes(32), (IDS[2],))
    same, wider = (adopt(SECOND, terms, able, choice, {}, idle=()) for able in (IDS[1:3], (IDS[1], IDS[2], IDS[4])))
    assert same.shares == before.shares and sound(same, terms)
    assert wider.shares == () and sound(wider, terms)


@pytest.mark.parametrize("shares", [(20, 20, 20), (20, 20, 20, 0, 0), (20, 20, 20, 1), (20, 20, 19, 0), (0, 0, 0, 0)])
def test_proposal_with_shares_that_do_not_cover_the_fragment_is_refused(shares):
    found = opened(said(100, 100, 100, 10))
    assert not sound(msgspec.structs.replace(found, shares=shares), TERMS)


def test_proposal_with_shares_is_refused_for_equal_ownership():
    found = opened(said(100, 100, 100, 10))
    assert not sound(found, equal())
    assert not sound(msgspec.structs.replace(found, shares=(0, 0, 0, 0)), equal())


def test_absurd_announced_bandwidth_is_no_error():
    assert sum(opened(said(100, 100, 2**53 - 1, 10)).shares) == 60


def near(*groups, rtt=20):
    """Return announcements in which the peers of each group report that they are near each other."""
    place = {index: group for group in groups for index in group}
    return {
        IDS[one]: msgspec.structs.replace(
            ready(100), spans=tuple(Span(IDS[other][:8], rtt, 0) for other in sorted(group) if other != one)
        )
        for one, group in sorted(place.items())
    }


def test_proposal_derives_sites_from_distances_and_later_ballot_keeps_them():
    terms = replace(equal(), sited=True)
    before = opened(near({0, 2}, {1, 3}), terms=terms)
    assert before.sites == (0, 1, 0, 1)
    changed = near({0, 1}, {2, 3})
    assert opened(changed, terms=terms).sites == (0, 0, 1, 1)
    assert opened(changed, terms=terms, before=before, ballot=SECOND).sites == before.sites, "results depend on it"
    assert opened(near({0, 1, 2, 3}), terms=terms).sites == (0, 1, 2, 3), "no wide area is between them"
    one_sided = near({0, 2}, {1, 3})
    one_sided[IDS[2]] = ready(100)
    assert opened(one_sided, terms=terms).sites == (0, 1, 2, 1), "nobody is near by its own word"
    named = near({0, 2}, {1, 3})
    named[IDS[2]] = msgspec.structs.replace(named[IDS[2]], site="attic")
    assert opened(named, terms=terms).sites == (0, 1, 2, 1), "who names a site is there"
