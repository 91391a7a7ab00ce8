"""The end of a search for offers, and which answers count, in virtual time."""

import asyncio
from types import SimpleNamespace

from thinwire.collectives.blocking_work import BURST
from thinwire.collectives.state_sync.offer_search import LAST_ROUND, MOST_PATIENCES, OfferSearch, accept_all
from thinwire.collectives.state_sync.state_offers import Offered
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import StateChunk, StateOffer

ANN, BEN, CLEO, DAN, EVE = (bytes([n]) * 32 for n in range(1, 6))
PATIENCE = 2.0


def offer(round):
    """Return an offer of the state after `round`."""
    return Offered(StateOffer(round, bytes([round % 256]) * 32, bytes(32), 4, ()), (), (), None)


NO_STATE = Frame(StateOffer(0, bytes(32), bytes(32), 4, ()), b"")
"""Answer of a peer that has no state."""


class Scene:
    """Search among `peers`. The best offer is that of the latest round; it is sure if `needed` peers make it.

    `answers`: for each peer the delay of its answers in seconds, and the answers to its questions one after the other, of
    which the last one is repeated. A peer without an entry is silent.
    """

    def __init__(self, answers, peers=(ANN, BEN, CLEO, DAN, EVE), *, needed=99, accept=accept_all):
        self.answers, self.needed, self.asked = answers, needed, []
        self.peers, self.accept, self.events = set(peers), accept, []

    def at(self, time, event):
        """Call `event` at this time."""
        self.events.append((time, event))

    def receive(self, peer, answer):
        self.queue.put_nowait((peer, answer))

    def ask(self, peer):
        self.asked.append((self.loop.time(), peer))
        if peer in self.answers:
            delay, *answers = self.answers[peer]
            earlier = sum(one == peer for _, one in self.asked) - 1
            self.loop.call_later(delay, self.receive, peer, answers[min(earlier, len(answers) - 1)])

    def choose(self, offers):
        last = max((one.offer.round for one in offers.values()), default=0)
        chosen = tuple(sorted(peer for peer, one in offers.items() if one.offer.round == last))
        return chosen, len(chosen) >= self.needed

    async def search_once(self):
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue()
        self.search = OfferSearch(self.peers, self.ask, self.queue, PATIENCE, self.accept, self.choose)
        for time, event in self.events:
            self.loop.call_at(time, event)
        found = await self.search.run()
        self.ended = self.loop.time()
        return found

    def run(self):
        """Search; return the round of the best offer, None if there is none."""
        found = virtual_loop.run(self.search_once(), seed=1, limit=100.0)
        return None if found is None else found.round

    def times(self, peer):
        """Return the times at which a peer was asked."""
        return [time for time, one in self.asked if one == peer]


def test_sure_offer_ends_the_search_before_the_other_peers_answer():
    scene = Scene({ANN: (0.5, offer(3)), BEN: (0.75, offer(3)), CLEO: (1.0, offer(4))}, needed=2)
    assert scene.run() == 3 and scene.ended == 0.75
    assert set(scene.search.offers) == {ANN, BEN}


def test_search_ends_with_the_last_answer_although_no_offer_is_sure():
    scene = Scene({peer: (delay, offer(3)) for peer, delay in ((ANN, 0.5), (BEN, 1.5))}, peers=(ANN, BEN))
    assert scene.run() == 3 and scene.ended == 1.5
    assert scene.times(ANN) == scene.times(BEN) == [0.0]


def test_search_among_peers_without_a_state_finds_none():
    scene = Scene({ANN: (0.5, NO_STATE), BEN: (1.0, NO_STATE)}, peers=(ANN, BEN))
    assert scene.run() is None and scene.ended == 1.0 and not scene.search.offers


def test_search_without_an_answer_ends_after_one_patience():
    scene = Scene({})
    assert scene.run() is None and scene.ended == PATIENCE
    assert len(scene.asked) == 5
    assert (scene.search.progress.asked, scene.search.progress.answered) == (5, 0)


def test_majority_of_the_peers_with_a_state_is_enough_after_one_patience():
    """Ann and Ben make two of the three states that may exist, because Cleo and Dan have none."""
    scene = Scene({ANN: (0.5, offer(3)), BEN: (0.5, offer(3)), CLEO: (0.5, NO_STATE), DAN: (0.5, NO_STATE)})
    assert scene.run() == 3 and scene.ended == PATIENCE


def test_half_of_the_peers_with_a_state_waits_for_all_patiences():
    scene = Scene({ANN: (0.5, offer(3)), BEN: (0.5, offer(3)), CLEO: (0.5, NO_STATE)}, peers=(ANN, BEN, CLEO, DAN, EVE))
    assert scene.run() == 3 and scene.ended == MOST_PATIENCES * PATIENCE == scene.search.progress.limit
    assert scene.times(DAN) == [PATIENCE * turn for turn in range(MOST_PATIENCES)], (
        "the question may be lost with a link"
    )


def test_majority_that_is_not_sure_does_not_end_the_search_within_the_patience():
    answers = {peer: (0.5, offer(3)) for peer in (ANN, BEN, CLEO)} | {DAN: (1.5, offer(4)), EVE: (1.75, offer(4))}
    scene = Scene(answers, needed=2)
    scene.choose = lambda offers: (tuple(sorted(offers)), len(offers) == 5)
    scene.run()
    assert scene.ended == 1.75 and set(scene.search.offers) == {ANN, BEN, CLEO, DAN, EVE}


def test_peers_between_two_rounds_are_asked_again_at_once():
    answers = {ANN: (0.25, offer(3), offer(4)), BEN: (0.5, offer(4)), CLEO: (0.75, offer(4))}
    scene = Scene(answers, peers=(ANN, BEN, CLEO))
    assert scene.run() == 4 and scene.ended == 1.5
    assert scene.times(ANN) == [0.0, 0.75]
    assert {one.offer.round for one in scene.search.offers.values()} == {4}


