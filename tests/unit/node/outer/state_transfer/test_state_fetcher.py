"""Fetching a state from other peers, and the reports about it."""

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from kit.outer.chains import accepting
from thinwire.collectives.state_sync.offer_search import accept_all
from thinwire.collectives.state_sync.state_offers import ReceivedChains, state_digest, unchecked
from thinwire.node.outer.state_transfer.state_fetcher import StateFetcher
from thinwire.node.peer.status_parts import fetching, transfers
from thinwire.node.runtime.asyncio_extra import at_once
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import short
from thinwire.swarm.messages.registry import CHUNK_BYTES, StateAsk, StateChunk, StateFetch, StateOffer

ANN, BEN = (name * 32 for name in (b"a", b"b"))


class Fetcher:
    """StateFetcher of a replica of a little more than one chunk, with a separate clock."""

    def __init__(self):
        self.now, self.events, self.sent = 0.0, [], []
        self.replica = Replica(bytes(32), np.arange(140_000, dtype=np.float32), (ANN,))
        self.fetcher = StateFetcher(
            self.replica,
            SimpleNamespace(),
            SimpleNamespace(control=lambda to, message: self.sent.append((to, Frame(message)))),
            lambda: self.now,
            emit=lambda kind, fields: self.events.append((kind, fields)),
            chains=ReceivedChains(unchecked),
        )
        self.peer = SimpleNamespace(
            session=SimpleNamespace(sessions={0: SimpleNamespace(catch_up=SimpleNamespace(fetcher=self.fetcher))})
        )


@pytest.mark.parametrize("hashes", [b"", bytes(64)])
def test_offer_with_wrong_hashes_is_ignored(hashes):
    """A peer that returns finds a swarm if there is a state, not if there is a claim."""

    async def main():
        here = Fetcher()
        fetching = asyncio.ensure_future(here.fetcher.fetch([ANN], at_once, patience=60.0, accept=accept_all))
        await asyncio.sleep(0)
        replica = here.replica
        offer = StateOffer(9, bytes(32), replica.layout, replica.state.nbytes, (ANN,))
        here.fetcher.on_frame(ANN, Frame(offer, hashes))
        assert await fetching is None
        assert not here.fetcher.offers and here.fetcher.without == {ANN}

    asyncio.run(main())


def test_offers_beyond_the_questions_are_not_examined():
    """Each may have a chain of many signatures, whose check stops the event loop."""

    async def main():
        here, examined = Fetcher(), []

        def accept(offer, chain):
            examined.append(offer.round)
            return False

        def offer(round):
            replica = here.replica
            digest = state_digest(round, replica.layout, (ANN,), replica.hashes)
            made = StateOffer(round, digest, replica.layout, replica.state.nbytes, (ANN,))
            return Frame(made, b"".join(replica.hashes))

        here.fetcher.on_frame(ANN, offer(1))
        fetching = asyncio.ensure_future(
            here.fetcher.fetch([ANN, BEN], at_once, patience=60.0, accept=accepting(accept))
        )
        await asyncio.sleep(0)
        assert [type(frame.message) for _, frame in here.sent] == [StateAsk, StateAsk]
        for round in range(2, 12):
            here.fetcher.on_frame(ANN, offer(round))
            await asyncio.sleep(0)
        here.fetcher.on_frame(BEN, offer(3))
        assert await fetching is None
        assert examined == [2, 3] and here.fetcher.offers[ANN].round == 2

    asyncio.run(main())


def fetches(here, round, spoil=lambda chunk: chunk):
    """Begin to fetch a state of a round from ANN; return the task, its first steps, and the end: its chunk."""
    other = Replica(bytes(32), np.ones(140_000, dtype=np.float32), (ANN,))
    digest = state_digest(round, other.layout, (ANN,), other.hashes)
    offer = StateOffer(round, digest, other.layout, other.state.nbytes, (ANN,))
    task = asyncio.ensure_future(here.fetcher.fetch([ANN], at_once, patience=60.0, accept=accept_all))

    async def begin():
        await asyncio.sleep(0)
        here.fetcher.on_frame(ANN, Frame(offer, b"".join(other.hashes)))
        while not here.sent or not isinstance(here.sent[-1][1].message, StateFetch):
            await asyncio.sleep(0)
        here.fetcher.on_tick()

    def send():
        here.fetcher.on_frame(ANN, Frame(StateChunk(round, 0), spoil(bytes(other.chunk(0)))))

    return task, begin, send


