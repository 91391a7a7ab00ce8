import asyncio

import blake3
from thinwire.collectives.statesync import fetch_state, state_digest
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import StateAsk, StateChunk, StateFetch, StateOffer

LAYOUT = bytes(32)
FOUNDER, SECOND, THIRD = (bytes([n]) * 32 for n in (1, 2, 3))


class Source:
    """A peer that offers `raw` (one chunk) as the state of `members` after `round`."""

    def __init__(self, raw, *, round=0, members=()):
        self.raw, self.hashes = raw, [blake3.blake3(raw).digest()]
        digest = state_digest(round, LAYOUT, members, self.hashes)
        self.offer = StateOffer(round, digest, LAYOUT, len(raw), members)

    def answer(self, message):
        if isinstance(message, StateAsk):
            return Frame(self.offer, b"".join(self.hashes))
        assert isinstance(message, StateFetch)
        return Frame(StateChunk(message.round, message.index), self.raw)


def fetch(sources, have):
    async def run():
        inbox = asyncio.Queue()

        def send(peer, message):
            inbox.put_nowait((peer, sources[peer].answer(message)))

        hashes = [blake3.blake3(have).digest()]
        # Everybody answers at once, so the patience is never waited for.
        return await fetch_state(sources, send, inbox, layout=LAYOUT, have=hashes, nbytes=len(have), patience=60.0)

    return asyncio.run(run())


def test_what_differs_is_fetched():
    fetched = fetch({FOUNDER: Source(b"new!", round=3, members=(FOUNDER,))}, b"old.")
    assert fetched.offer.round == 3 and fetched.chunks == {0: b"new!"} and fetched.sources == (FOUNDER,)


def test_joiners_that_ask_each_other_follow_the_founder():
    joiner = Source(b"same")
    fetched = fetch({FOUNDER: Source(b"same", members=(FOUNDER,)), SECOND: joiner, THIRD: joiner}, b"same")
    assert fetched.offer.members == (FOUNDER,) and fetched.sources == (FOUNDER,) and not fetched.chunks


def test_joiners_without_a_founder_have_nothing_to_fetch():
    assert fetch({SECOND: Source(b"same"), THIRD: Source(b"same")}, b"same") is None
