"""Electorate: quorums of the decided members, whatever this peer can reach."""

from dataclasses import replace

import msgspec
import pytest
from kit.rounds.fake_standing import FakeStanding
from kit.rounds.round_harness import farewell, leaving, ready
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import DISTRUSTED, ON_TRIAL
from thinwire.swarm.messages.registry import Ballot, Proposal

IDS = tuple(bytes([number]) * 32 for number in range(6))
ME, ANN, BEN, CAT, DAN, EVE = IDS
TERMS = RoundTerms(5, 0, (ANN, BEN, CAT, DAN), bytes(32), bytes(32), patience=2.0)


def electorate(live=IDS, terms=TERMS, left=()):
    one = Electorate(ME, terms, live, lambda peer, message, signature: True)
    for peer in left:
        assert one.farewells.add(leaving(peer))
    return one


def proposal_of(alive, left=()):
    return Proposal(5, 0, Ballot(1, ANN), alive, alive, (), (), None, (), farewells=tuple(map(farewell, left)))


@pytest.mark.parametrize("live", [IDS, (ANN, BEN), ()])
def test_quorum_of_members_does_not_depend_on_the_reachable_ones(live):
    one = electorate(live)
    assert not one.enough({BEN, CAT}) and one.enough({BEN, CAT, DAN})
    assert one.enough({ANN, BEN}), "half of them with the most senior one"
    assert not one.enough({ANN, ME, EVE}), "strangers have no vote"


def test_quorum_ties_go_to_the_most_senior_member_not_to_the_first_in_leader_order():
    one = electorate(terms=RoundTerms(5, 0, (ANN, BEN, CAT, DAN), bytes(32), bytes(32), seniors=(CAT, ANN, BEN, DAN)))
    assert not one.enough({ANN, BEN}) and one.enough({CAT, DAN})


def test_quorum_after_farewells_is_of_the_members_that_are_left():
    one = electorate(left=[ANN])
    assert not one.enough({BEN}) and one.enough({BEN, CAT}) and one.enough({BEN, DAN}) and not one.enough({ANN, BEN})
    assert electorate(left=[ANN, BEN]).enough({CAT}) and not electorate(left=[ANN, BEN]).enough({DAN})


@pytest.mark.parametrize(("count", "fraction", "least"), [(4, 0.5, 2), (4, 2 / 3, 2), (7, 2 / 3, 3), (7, 0.5, 2)])
def test_adopted_results_are_confirmed_by_more_voters_than_may_lie(count, fraction, least):
    members = tuple(bytes([number]) * 32 for number in range(count))
    one = electorate(terms=replace(TERMS, members=members, fraction=fraction))
    for voters in range(count + 1):
        assert one.confirmed(members[:voters]) == (voters >= least)


def test_electorate_whose_members_have_all_left_has_no_quorum():
    one = electorate(left=[ANN, BEN, CAT, DAN])
    assert not one.enough({ME, EVE}) and not one.able


def test_ballot_commits_with_the_farewells_that_it_carries_only():
    one = electorate(left=[ANN])
    assert not one.suffice({BEN, CAT}, proposal_of((ANN, BEN, CAT, DAN)))
    assert one.suffice({BEN, CAT}, proposal_of((BEN, CAT, DAN), left=[ANN]))


def test_electorate_without_reachable_quorum_is_not_able():
    assert electorate({ANN, BEN}).able and not electorate({BEN, CAT}).able and electorate({BEN, CAT, DAN}).able


def test_mute_members_are_absent_and_do_not_change_the_quorum():
    one = electorate({ANN, BEN, CAT})
    one.nonvoters |= {ANN}
    assert one.absent == (ANN, DAN) and not one.able
    assert one.enough({ANN, BEN, CAT}) and not one.enough({BEN, CAT})


def test_departed_members_are_not_absent():
    assert electorate({ANN, BEN}, left=[DAN]).absent == (CAT,)


@pytest.mark.parametrize(
    ("live", "spared"), [((), False), ((ME, BEN), False), ((ME, BEN, CAT), True), ((BEN, CAT), True)]
)
def test_others_spare_a_leaving_peer_if_they_are_a_quorum_without_it(live, spared):
    one = electorate(live, terms=replace(TERMS, members=(ME, ANN, BEN, CAT)))
    assert one.spares_me == spared


@pytest.mark.parametrize(("voters", "accepted"), [((), False), ((ANN,), False), ((ME,), True), ((ANN, BEN), True)])
def test_members_of_a_value_are_accepted_if_this_peer_or_more_than_may_lie_have_voted_for_it(voters, accepted):
    lying = replace(TERMS, members=(ME, ANN, BEN, CAT), fraction=2 / 3)
    assert electorate(terms=lying).accepted(voters) == accepted
    assert electorate(terms=replace(lying, fraction=0.5)).accepted(voters), "no member lies"


