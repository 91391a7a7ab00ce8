"""Results of a butterfly that are computed aside from the event loop, later than their inputs arrive."""

import asyncio

import pytest
from kit.real.late_executor import LateWork
from kit.rounds.round_harness import LEADER, ME, PEERS, SECOND, DenseHarness, mean
from thinwire.collectives.rounds.data_planes import owned_chunks
from thinwire.collectives.rounds.data_planes.butterfly import Butterfly
from thinwire.collectives.rounds.data_planes.ring import Ring
from thinwire.swarm.messages.registry import Chunk, Contribution, Ready, Result, ResultRecord, Vote

OTHER = PEERS[2]
IDS = PEERS[:3]
MINE = (2, 3)


class Harness(DenseHarness):
    """Peer ME of three, which owns chunks 2 and 3, with all contributions to them."""

    def __init__(self, plane=Butterfly):
        self.work = LateWork()
        super().__init__(plane, peers=IDS, aside=self.work)
        self.open()
        self.sent(Ready)
        for peer in (LEADER, OTHER):
            for index in MINE:
                self.on_message(peer, Chunk(1, 0, 1, index), self.sources[peer][index])

    def result(self, index, peers=IDS):
        return mean([self.sources[peer][index] for peer in peers], [10.0] * len(peers))

    def rest(self):
        """Deliver the results of the others."""
        for owner, indices in ((LEADER, (0, 1)), (OTHER, (4, 5))):
            self.results_of(owner, *indices)
            self.record_of(owner, *indices)


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Let the chunks of these tests be large enough for a thread."""
    monkeypatch.setattr(owned_chunks, "WORTH", 1)


def test_results_are_published_signed_and_voted_for_when_they_are_computed():
    async def main():
        harness = Harness()
        harness.rest()
        await asyncio.sleep(0)
        assert not harness.sent(Result) and len(harness.work.waiting) == 1
        await harness.work.go()
        assert {message.index for _, message, _ in harness.sent(Result)} == {2}
        assert not harness.sent(ResultRecord) and not harness.sent(Vote)
        await harness.work.go()
        assert {(message.index, payload) for _, message, payload in harness.sent(Result)} == {(3, harness.result(3))}
        assert [(to, message) for to, message, _ in harness.sent(ResultRecord)] == [
            (to, harness.record(*MINE)) for to in (LEADER, OTHER)
        ]
        ((to, _, _),) = harness.sent(Vote)
        assert to == LEADER and not harness.work.waiting and harness.blamed() == []

    asyncio.run(main())


@pytest.mark.parametrize("plane", [Butterfly, Ring])
def test_computation_for_other_contributors_is_dropped(plane):
    async def main():
        harness = Harness(plane)
        await asyncio.sleep(0)
        left = (LEADER, ME)
        harness.open(ballot=SECOND, contributors=tuple(Contribution(peer, 1, 10) for peer in left))
        while harness.work.waiting:
            await harness.work.go()
        found = {message.index: payload for to, message, payload in harness.sent(Result)}
        assert found == {index: harness.result(index, left) for index in MINE}

    asyncio.run(main())


def test_round_that_is_over_publishes_no_result():
    async def main():
        harness = Harness()
        await asyncio.sleep(0)
        harness.round.data_plane.halt()
        await harness.work.go()
        assert not harness.sent(Result) and not harness.sent(ResultRecord) and not harness.work.waiting

    asyncio.run(main())


def test_small_chunks_are_computed_when_their_inputs_are_here(monkeypatch):
    async def main():
        monkeypatch.undo()
        harness = Harness()
        assert {message.index for _, message, _ in harness.sent(Result)} == set(MINE)
        assert not harness.work.waiting

    asyncio.run(main())