def test_offer_of_the_first_answers_does_not_count_if_the_peer_answers_without_one():
    scene = Scene({ANN: (0.25, offer(3), NO_STATE), BEN: (0.5, offer(4))}, peers=(ANN, BEN))
    assert scene.run() == 4 and scene.ended == 1.0 and set(scene.search.offers) == {BEN}


def test_peers_of_different_rounds_are_asked_a_limited_number_of_times():
    scene = Scene({ANN: (0.5, offer(3)), BEN: (0.5, offer(4))}, peers=(ANN, BEN))
    assert scene.run() == 4 and scene.ended == MOST_PATIENCES * 0.5
    assert len(scene.times(ANN)) == MOST_PATIENCES


def test_silent_peer_whose_link_is_lost_is_asked_again_at_once():
    """Its question may have been lost. It is silent again, and the two others are a majority after one patience."""
    scene = Scene({ANN: (0.5, offer(3)), BEN: (0.5, offer(3))}, peers=(ANN, BEN, CLEO))
    scene.at(1.25, lambda: scene.receive(CLEO, None))
    assert scene.run() == 3 and scene.times(CLEO) == [0.0, 1.25]
    assert scene.ended == 1.25 + PATIENCE and scene.search.away == set()


def test_search_ends_with_lost_links_if_all_other_peers_have_answered():
    scene = Scene({ANN: (0.5, offer(3)), BEN: (1.0, offer(3))}, peers=(ANN, BEN))
    scene.at(0.75, lambda: scene.receive(ANN, None))
    assert scene.run() == 3 and scene.ended == 1.0
    assert scene.search.away == {ANN} and set(scene.search.offers) == {ANN, BEN}


def test_peer_that_answers_after_its_link_was_lost_is_back():
    scene = Scene({ANN: (0.5, offer(3)), BEN: (1.0, offer(3))}, peers=(ANN, BEN))
    scene.at(0.25, lambda: scene.receive(ANN, None))
    assert scene.run() == 3 and scene.search.away == set()


def test_peers_may_come_and_go_meanwhile():
    """Ben is new and asked at the next patience; Cleo departs and is not waited for."""
    scene = Scene({ANN: (0.5, offer(3)), BEN: (0.5, offer(3))}, peers=(ANN, CLEO, DAN))
    scene.at(1.0, lambda: scene.peers.add(BEN))
    scene.at(2.25, lambda: scene.peers.difference_update((CLEO, DAN)))
    assert scene.run() == 3 and scene.ended == 2.5
    assert scene.times(BEN) == [PATIENCE]


def test_answer_of_a_peer_that_was_not_asked_is_ignored():
    scene = Scene({ANN: (0.5, offer(3))}, peers=(ANN,), needed=1)
    scene.at(0.25, lambda: scene.receive(EVE, offer(9)))
    assert scene.run() == 3 and set(scene.search.offers) == {ANN}


def test_late_chunk_of_an_earlier_transfer_is_no_answer():
    scene = Scene({ANN: (0.5, offer(3))}, peers=(ANN,))
    scene.at(0.25, lambda: scene.receive(ANN, Frame(StateChunk(2, 0), b"late")))
    assert scene.run() == 3


def test_round_number_without_a_successor_is_not_accepted():
    scene = Scene({ANN: (0.5, offer(LAST_ROUND)), BEN: (0.5, offer(LAST_ROUND - 1))}, peers=(ANN, BEN))
    assert scene.run() == LAST_ROUND - 1 and set(scene.search.offers) == {BEN}


def test_refused_offer_is_an_answer_that_does_not_count():
    def accept(offered):
        yield SimpleNamespace(cost=1.0)
        return offered.offer.round == 3

    scene = Scene({ANN: (0.5, offer(3)), BEN: (0.75, offer(9))}, peers=(ANN, BEN), accept=accept)
    assert scene.run() == 3 and scene.ended == 0.75 and set(scene.search.offers) == {ANN}
    assert (scene.search.progress.asked, scene.search.progress.answered) == (2, 2)


class SetLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock is set by the test; unlike a virtual one it looks at timers between two ready callbacks."""

    now = 0.0

    def time(self):
        return self.now


def test_time_of_a_check_is_not_time_without_an_answer():
    """The check of Ann's chain takes an hour of computing in parts; Ben's answer comes at its end."""
    scene = Scene({ANN: (0.0, offer(3))}, peers=(ANN, BEN))
    scene.choose = lambda offers: (tuple(sorted(offers)), BEN in offers)

    def accept(offered):
        if offered.offer.round == 3:
            for _ in range(6):
                yield SimpleNamespace(cost=BURST + 1)
                scene.loop.now += 600.0
            scene.receive(BEN, offer(4))
        return True

    scene.accept = accept
    with asyncio.Runner(loop_factory=SetLoop) as runner:
        runner.run(scene.search_once())
    assert [peer for _, peer in scene.asked] == [ANN, BEN], "no patience is over, so each is asked once"
    assert set(scene.search.offers) == {ANN, BEN}


def test_patience_continues_after_a_check():
    """Ann's check ends at 60.5 s with 1.5 s left of the patience; Ben is silent."""

    def accept(offered):
        yield SimpleNamespace(cost=BURST + 1)
        asyncio.get_running_loop().now += 60.0
        return True

    scene = Scene({ANN: (0.5, offer(3))}, peers=(ANN, BEN), accept=accept)
    scene.at(61.9, lambda: scene.answers.update({BEN: (0.125, offer(3))}))
    scene.run()
    assert scene.times(BEN)[:2] == [0.0, 62.0]