@pytest.mark.parametrize(("live", "order"), [({ANN, BEN}, [BEN, ANN]), ({ANN, CAT}, [ANN, CAT])])
def test_order_of_leaders_begins_with_the_present_leader(live, order):
    assert electorate(live).order(BEN) == order


def test_order_of_leaders_has_all_reachable_members_after_the_present_leader():
    assert electorate().order(CAT) == [CAT, ANN, BEN, DAN]


def test_peer_is_on_trial_only_in_a_run_with_trials():
    assert not electorate().on_trial(EVE)
    with_trials = Electorate(
        ME, TERMS, IDS, lambda peer, message, signature: True, FakeStanding(trial=lambda peer: True)
    )
    assert with_trials.on_trial(EVE) and not with_trials.on_trial(ANN)


def test_order_of_leaders_is_without_departed_members():
    assert electorate(left=[BEN]).order(BEN) == [ANN, CAT, DAN]


def test_electorate_waits_for_reachable_members_with_a_vote_that_are_not_ready():
    one = electorate({ANN, BEN, CAT, DAN}, left=[DAN])
    one.nonvoters |= {CAT}
    assert one.waiting_for({ANN}) == (BEN,)


def test_electorate_waits_for_an_applicant_which_has_no_vote():
    terms = replace(TERMS, graces={ANN: 1.0, EVE: 2.0})
    assert electorate({ANN, EVE}, terms).waiting_for({ANN}) == (EVE,)
    assert electorate({ANN}, terms).waiting_for({ANN}) == (), "its link is gone"
    assert not electorate(terms=terms).enough({BEN, CAT, EVE})


def opinions(**said):
    """Announcements: member -> the peers that it distrusts."""
    return {globals()[name]: msgspec.structs.replace(ready(), distrusts=peers) for name, peers in said.items()}


@pytest.mark.parametrize(
    ("said", "uncounted"),
    [
        ({"ANN": (DAN,)}, False),
        ({"ANN": (DAN,), "BEN": (DAN,)}, True),
        ({"ANN": (DAN,), "BEN": (CAT,)}, False),
        ({"ANN": (DAN,), "DAN": (DAN,)}, False),
        ({"ANN": (DAN,), "EVE": (DAN,)}, False),
    ],
    ids=["one", "two of the three others", "one each", "the peer itself", "a stranger"],
)
def test_contribution_is_uncounted_if_more_than_half_of_the_other_members_distrust_the_peer(said, uncounted):
    assert electorate().uncounted([DAN], opinions(**said)) == ({DAN: DISTRUSTED} if uncounted else {})


def test_half_of_the_other_members_cannot_take_the_weight_of_a_member():
    one = electorate(terms=replace(TERMS, members=(ANN, BEN, CAT, DAN, EVE)))
    assert one.uncounted([EVE], opinions(ANN=(EVE,), BEN=(EVE,))) == {}
    more = electorate(terms=replace(TERMS, members=IDS))
    assert more.uncounted([EVE], opinions(ANN=(EVE,), BEN=(EVE,))) == {}
    assert one.uncounted([EVE], opinions(ANN=(EVE,), BEN=(EVE,), CAT=(EVE,))) == {EVE: DISTRUSTED}


def test_only_one_other_member_cannot_take_the_weight_of_a_member():
    two = electorate(terms=replace(TERMS, members=(ANN, BEN)))
    assert two.uncounted([BEN], opinions(ANN=(BEN,))) == {}


def test_peer_on_trial_is_uncounted_without_endorsements_of_a_quorum():
    one = Electorate(ME, TERMS, IDS, lambda peer, message, signature: True, FakeStanding(trial=lambda peer: True))
    for endorsing, found in (((BEN, CAT), {EVE: ON_TRIAL}), ((ANN, BEN), {}), ((EVE, ME), {EVE: ON_TRIAL})):
        said = {peer: msgspec.structs.replace(ready(), endorses=(EVE,)) for peer in endorsing}
        assert one.uncounted([EVE, DAN], said) == found, "DAN is a member"


# --- views


SEVEN = (*IDS[1:], ME, bytes([6]) * 32)


def electorate_of(members, me=ANN, fraction=2 / 3):
    terms = RoundTerms(5, 0, SEVEN[:members], bytes(32), bytes(32), patience=2.0, fraction=fraction)
    return Electorate(me, terms, terms.members, lambda peer, message, signature: True)


def views_of(members=4, me=ANN, fraction=2 / 3):
    return electorate_of(members, me, fraction).views


def test_views_begin_once_and_without_precedence():
    views = views_of()
    assert views.member == b"" and not views.due(1e9)
    views.begin(1.0)
    views.begin(5.0)
    assert (views.number, views.member) == (0, b""), "no member has precedence"
    assert views.due(9.0) and views.due(9.1) and not views.due(8.9)


def test_first_view_lasts_longer_while_the_first_ballot_makes_progress_and_later_ones_do_not():
    views = views_of()
    views.extend(0.0)
    assert not views.due(1e9), "it has not begun"
    views.begin(0.0)
    views.extend(5.0)
    assert views.due(13.0) and not views.due(12.9)
    for peer in (ANN, BEN, CAT):
        views.on_change(peer, 1, 20.0)
    views.extend(25.0)
    assert views.number == 1 and views.due(28.0)


