"""Claims that a peer follows when some members have lost their state."""

import asyncio
from types import SimpleNamespace

import pytest
from thinwire.collectives.consensus.quorum import enough
from thinwire.node.outer.catch_up import CatchUp
from thinwire.swarm.messages.registry import Ask, StateAsk

ME, ANN, BEN, CAT, DAN, EVE = (bytes([n]) * 32 for n in range(6))
PATIENCE = 2.0


class Here:
    """A peer after round 3 of `members`, with `alive` in reach. `told`: sent messages; `asked`: its fetches."""

    def __init__(self, members, alive, empty=(), fetched=()):
        self.now, self.told, self.asked = 100.0, [], []
        self.states = SimpleNamespace(empty=set(empty), without=set(empty), fetch=self._fetch)
        agreement = SimpleNamespace(
            commit=None,
            ready={},
            overtaken=lambda: None,
            able_without=lambda without: enough(set(members) - set(without), members, ()),
        )
        fly = SimpleNamespace(round=4, moved=0.0, forsaken=False, pump=lambda: None, agreement=agreement)
        roster = SimpleNamespace(alive=lambda peer: peer in alive, record=SimpleNamespace(peer_id=ME))
        send_queue = SimpleNamespace(control=lambda to, message: self.told.append((to, type(message))))
        self._fetched = iter(fetched)
        self.catch_up = CatchUp(
            SimpleNamespace(round=3, members=members),
            self.states,
            presence=SimpleNamespace(roster=roster, live=set(alive), send_queue=send_queue),
            series=SimpleNamespace(behind=asyncio.Event(), patience=PATIENCE, floor=PATIENCE),
            current=lambda: fly,
            now=lambda: self.now,
            fragment=0,
        )

    async def _fetch(self, peers, work, *, believed, **rest):
        self.asked.append(believed)
        found, empty = next(self._fetched)
        self.states.empty |= set(empty)
        return found

    def behind(self, *past):
        """Return True if the peer gives way to peers that claim to be past its round."""
        for peer in past:
            self.catch_up.progress_claims.claimed(peer, 4)
        for _ in range(5):
            self.now += PATIENCE
            self.catch_up.look()
        return self.catch_up.behind.is_set()


@pytest.mark.parametrize(
    ("members", "alive", "past", "empty", "behind"),
    [
        ((BEN, ANN), (ANN, BEN), ANN, (), False),  # the first of two may continue alone
        ((BEN, ANN), (ANN, BEN), ANN, (BEN,), True),
        ((BEN,), (ANN, BEN), ANN, (BEN,), True),  # the peer ahead is a stranger, and no other peer can continue
        ((ANN, BEN, CAT, DAN, EVE), (ANN, BEN), ANN, (BEN,), True),  # as if only one member were here
        ((ANN, BEN), (BEN,), BEN, (BEN,), True),  # it has got a state since
    ],
)
def test_catch_up_does_not_wait_for_peer_without_state(members, alive, past, empty, behind):
    assert Here(members, alive, empty).behind(past) == behind


def test_catch_up_asks_only_silent_peers_for_their_state():
    here = Here((CAT, BEN, ANN), (ANN, BEN, CAT), empty=(CAT,))
    here.behind(ANN)
    assert {to for to, kind in here.told if kind is StateAsk} == {BEN}
    assert {to for to, kind in here.told if kind is Ask} >= {ANN, BEN}


def newer(here):
    async def work(function):
        return function()

    return asyncio.run(here.catch_up.newer(work))


def test_peer_without_state_does_not_vote_on_the_right_state():
    here = Here((ANN, BEN), (ANN, BEN), fetched=[(None, ())])
    assert newer(here) is None
    (believed,) = here.asked
    assert not believed([ANN])
    here.states.empty.add(BEN)
    assert believed([ANN]) and not believed([CAT])


def test_peer_with_state_from_stateless_peers_is_a_newcomer():
    state = object()
    here = Here((BEN,), (ANN, BEN), fetched=[(None, [BEN]), (state, [])])
    assert newer(here) is state
    assert here.asked[0] is not None and here.asked[1] is None


def test_member_is_no_newcomer_when_all_others_lost_state():
    here = Here((ME, BEN), (ANN, BEN), fetched=[(None, [BEN])])
    assert newer(here) is None and len(here.asked) == 1
