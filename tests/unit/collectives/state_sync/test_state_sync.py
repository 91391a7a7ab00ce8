import asyncio
import weakref
from collections import Counter

import blake3
import numpy as np
import pytest
from kit.outer.chains import accepting, opened
from thinwire.collectives.state_sync import chunk_transfer
from thinwire.collectives.state_sync.chunk_transfer import PartialState
from thinwire.collectives.state_sync.state_offers import LocalState, Replay, state_digest
from thinwire.collectives.state_sync.state_sync import OtherModelState, fetch_state
from thinwire.sims.engine import virtual_loop
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import CHUNK_BYTES, StateAsk, StateChunk, StateFetch, StateOffer

LAYOUT, OTHER = bytes(32), bytes([9]) * 32
FOUNDER, SECOND, THIRD = (bytes([n]) * 32 for n in (1, 2, 3))


class Source:
    """A peer that offers `raw` (one chunk) as the state of `members` after `round`."""

    def __init__(self, raw, *, round=0, members=(), layout=LAYOUT, replay=0, results=0):
        self.raw, self.hashes = raw, [blake3.blake3(raw).digest()]
        digest = state_digest(round, layout, members, self.hashes)
        self.offer = StateOffer(round, digest, layout, len(raw), members, replay=replay, results=results)

    def answer(self, message):
        if isinstance(message, StateAsk):
            return Frame(self.offer, b"".join(self.hashes))
        assert isinstance(message, StateFetch)
        return Frame(StateChunk(message.round, message.index), self.raw)


def fetch(sources, have, **more):
    async def run():
        receive_queue = asyncio.Queue()

        def send(peer, message):
            receive_queue.put_nowait((peer, opened(sources[peer].answer(message))))

        hashes = [blake3.blake3(have).digest()]
        # All answer at once, so the patience is never used up.
        return await fetch_state(
            sources, send, receive_queue, LocalState(LAYOUT, len(have), hashes), patience=60.0, **more
        )

    return asyncio.run(run())


def test_only_differing_state_is_fetched():
    fetched = fetch({FOUNDER: Source(b"new!", round=3, members=(FOUNDER,))}, b"old.")
    assert fetched.offer.round == 3 and fetched.chunks == {0: b"new!"} and fetched.sources == (FOUNDER,)


