"""Proposals of a leader: chunk shares from announced bandwidths, uplinks and sites."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from kit.rounds.round_harness import leaving
from thinwire.collectives.consensus.justification import bound, choices
from thinwire.collectives.consensus.members.lives import by_seniority, next_members
from thinwire.collectives.consensus.members.quorum import enough
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import AcceptedValue, adopt, fit, name_of, names, propose, sound
from thinwire.swarm.messages.registry import LIFE, MAX_GROUP, Ballot, Contribution, Promise, Proposal, Ready, Span

IDS = tuple(bytes([number]) * 32 for number in range(6))
BASE, PLAN = bytes(32), bytes(32)
TERMS = RoundTerms(5, 0, IDS[:4], BASE, PLAN, chunks=60)
FIRST, SECOND = Ballot(1, IDS[0]), Ballot(2, IDS[1])


def ready(rate, weight=10):
    return Ready(5, 0, 1, BASE, PLAN, weight, b"", True, 0.0, 0.0, rate, rate)


def said(*rates):
    return {peer: ready(rate) for peer, rate in zip(IDS, rates, strict=False)}


def proposal_of(known, *, terms=TERMS, able=None, idle=(), before=None, ballot=FIRST) -> Proposal:
    able = tuple(known) if able is None else able
    found = propose(ballot, terms, able, known, {}, rejected={}, idle=idle, before=before)
    assert found is not None and sound(found, terms)
    return found


def test_shares_follow_announced_bandwidths():
    assert proposal_of(said(100, 100, 100, 10)).shares == (20, 20, 20, 0)
    assert proposal_of(said(100, 100, 100, 0)).shares == (), "unknown counts as usual"
    assert proposal_of(said(0, 0, 0, 0)).shares == ()
    assert proposal_of(said(100, 100, 100, 10), terms=equal()).shares == ()


def equal():
    return RoundTerms(5, 0, IDS[:4], BASE, PLAN)


def test_idle_peer_gets_no_share():
    found = proposal_of(said(100, 100, 100, 10), idle={IDS[1]})
    assert found.idle == (IDS[1],) and found.shares == (30, 0, 30, 0)


def test_later_ballot_keeps_shares_of_its_group():
    known = said(100, 100, 100, 10)
    before = proposal_of(known)
    known[IDS[3]] = ready(10**9)
    later = proposal_of(known, able=IDS[1:4], before=before, ballot=SECOND)
    assert (later.group, later.shares) == (before.group, before.shares), "only chunks of who left move"
    anew = proposal_of(known, able=IDS[1:4], ballot=SECOND)
    assert anew.group == IDS[1:4] and anew.shares != before.shares


def test_adopted_ballot_keeps_shares_of_the_vote():
    before = proposal_of(said(100, 100, 100, 10))
    choice = AcceptedValue(before, bytes(32), (IDS[2],))
    found = adopt(SECOND, TERMS, (IDS[1], IDS[2], IDS[4]), choice, {}, idle=())
    assert sound(found, TERMS)
    assert dict(zip(found.group, found.shares, strict=True)) == dict(zip(IDS, (20, 20, 20, 0, 0), strict=False))
    same = adopt(SECOND, TERMS, IDS[1:3], choice, {}, idle=())
    assert (same.group, same.shares) == (before.group, before.shares) and sound(same, TERMS)
    plain = adopt(SECOND, TERMS, IDS[1:3], AcceptedValue(proposal_of(said(1, 1, 1)), bytes(32), (IDS[2],)), {}, idle=())
    assert plain.shares == () and sound(plain, TERMS)


def test_group_of_an_adopted_value_is_bounded_when_newcomers_take_part():
    peers = tuple(number.to_bytes(2, "big") * 16 for number in range(MAX_GROUP + 2))
    terms = RoundTerms(5, 0, peers[:MAX_GROUP], BASE, PLAN)
    before = proposal_of(dict.fromkeys(peers[:MAX_GROUP], ready(1)), terms=terms)
    found = adopt(SECOND, terms, peers[-2:], AcceptedValue(before, bytes(32), peers[:1]), {}, idle=())
    assert len(found.group) == MAX_GROUP and set(peers[-2:]) <= set(found.group)


def test_allgather_proposal_omits_uplinks_when_one_is_unknown():
    """An uplink is never 0: all peers would refuse such a ballot, and no voted results could be adopted."""
    terms = replace(TERMS, chunks=0, relays=True)
    before = proposal_of(said(100, 100, 100, 10), terms=terms)
    assert before.shares and sound(before, terms)
    choice = AcceptedValue(before, bytes(32), (IDS[2],))
    same, wider = (adopt(SECOND, terms, able, choice, {}, idle=()) for able in (IDS[1:3], (IDS[1], IDS[2], IDS[4])))
    assert same.shares == before.shares and sound(same, terms)
    assert wider.shares == () and sound(wider, terms)


@pytest.mark.parametrize("shares", [(20, 20, 20), (20, 20, 20, 0, 0), (20, 20, 20, 1), (20, 20, 19, 0), (0, 0, 0, 0)])
def test_proposal_with_shares_that_do_not_cover_the_fragment_is_refused(shares):
    found = proposal_of(said(100, 100, 100, 10))
    assert not sound(msgspec.structs.replace(found, shares=shares), TERMS)


def test_proposal_with_shares_is_refused_for_equal_ownership():
    found = proposal_of(said(100, 100, 100, 10))
    assert not sound(found, equal())
    assert not sound(msgspec.structs.replace(found, shares=(0, 0, 0, 0)), equal())


def test_absurd_announced_bandwidth_is_no_error():
    assert sum(proposal_of(said(100, 100, 2**53 - 1, 10)).shares) == 60


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
    before = proposal_of(near({0, 2}, {1, 3}), terms=terms)
    assert before.sites == (0, 1, 0, 1)
    changed = near({0, 1}, {2, 3})
    assert proposal_of(changed, terms=terms).sites == (0, 0, 1, 1)
    assert proposal_of(changed, terms=terms, before=before, ballot=SECOND).sites == before.sites, "results depend on it"
    alone = proposal_of({IDS[4]: ready(100)}, terms=terms, before=before, ballot=SECOND)
    assert alone.group == (IDS[4],) and len(alone.sites) == 1, "no peer of that group takes part"
    assert proposal_of(near({0, 1, 2, 3}), terms=terms).sites == (0, 1, 2, 3), "no wide area is between them"
    one_sided = near({0, 2}, {1, 3})
    one_sided[IDS[2]] = ready(100)
    assert proposal_of(one_sided, terms=terms).sites == (0, 1, 2, 1), "nobody is near by its own word"
    named = near({0, 2}, {1, 3})
    named[IDS[2]] = msgspec.structs.replace(named[IDS[2]], site="attic")
    assert proposal_of(named, terms=terms).sites == (0, 1, 2, 1), "who names a site is there"


def test_proposal_without_bounds_of_its_terms_allows_every_weight_of_the_wire():
    known = {peer: ready(100, 2**53 - 1) for peer in IDS[:4]}
    assert {entry.weight for entry in proposal_of(known).contributors} == {2**53 - 1}


@pytest.mark.parametrize(
    "changes",
    [
        *[{"round": number} for number in (4, 6)],
        {"fragment": 1},
        {"lineage": bytes(16)},
        *[{"electorate": digest} for digest in (bytes(32), b"\xff" * 32)],
        {"group": (IDS[0], *IDS[:4])},
        {"alive": (IDS[0], *IDS[:4])},
        {"idle": IDS[:4]},
        {"idle": (IDS[5],)},
        {"contributors": ()},
        {"contributors": tuple(Contribution(peer, 1, 10) for peer in IDS[:5])},
        {"contributors": (Contribution(IDS[0], 1, 0),)},
        {"contributors": (Contribution(IDS[0], 1, 101),)},
        {"alive": IDS[:5]},
        {"alive": IDS[3::-1]},
        {"adopted": bytes(32)},
        {"sources": IDS[:1]},
        {"kept": IDS[:4]},
        {"sources": IDS[:1], "kept": IDS[:4]},
        {"adopted": bytes(32), "sources": IDS[:1]},
        {"adopted": bytes(32), "kept": IDS[:4]},
        {"order": (0, 1, 2, 3)},
    ],
)
def test_proposal_with_an_invalid_field_is_refused(changes):
    terms = replace(equal(), max_weight=100, max_contributors=4, min_peers=1)
    found = proposal_of(said(100, 100, 100, 100), terms=terms)
    assert not sound(msgspec.structs.replace(found, **changes), terms)


def test_proposal_with_as_many_contributors_as_allowed_is_accepted():
    assert (
        len(proposal_of(said(100, 100, 100, 100), terms=replace(TERMS, max_contributors=4, min_peers=4)).contributors)
        == 4
    )


@pytest.mark.parametrize(("min_peers", "distrusted", "left_out"), [(4, 1, 0), (3, 1, 1), (3, 2, 1), (2, 2, 2)])
def test_distrusted_peers_are_left_out_only_if_enough_contributors_remain(min_peers, distrusted, left_out):
    terms, known = replace(equal(), min_peers=min_peers), said(100, 100, 100, 100)
    found = propose(
        FIRST, terms, IDS[:4], known, {}, rejected={}, distrusted=IDS[4 - distrusted : 4], idle=(), before=None
    )
    assert found is not None and found.alive == IDS[:4] and len(found.contributors) == 4 - left_out


def test_proposal_in_a_lineage_names_the_announcements_and_the_lives_of_all_members():
    terms = replace(equal(), lineage=b"l" * 16, lives={peer: peer[:1] * LIFE for peer in IDS[1:4]})
    known = {peer: msgspec.structs.replace(ready(1), life=peer[:1] * LIFE) for peer in IDS[1:4]}
    found = proposal_of(known, terms=terms)
    for digest in (b"", found.contributors[0].announced[:-1]):
        entries = (msgspec.structs.replace(found.contributors[0], announced=digest), *found.contributors[1:])
        assert not sound(msgspec.structs.replace(found, contributors=entries), terms)
    for lives in (b"", found.lives[:-LIFE], bytes(LIFE) + found.lives[LIFE:]):
        assert not sound(msgspec.structs.replace(found, lives=lives), terms)


def test_distrusted_peers_do_not_contribute_in_place_of_missing_ones():
    terms = replace(equal(), min_peers=3)
    for distrusted in ((), IDS[:2]):
        known = said(100, 100)
        assert (
            propose(FIRST, terms, IDS[:2], known, {}, rejected={}, distrusted=distrusted, idle=(), before=None) is None
        )


@pytest.mark.parametrize(("room", "contributors"), [(1, 1), (3, 3), (4, 4), (5, 4)])
def test_round_with_less_room_than_peers_takes_the_first_members_in_leader_order(room, contributors):
    terms = replace(equal(), members=IDS[3::-1], max_contributors=room)
    found = proposal_of(said(100, 100, 100, 100), terms=terms)
    assert [entry.peer for entry in found.contributors] == sorted(IDS[3::-1][:contributors])


def test_seal_of_a_proposal_is_no_part_of_its_name():
    found = proposal_of(said(100, 100, 100, 100), terms=equal())
    assert name_of(msgspec.structs.replace(found, seal=b"s" * 64)) == name_of(found)
    assert name_of(msgspec.structs.replace(found, fragment=1)) != name_of(found)


def test_lives_of_the_next_members_are_in_the_order_of_their_seniority():
    decided, lives = IDS[:3], b"".join(bytes([number]) * LIFE for number in (1, 2, 3))
    members, ordered = next_members(decided, lives, (IDS[2], IDS[0]))
    assert members == (IDS[2], IDS[0], IDS[1]) and ordered == bytes([3]) * LIFE + bytes([1]) * LIFE + bytes([2]) * LIFE
    assert next_members(decided, b"", (IDS[2], IDS[0])) == (members, b"")


def test_proposal_with_other_weights_than_settled_is_refused():
    terms = replace(equal(), weights=dict.fromkeys(IDS[:4], 7))
    found = proposal_of(said(100, 100, 100, 100), terms=terms)
    assert {entry.weight for entry in found.contributors} == {7}
    for weight in (6, 8):
        other = (*found.contributors[:3], Contribution(IDS[3], 1, weight))
        assert not sound(msgspec.structs.replace(found, contributors=other), terms)


def test_peer_without_announced_or_settled_weight_does_not_contribute():
    terms = replace(equal(), weights=dict.fromkeys(IDS[1:4], 7))
    known = said(100, 100, 100, 100) | {IDS[1]: ready(100, 0)}
    assert [entry.peer for entry in proposal_of(known, terms=terms).contributors] == [IDS[2], IDS[3]]


def test_proposal_may_give_the_only_chunk_to_one_peer():
    terms = replace(TERMS, chunks=1)
    found = proposal_of(said(100, 100, 100, 10), terms=terms)
    assert sound(msgspec.structs.replace(found, shares=(0, 1, 0, 0)), terms)


def test_uplinks_of_an_allgather_are_refused_unless_each_peer_has_one():
    terms = replace(TERMS, chunks=0, relays=True)
    found = proposal_of(said(100, 100, 100, 10), terms=terms)
    for shares in (found.shares[:3], (*found.shares, 1), (*found.shares[:3], 0)):
        assert not sound(msgspec.structs.replace(found, shares=shares), terms)


def test_ring_with_each_owner_once_is_accepted():
    terms = replace(equal(), ring=lambda peers, rate, trip: peers[::-1])
    found = proposal_of(said(100, 100, 100, 100), terms=terms)
    assert sorted(found.order) == [0, 1, 2, 3]
    for order in ((0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 4)):
        assert not sound(msgspec.structs.replace(found, order=order), terms)
    assert not sound(msgspec.structs.replace(found, idle=IDS[:1]), terms), "an idle peer is in the ring"
    assert not sound(found, equal()), "the run has no rings"


@pytest.mark.parametrize("plan", [b"a" * 32, b"c" * 32])
def test_peer_with_another_plan_or_base_cannot_take_part(plan):
    terms = RoundTerms(5, 0, IDS[:4], b"b" * 32, b"b" * 32)
    known = {
        IDS[0]: msgspec.structs.replace(ready(1), base=b"b" * 32, plan=b"b" * 32),
        IDS[1]: msgspec.structs.replace(ready(1), base=b"b" * 32, plan=plan),
        IDS[2]: msgspec.structs.replace(ready(1), base=plan, plan=b"b" * 32),
    }
    assert fit(terms, IDS, known) == ((IDS[0],), {IDS[1]: "plan", IDS[2]: "base digest"})


def test_peer_without_an_announcement_keeps_no_other_peer_out():
    assert fit(equal(), IDS[:4], {peer: ready(1) for peer in IDS[1:4]}) == (IDS[1:4], {})


def test_member_has_another_life_than_the_decided_one_after_it_has_lost_its_folder():
    terms = replace(equal(), lives={IDS[0]: b"k" * LIFE})
    assert [terms.other_life(IDS[0], life * LIFE) for life in (b"a", b"k", b"z")] == [True, False, True]
    assert not terms.other_life(IDS[1], b"a" * LIFE), "its life is not known"


def test_full_group_prefers_members():
    peers = tuple(number.to_bytes(2, "big") * 16 for number in range(MAX_GROUP + 3))
    terms = RoundTerms(5, 0, peers[-2:], BASE, PLAN)
    able, excluded = fit(terms, peers, {peer: ready(1) for peer in peers})
    assert able == (*peers[: MAX_GROUP - 2], *peers[-2:])
    assert excluded == dict.fromkeys(peers[MAX_GROUP - 2 : -2], "group is full")


@pytest.mark.parametrize(("rates", "contributors"), [((1, 1, 1, 1), 3), ((1, 1, 0, 1), 2), ((1, 0, 0, 1), 2)])
def test_spare_peer_contributes_only_if_too_few_others_do(rates, contributors):
    terms = replace(equal(), min_peers=2, spare=frozenset(IDS[3:4]))
    known = {peer: ready(100, weight) for peer, weight in zip(IDS, rates, strict=False)}
    found = proposal_of(known, terms=terms)
    spared = sum(rates[:3]) >= 2
    assert len(found.contributors) == contributors
    assert (IDS[3] in {entry.peer for entry in found.contributors}) == (not spared)
    assert any((entry.peer, entry.reason) == (IDS[3], "spare") for entry in found.excluded) == spared


def test_votes_count_only_with_ballot_and_digest():
    before = proposal_of(said(100, 100, 100, 100))
    promises = {
        IDS[0]: Promise(5, 0, SECOND, before, b"x" * 32),
        IDS[1]: Promise(5, 0, SECOND, None, b"x" * 32),
        IDS[2]: Promise(5, 0, SECOND, before, None),
        IDS[3]: Promise(5, 0, SECOND, before, b"x" * 32),
    }
    assert choices(promises) == [AcceptedValue(before, b"x" * 32, (IDS[0], IDS[3]))]


def test_list_of_excluded_peers_is_bounded():
    out = {number.to_bytes(2, "big") * 16: "late" for number in range(MAX_GROUP + 3)}
    found = propose(FIRST, TERMS, IDS[:4], said(1, 1, 1, 1), out, rejected={}, idle=(), before=None)
    assert found is not None and len(found.excluded) == MAX_GROUP


def test_proposal_of_another_lineage_is_refused():
    terms = replace(equal(), lineage=b"l" * 16, lives=dict.fromkeys(IDS, bytes([1]) * 16))
    lived = {peer: msgspec.structs.replace(one, life=bytes([1]) * 16) for peer, one in said(1, 1, 1, 1).items()}
    found = proposal_of(lived, terms=terms)
    assert found.lineage == b"l" * 16 and not sound(found, equal())


# --- votes that bind a ballot: five members, A and B are digests

A, B = b"a" * 32, b"b" * 32
FIVE = IDS[:5]


def voted(digest, *voters, term=1, left=()):
    farewells = tuple(leaving(peer).farewell for peer in left)
    before = msgspec.structs.replace(proposal_of(said(1, 1, 1, 1, 1), ballot=Ballot(term, IDS[0])), farewells=farewells)
    return AcceptedValue(before, digest, voters)


def bind(found, *, silent=(), left=()):
    choice = bound(found, silent, left, lambda agreeing, gone: enough(agreeing, FIVE, gone))
    return choice[0].digest if choice else None


@pytest.mark.parametrize(
    ("voters", "silent", "binds"),
    [
        (IDS[:3], (), True),
        (IDS[:2], (), False),
        (IDS[:2], IDS[4:5], True),
        (IDS[2:4], IDS[4:5], True),
        (IDS[3:4], IDS[4:5], False),
        ((), IDS[:5], False),
    ],
)
def test_vote_binds_if_its_voters_and_the_silent_members_would_be_a_quorum(voters, silent, binds):
    assert bind([voted(A, *voters)] if voters else [], silent=silent) == (A if binds else None)


def test_first_possible_value_binds_and_impossible_later_ones_do_not():
    found = [voted(B, IDS[4], term=7), voted(A, *IDS[:3])]
    assert bind(found) == A, "an invented later vote does not hide a possible value"
    assert bind(found, silent=IDS[1:3]) == B


def test_departed_members_without_a_vote_do_not_count():
    assert bind([voted(A, *IDS[2:4])]) is None
    assert bind([voted(A, *IDS[2:4])], left=IDS[:2]) == A, "two of the three that are left"
    assert bind([voted(A, IDS[2])], left=IDS[:2]) is None
    assert bind([voted(A, IDS[2])], left=IDS[:2], silent=IDS[3:4]) == A


def test_departed_members_with_a_vote_count():
    assert bind([voted(A, *IDS[:2])]) is None
    assert bind([voted(A, *IDS[:3])], left=IDS[:2]) == A
    assert bind([voted(A, *IDS[:2])], left=IDS[:2], silent=IDS[4:5]) == A


def test_departed_members_of_the_ballot_that_was_voted_for_count_as_silent():
    """A farewell that this ballot does not carry may be of a member that voted in an even earlier ballot."""
    assert bind([voted(A, *IDS[2:4], left=IDS[:2])]) is None, "they have promised this ballot without a vote"
    assert bind([voted(A, *IDS[2:4], left=IDS[:2])], silent=IDS[:2]) == A


# --- seniority


def test_members_that_stay_keep_their_seniority_and_newcomers_follow_by_id():
    assert by_seniority(IDS[:4], (IDS[3], IDS[1])) == (IDS[3], IDS[1], IDS[0], IDS[2])
    assert by_seniority({IDS[4], IDS[1]}, (IDS[4], IDS[0], IDS[1])) == (IDS[4], IDS[1])
    assert by_seniority(IDS[:3], ()) == IDS[:3]


def test_entry_of_a_proposal_names_an_announcement_by_attempt_and_digest():
    announcement = ready(10)
    assert names(Contribution(IDS[0], 1, 10, announced=announcement.digest), announcement)
    for attempt in (0, 2):
        assert not names(Contribution(IDS[0], attempt, 10, announced=announcement.digest), announcement)
    assert not names(Contribution(IDS[0], 1, 10, announced=b"x" * 32), announcement)