def test_transfer_to_this_peer_is_shown_while_it_lasts():
    async def main():
        here = Fetcher()
        task, begin, send = fetches(here, 9)
        await begin()
        here.now = 31.0
        here.fetcher.on_tick()
        here.fetcher.on_tick()
        reports = [fields["seconds"] for kind, fields in here.events if kind == "fetching"]
        assert reports == [0.0, 31.0]
        assert fetching(here.peer) == (
            "71.4 kB of 1.1 MB of the state of round 9 from 1 peer, for 31 s, "
            "no chunk for 31 s; the transfer ends 600 s after the last chunk"
        )
        assert msgspec.structs.asdict(transfers(here.peer)[0]) == {
            **{"fragment": 0, "round": 9, "bytes": 1_120_000, "here": 1_120_000 - CHUNK_BYTES, "sources": (ANN.hex(),)},
            **{"seconds": 31.0, "silence": 31.0},
        }
        send()
        assert (await task).offer.round == 9
        assert fetching(here.peer) == "" and transfers(here.peer) == () and len(here.events) == 2

    asyncio.run(main())


def test_source_of_wrong_chunks_is_reported_once_by_name():
    """Although it is asked again, because there is no other source."""

    async def main():
        here = Fetcher()
        for round in (9, 10):
            here.sent.clear()
            task, begin, send = fetches(here, round, lambda chunk: b"x" * len(chunk))
            await begin()
            send()
            assert await task is None
        assert [fields["source"] for kind, fields in here.events if kind == "wrong_chunk"] == [short(ANN)]

    asyncio.run(main())


def test_wait_for_offers_is_shown_with_its_end_and_reported_if_it_lasts():
    """ANN has no state, and BEN leaves without an answer. The next try belongs to the same wait."""

    async def main():
        here, peers = Fetcher(), {ANN, BEN}

        async def begin():
            task = asyncio.ensure_future(here.fetcher.fetch(peers, at_once, patience=60.0, accept=accept_all))
            await asyncio.sleep(0)
            return task

        async def shown(now):
            await asyncio.sleep(0)
            here.now = now
            here.fetcher.on_tick()
            return fetching(here.peer)

        task = await begin()
        start = "waits for offers of a state: 0 of 2 peers have answered, "
        assert await shown(0.0) == start + "0 s so far, at most 300 s more"
        here.fetcher.on_frame(ANN, Frame(StateOffer(0, bytes(32), bytes(32), 0, ())))
        assert not here.events
        told = "for offers of a state: 1 of 2 peers have answered, 6 s so far, at most 294 s more"
        assert await shown(6.0) == f"waits {told}" and here.events == [("waiting", {"detail": told})]
        peers.remove(BEN)
        here.fetcher.on_link_down(BEN)
        assert await task is None
        none = "waits for offers of a state: 1 of 2 peers have answered, no offer counts, 8 s so far, next try in 58 s"
        assert await shown(8.0) == none and len(here.events) == 1
        task = await begin()
        again = "waits for offers of a state: 0 of 1 peers have answered, 66 s so far, at most 300 s more"
        assert await shown(66.0) == again and len(here.events) == 2
        task.cancel()
        assert await shown(371.0) == "", "no other try has begun"

    asyncio.run(main())


def test_wait_for_offers_ends_with_the_transfer_or_the_next_round():
    async def main():
        here = Fetcher()
        task, begin, send = fetches(here, 9)
        await asyncio.sleep(0)
        here.fetcher.on_tick()
        assert fetching(here.peer).startswith("waits for offers of a state: 0 of 1 peers")
        await begin()
        assert fetching(here.peer).startswith("71.4 kB of 1.1 MB of the state of round 9")
        send()
        await task
        assert await here.fetcher.fetch([], at_once, patience=60.0, accept=accept_all) is None
        none = "waits for offers of a state: no peer is linked, 0 s so far, next try in 60 s"
        assert fetching(here.peer) == none
        here.fetcher.reset()
        here.fetcher.on_tick()
        assert fetching(here.peer) == ""

    asyncio.run(main())