def test_peer_asks_for_the_next_view_after_its_time_and_repeats_that():
    views = views_of()
    views.begin(0.0)
    asks = []
    for at in range(30):
        if views.due(float(at)):
            views.ask(float(at))
            asks.append((at, views.asked, views.number))
    assert asks == [(8, 1, 0), (16, 1, 0), (24, 1, 0)], "alone it does not enter it"


def test_view_begins_once_a_quorum_has_asked_for_it_or_a_later_one():
    views = views_of()
    views.begin(0.0)
    views.ask(8.0)
    views.on_change(BEN, 1, 9.0)
    assert views.number == 0
    views.on_change(CAT, 3, 10.0)
    assert (views.number, views.member) == (1, BEN) and views.due(18.0) and not views.due(17.9)
    views.on_change(CAT, 0, 11.0)
    assert views.due(18.0), "the view does not begin again"
    views.on_change(BEN, 3, 12.0)
    assert views.number == 3 and views.asked == 3, "a late repetition of a lower one changes nothing"


def test_peer_asks_for_a_view_that_more_members_ask_for_than_may_lie():
    views = views_of()
    views.begin(0.0)
    assert not views.on_change(BEN, 2**31, 1.0) and views.asked == 0, "one of four may lie"
    assert views.on_change(CAT, 7, 2.0) and views.asked == 7
    assert views.number == 7, "with its own demand that is a quorum"
    assert not views.on_change(DAN, 7, 3.0)


@pytest.mark.parametrize(("members", "liars"), [(6, 1), (7, 2)])
@pytest.mark.parametrize("me", [ANN, CAT, ME])
def test_peer_asks_for_a_view_that_more_members_ask_for_than_may_lie_of_six_or_seven(me, members, liars):
    views = views_of(members, me)
    views.begin(0.0)
    others = [peer for peer in (ANN, DAN, EVE, BEN) if peer != me][: liars + 1]
    asked = [views.on_change(peer, 7 - at, 1.0) for at, peer in enumerate(others)]
    assert asked == [False] * liars + [True] and views.asked == 7 - liars


def test_view_does_not_begin_for_members_that_ask_for_view_zero():
    views = views_of()
    views.begin(0.0)
    views.ask(8.0)
    assert not any([views.on_change(peer, 0, 9.0) for peer in (BEN, CAT)])
    assert (views.number, views.asked) == (0, 1)


def test_highest_view_of_a_quorum_begins_and_no_earlier_one_afterwards():
    """Farewells make two of four members a quorum, of which one is the most senior."""
    one = electorate_of(7, me=CAT, fraction=0.5)
    views = one.views
    views.begin(0.0)
    views.ask(8.0)
    for peer in (ANN, BEN):
        views.on_change(peer, 3, 8.0)
    assert views.number == 0
    for peer in SEVEN[4:]:
        assert one.farewells.add(leaving(peer))
    views.on_change(BEN, 3, 9.0)
    assert views.number == 3
    views.on_change(DAN, 2, 10.0)
    assert views.number == 3


def test_views_of_a_newcomer_without_members_and_of_a_single_member_grow():
    newcomer, single = views_of(members=0), views_of(members=1)
    assert newcomer.growth == 1.0
    single.begin(0.0)
    for now, growth in ((8.0, 2.0), (24.0, 4.0)):
        single.ask(now)
        assert single.growth == growth


def test_one_liar_of_three_does_not_end_a_view_with_plain_majorities():
    views = views_of(members=3, fraction=0.5)
    views.begin(0.0)
    assert not views.on_change(CAT, 2**31, 1.0) and views.number == 0


def test_members_of_unequal_patience_enter_a_view_together():
    """The fast one asks first, and the slow one joins."""
    fast, slow = views_of(members=3, fraction=0.5), views_of(members=3, me=BEN, fraction=0.5)
    for views in (fast, slow):
        views.begin(0.0)
    fast.ask(8.0)
    slow.on_change(ANN, fast.asked, 8.1)
    assert (fast.number, slow.number) == (0, 0)
    slow.ask(12.0)
    fast.on_change(BEN, slow.asked, 12.1)
    assert fast.number == slow.number == 1 and fast.due(20.1) and slow.due(20.0)


def test_views_last_twice_as_long_in_each_rotation_and_not_longer_than_sixteen_times():
    views, lengths = views_of(), []
    views.begin(0.0)
    now = 0.0
    for _ in range(28):
        began = now
        while not views.due(now):
            now += 1.0
        lengths.append(now - began)
        for peer in (ANN, BEN, CAT):
            views.on_change(peer, views.number + 1, now)
    assert lengths == [8.0] * 4 + [16.0] * 4 + [32.0] * 4 + [64.0] * 4 + [128.0] * 12