def test_fetched_state_holds_no_received_buffer():
    """The transport uses its buffers again; it would retain as many as were held at once."""
    raw, buffers = bytes(range(256)) * (CHUNK_BYTES // 128) + b"end", []

    class Sender(Source):
        def answer(self, message):
            if isinstance(message, StateAsk):
                return super().answer(message)
            at = message.index * CHUNK_BYTES
            buffer = np.frombuffer(raw[at : at + CHUNK_BYTES], np.uint8).copy()
            buffers.append(weakref.ref(buffer))
            return Frame(StateChunk(message.round, message.index), buffer.data)

    source = Sender(raw, round=3, members=(FOUNDER,))
    source.hashes = [blake3.blake3(raw[at : at + CHUNK_BYTES]).digest() for at in range(0, len(raw), CHUNK_BYTES)]
    digest = state_digest(3, LAYOUT, (FOUNDER,), source.hashes)
    source.offer = StateOffer(3, digest, LAYOUT, len(raw), (FOUNDER,))
    fetched = fetch({FOUNDER: source}, bytes(len(raw)))
    assert b"".join(fetched.chunks[index] for index in range(3)) == raw
    assert [buffer() for buffer in buffers] == [None] * 3


def test_memory_of_a_fetched_state_is_freed_while_its_chunks_are_taken_out(monkeypatch):
    monkeypatch.setattr(chunk_transfer, "BLOCK", 2)
    raw = bytes(range(256)) * (CHUNK_BYTES // 128) + b"end"
    source = many(raw, 3)
    offer = source.answer

    def answer(message):
        if isinstance(message, StateAsk):
            return offer(message)
        at = message.index * CHUNK_BYTES
        return Frame(StateChunk(message.round, message.index), raw[at : at + CHUNK_BYTES])

    source.answer = answer
    fetched = fetch({FOUNDER: source}, bytes(len(raw)))
    first, last = weakref.ref(fetched.chunks[0].obj), weakref.ref(fetched.chunks[2].obj)
    del fetched.chunks[2]
    assert last() is None
    del fetched.chunks[1]
    assert first() is not None
    del fetched.chunks[0]
    assert first() is None


def many(raw, round):
    """Return a source of a state of several chunks."""
    source = Source(raw, round=round, members=(FOUNDER,))
    source.hashes = [blake3.blake3(raw[at : at + CHUNK_BYTES]).digest() for at in range(0, len(raw), CHUNK_BYTES)]
    digest = state_digest(round, LAYOUT, (FOUNDER,), source.hashes)
    source.offer = StateOffer(round, digest, LAYOUT, len(raw), (FOUNDER,))
    source.asked = []

    def answer(message):
        if isinstance(message, StateAsk):
            return Frame(source.offer, b"".join(source.hashes))
        source.asked.append(message.index)
        at = message.index * CHUNK_BYTES
        # The source has moved on before the last chunk.
        return Frame(
            StateChunk(message.round, message.index), b"" if message.index == 2 else raw[at : at + CHUNK_BYTES]
        )

    source.answer = answer
    return source


def test_chunks_of_a_failed_try_are_reused_and_do_not_keep_its_memory():
    raw, partial = bytes(2 * CHUNK_BYTES) + b"end", PartialState()
    first, second = many(raw, 3), many(b"new" + raw[3:], 4)
    assert fetch({FOUNDER: first}, b"?" * len(raw), partial=partial) is None
    earlier = {id(chunk.obj) for chunk in partial.chunks.values()}
    assert fetch({FOUNDER: second}, b"?" * len(raw), partial=partial) is None
    assert sorted(second.asked) == [0, 2]  # chunk 1 is here
    now = {id(chunk.obj) for chunk in partial.chunks.values()}
    assert len(partial.chunks) == 2 and len(earlier) == len(now) == 1 and earlier != now


def test_chunk_that_changes_after_its_arrival_is_not_accepted():
    """Memory that another process shares with us may change after the transport has hashed it."""

    class Sharer(Source):
        def answer(self, message):
            if isinstance(message, StateAsk):
                return super().answer(message)
            return Frame(StateChunk(message.round, message.index), b"evil", digest=self.hashes[0])

    assert fetch({FOUNDER: Sharer(b"good", round=3, members=(FOUNDER,))}, b"old.") is None


def test_joiners_that_ask_each_other_follow_the_founder():
    joiner = Source(b"same")
    fetched = fetch({FOUNDER: Source(b"same", members=(FOUNDER,)), SECOND: joiner, THIRD: joiner}, b"same")
    assert fetched.offer.members == (FOUNDER,) and fetched.sources == (FOUNDER,) and not fetched.chunks


def test_joiners_without_founder_have_nothing_to_fetch():
    assert fetch({SECOND: Source(b"same"), THIRD: Source(b"same")}, b"same") is None


def test_swarm_with_another_model_is_foreign():
    other = Source(b"another", members=(FOUNDER,), layout=OTHER)
    assert fetch({FOUNDER: other, SECOND: other}, b"same") == OtherModelState(7)
    assert fetch({FOUNDER: Source(b"same", members=(FOUNDER,), layout=OTHER)}, b"same") == OtherModelState(4)


def test_one_peer_with_another_model_does_not_make_the_swarm_foreign():
    honest = Source(b"same", members=(FOUNDER,))
    fetched = fetch({FOUNDER: honest, SECOND: Source(b"another", members=(SECOND,), layout=OTHER)}, b"old.")
    assert fetched.sources == (FOUNDER,)


def test_offer_that_does_not_match_its_digest_is_ignored():
    liar = Source(b"another", members=(FOUNDER,), layout=OTHER)
    liar.hashes = [bytes(32)]
    assert fetch({FOUNDER: liar}, b"same") is None


def test_unanswered_or_outdated_sources_are_asked_again():
    """A link breaks at the first request, and the other answer names a round that is soon over."""

    async def main():
        loop, receive_queue, lost = asyncio.get_running_loop(), asyncio.Queue(), {SECOND}

        def send(peer, message):
            if peer in lost:
                lost.remove(peer)
                return
            raw = b"this" if loop.time() < 1.0 else b"next"
            source = Source(raw, round=5 + (loop.time() >= 1.0), members=(FOUNDER, SECOND))
            receive_queue.put_nowait((peer, opened(source.answer(message))))

        fetched = await fetch_state(
            (FOUNDER, SECOND),
            send,
            receive_queue,
            LocalState(LAYOUT, 4, [bytes(32)]),
            patience=2.0,
            accept=accepting(lambda offer, chain: offer.round > 4),
        )
        return fetched, loop.time()

    fetched, took = virtual_loop.run(main(), seed=1)
    assert fetched.offer.round == 6 and fetched.sources == (FOUNDER, SECOND) and took < 2.1


@pytest.mark.parametrize("when", [0.0, 2.1])
def test_lost_peer_is_no_source(when):
    """Its offer counts, and its requests move to another peer at once, not after five patiences."""

    async def main():
        loop, receive_queue = asyncio.get_running_loop(), asyncio.Queue()
        source = Source(b"this", round=5, members=(FOUNDER, SECOND))
        loop.call_at(when, receive_queue.put_nowait, (FOUNDER, None))

        def send(peer, message):
            if peer == SECOND or (peer == FOUNDER and isinstance(message, StateAsk)):
                receive_queue.put_nowait((peer, opened(source.answer(message))))

        fetched = await fetch_state(
            (FOUNDER, SECOND, THIRD), send, receive_queue, LocalState(LAYOUT, 4, [bytes(32)]), patience=2.0
        )
        return fetched, loop.time()

    fetched, took = virtual_loop.run(main(), seed=1)
    assert fetched.sources == (FOUNDER, SECOND) and fetched.chunks == {0: b"this"} and took < 2.2


def test_new_peers_are_asked_and_lost_peers_are_not_waited_for():
    async def main():
        loop, receive_queue, peers = asyncio.get_running_loop(), asyncio.Queue(), {SECOND, THIRD}
        source = Source(b"this", round=5, members=(FOUNDER, SECOND, THIRD))
        loop.call_at(1.0, peers.remove, THIRD)
        loop.call_at(1.0, peers.add, FOUNDER)

        def send(peer, message):
            if peer != THIRD:
                receive_queue.put_nowait((peer, opened(source.answer(message))))

        fetched = await fetch_state(peers, send, receive_queue, LocalState(LAYOUT, 4, [bytes(32)]), patience=2.0)
        return fetched, loop.time()

    fetched, took = virtual_loop.run(main(), seed=1)
    assert fetched.sources == (FOUNDER, SECOND) and took < 2.1


def test_peers_that_appear_after_all_answers_are_not_waited_for():
    """Peers that start together see each other gradually: all have the founder's offer, newcomers have none."""

    async def main():
        loop, receive_queue, peers = asyncio.get_running_loop(), asyncio.Queue(), {FOUNDER}
        held, newcomer = Source(b"this", round=5, members=(FOUNDER,)), Source(b"this")

        def send(peer, message):
            loop.call_later(
                0.1, receive_queue.put_nowait, (peer, opened((newcomer if peer != FOUNDER else held).answer(message)))
            )

        loop.call_at(0.05, peers.update, (SECOND, THIRD))
        fetched = await fetch_state(peers, send, receive_queue, LocalState(LAYOUT, 4, [bytes(32)]), patience=2.0)
        return fetched, loop.time()

    fetched, took = virtual_loop.run(main(), seed=1)
    assert fetched.sources == (FOUNDER,) and took < 0.5


def test_newest_copy_wins():
    """Copies of different rounds are no contradiction; a copy of an impossible round is ignored."""
    sources = {
        FOUNDER: Source(b"old.", round=3, members=(THIRD,)),
        SECOND: Source(b"new!", round=7, members=(THIRD,)),
        THIRD: Source(b"lie!", round=90, members=(THIRD,)),
    }
    fetched = fetch(sources, b"none", copy_below=8)
    assert fetched.offer.round == 7 and fetched.chunks == {0: b"new!"} and fetched.sources == (SECOND,)
    assert fetch(sources, b"none", copy_below=7).offer.round == 3
    assert fetch(sources, b"none", copy_below=3) is None


def test_majority_copy_of_a_round_wins():
    one, two = Source(b"one.", round=5, members=(FOUNDER,)), Source(b"two.", round=5, members=(FOUNDER,))
    assert fetch({FOUNDER: one, SECOND: two, THIRD: two}, b"none", copy_below=9).chunks == {0: b"two."}
    assert fetch({FOUNDER: one, SECOND: one, THIRD: two}, b"none", copy_below=9).chunks == {0: b"one."}
    other = Source(b"else", round=6, members=(FOUNDER,), layout=OTHER)
    assert fetch({FOUNDER: one, SECOND: other}, b"none", copy_below=9).chunks == {0: b"one."}


def test_state_request_does_not_ask_for_copies():
    asked = []

    class Noted(Source):
        def answer(self, message):
            asked.append(message)
            return super().answer(message)

    source = Noted(b"same", round=1, members=(FOUNDER,))
    fetch({FOUNDER: source}, b"same")
    fetch({FOUNDER: source}, b"same", copy_below=2)
    assert [message.copy for message in asked] == [False, True]


class Crowd:
    """Peers that answer at once with `says` (None: nothing); those in `gone` turn out to be dead."""

    def __init__(self, peers, says, gone=()):
        self.peers, self.says, self.gone, self.asked, self.receive_queue = set(peers), says, set(gone), [], None

    def send(self, peer, message):
        self.asked.append((peer, type(message)))
        if peer in self.gone:
            self.peers.discard(peer)
            self.receive_queue.put_nowait((peer, None))
        elif (source := self.says(peer)) is not None:
            self.receive_queue.put_nowait((peer, opened(source.answer(message))))

    def fetch(self, **more):
        """Return the fetched state and the virtual seconds that it took."""

        async def main():
            self.receive_queue = asyncio.Queue()
            fetched = await fetch_state(
                self.peers,
                self.send,
                self.receive_queue,
                LocalState(LAYOUT, 4, [bytes(32)]),
                patience=2.0,
                **more,
            )
            return fetched, asyncio.get_running_loop().time()

        return virtual_loop.run(main(), seed=1)


SIX = tuple(bytes([n]) * 32 for n in range(1, 7))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_departed_peer_is_not_waited_for(count):
    peers = SIX[:count]
    held = Source(b"new!", round=3, members=peers)
    fetched, took = Crowd(peers, lambda peer: held, gone=peers[:1]).fetch()
    assert fetched.offer.round == 3 and set(fetched.sources) <= set(peers[1:]) and took == 0


@pytest.mark.parametrize("silent, waited", [(2, 0.0), (3, 10.0)])
def test_silent_peer_is_waited_for_while_it_could_change_the_result(silent, waited):
    held = Source(b"new!", round=3, members=SIX)
    fetched, took = Crowd(SIX, lambda peer: None if peer in SIX[:silent] else held).fetch()
    assert fetched.offer.round == 3 and took == waited


def test_half_of_the_members_are_not_enough_if_the_others_contradict():
    held, other = Source(b"new!", round=3, members=SIX), Source(b"else", round=3, members=SIX)
    fetched, _ = Crowd(SIX, lambda peer: other if peer in SIX[3:] else held).fetch()
    assert fetched is None
    fetched, _ = Crowd(SIX[:4], lambda peer: other if peer == SIX[3] else held).fetch()
    assert fetched.sources == SIX[:3]


def test_swarm_between_two_rounds_is_asked_again_at_once():
    """Some have made a step that the others are about to make: not a contradiction that needs a wait."""
    old, new = Source(b"old.", round=3, members=SIX), Source(b"new!", round=4, members=SIX)
    asked = Counter()

    def says(peer):
        asked[peer] += 1
        return old if peer in SIX[:3] and asked[peer] == 1 else new

    fetched, took = Crowd(SIX, says).fetch()
    assert fetched.offer.round == 4 and took == 0


def test_swarm_that_stays_between_rounds_is_asked_a_few_times():
    old, new = Source(b"old.", round=3, members=SIX), Source(b"new!", round=4, members=SIX)
    crowd = Crowd(SIX, lambda peer: old if peer in SIX[:3] else new)
    fetched, took = crowd.fetch()
    asked = [peer for peer, kind in crowd.asked if kind is StateAsk]
    assert fetched.sources == SIX[3:] and took == 0 and len(asked) <= 5 * len(SIX)


def test_search_ends_when_all_sources_are_gone():
    assert Crowd(SIX, lambda peer: None, gone=SIX).fetch() == (None, 0)


def test_only_source_is_not_waited_for_when_gone():
    """If replicas differ, peers are asked one after the other, and the order stays."""

    async def main():
        receive_queue = asyncio.Queue()

        def send(peer, message):
            receive_queue.put_nowait((peer, None))

        fetched = await fetch_state([FOUNDER], send, receive_queue, LocalState(LAYOUT, 4, [bytes(32)]), patience=2.0)
        return fetched, asyncio.get_running_loop().time()

    assert virtual_loop.run(main(), seed=1) == (None, 0)


def test_chunk_of_dead_source_is_asked_elsewhere_at_once():
    """Its chunk is asked of another, not after five patiences."""
    held, peers = Source(b"new!", round=3, members=SIX), SIX[:2]
    crowd = Crowd(peers, lambda peer: held)
    send = crowd.send

    def dies(peer, message):
        if isinstance(message, StateFetch) and not crowd.gone:
            crowd.gone = {peer}
        send(peer, message)

    crowd.send = dies
    fetched, took = crowd.fetch()
    assert fetched.chunks == {0: b"new!"} and took == 0


@pytest.mark.parametrize(
    ("reached", "replay", "results", "replays"),
    [
        (6, 4, 4 * CHUNK_BYTES // 3, True),  # three of four rounds have less than one chunk
        (6, 4, 4 * CHUNK_BYTES // 3 + 4, False),
        (5, 3, 3, False),  # the oldest of four rounds is gone
        (9, 3, 3, False),  # nothing is missing
        (12, 3, 3, False),
        (None, 9, 9, False),  # the state continues another one
    ],
)
def test_rounds_since_the_local_state_replace_the_transfer_if_they_are_shorter(reached, replay, results, replays):
    source = Source(b"new!", round=9, members=(FOUNDER,), replay=replay, results=results)
    found = fetch({FOUNDER: source}, b"old.", reached=lambda offer: reached)
    assert isinstance(found, Replay) == replays
    assert found.sources == (FOUNDER,) and (found.round if replays else found.offer.round) == 9


def test_equal_state_is_not_replayed():
    source = Source(b"same", round=9, members=(FOUNDER,), replay=3, results=3)
    assert not isinstance(fetch({FOUNDER: source}, b"same", reached=lambda offer: 8), Replay)


def test_only_sources_with_the_rounds_count_for_a_replay():
    """The first peer with the state has no results."""
    members = (FOUNDER, SECOND)
    sources = {
        peer: Source(b"new!", round=9, members=members, replay=n, results=40)
        for peer, n in zip(members, (0, 4), strict=True)
    }
    found = fetch(sources, b"old.", reached=lambda offer: 7)
    assert found == Replay(9, 2, 20, (SECOND,))
