"""State transfer: a joiner or straggler fetches the state of the last committed round from many peers.

After the search for the best offer (offer_search.py), only the chunks that differ from the local ones are fetched, a few at a
time from every source that offered that digest, and each chunk is checked. A source that sends a wrong chunk is not asked
again, and neither is one that no longer has the state. Late chunks of a source are requested from others, too: the source may
be slow, or may never send them. If the states are equal, only the offers are sent. Chunks fetched by a failed try are reused
by the next one (`PartialState`) if they are still the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import blake3
import numpy as np
from thinwire.collectives.state_sync.offer_search import STALL, Accept, OfferSearch, Search, StateMessage, accept_all
from thinwire.collectives.state_sync.state_offers import Offered, Offers, Replay, best, newest, replay_of
from thinwire.compression.core.types import Buffer
from thinwire.swarm.messages.registry import (
    CHUNK_BYTES,
    Chain,
    Digest,
    Message,
    PeerId,
    StateAsk,
    StateChunk,
    StateFetch,
    StateOffer,
)

IN_FLIGHT = 4
"""Number of chunks requested from one source at a time: enough to fill its link, little to lose."""

BLOCK = 40
"""Chunks in one piece of memory, which returns to the system with its last chunk.

The C library retains freed pieces of up to 32 MiB.
"""

SLOWER = 3
"""Multiple of the longest time between two chunks of a source: it is late only after that, too."""

SILENCE = 600.0
"""Seconds without a chunk of any source after which a transfer has failed.

Sources pause between chunks (send_priority.py): for 96 s at 1 Mbit/s, and longer if several peers join.
"""

LATEST = 120.0
"""Seconds after which any source counts as late, so that none can delay a transfer for long."""


@dataclass(frozen=True, slots=True)
class FetchedState:
    """State to install: offer, chunk hashes, the chunks that differ from the local ones, and chain.

    `Replica.install` takes the chunks out.
    """

    offer: StateOffer
    hashes: tuple[Digest, ...]
    chunks: dict[int, Buffer]
    sources: tuple[PeerId, ...]
    chain: Chain = ()


@dataclass(slots=True)
class Transfer:
    """Transfer of the state of a round, in progress.

    nbytes: size of the state. here: bytes of it that are present. sources: peers that may be asked for chunks.
    """

    round: int
    nbytes: int
    here: int
    sources: Sequence[PeerId]


@dataclass(slots=True)
class PartialState:
    """Chunks of failed tries by hash, of one state at most, and peers that sent wrong chunks.

    `transfer`: the try in progress, if chunks are fetched. `search`: the wait for offers before it.
    """

    chunks: dict[Digest, Buffer] = field(default_factory=dict)
    liars: set[PeerId] = field(default_factory=set)
    transfer: Transfer | None = None
    search: Search | None = None


@dataclass(frozen=True, slots=True)
class OtherModelState:
    """Result if the offered state belongs to another model; `nbytes` is its size."""

    nbytes: int


async def fetch_state(
    peers: Collection[PeerId],
    send: Callable[[PeerId, Message], None],
    receive_queue: asyncio.Queue[StateMessage],
    *,
    layout: Digest,
    have: Sequence[Digest],
    nbytes: int,
    patience: float,
    accept: Accept = accept_all,
    partial: PartialState | None = None,
    fragment: int = 0,
    turn: asyncio.Semaphore | None = None,
    copy_below: int | None = None,
    reached: Callable[[StateOffer], int | None] = lambda offer: None,
) -> FetchedState | OtherModelState | Replay | None:
    """Fetch the state of the last committed round.

    Returns None if no peer offers a state that is accepted (try again), OtherModelState if only states of another
    model are offered, and Replay if the results of the rounds since the local state have fewer bytes.

    peers: reachable peers. The collection may change meanwhile: new peers are asked, and departed ones are not waited
    for. have: hashes of the local chunks; nbytes: size of the state; both follow from the layout. patience: seconds to
    wait for all offers, and the unit of STALL: after STALL times the patience the peers that have answered are enough. If
    all have answered, but were between two rounds, they are asked again at once. accept: decides which offers count.
    partial: remains of earlier tries, updated by this one. receive_queue: messages about this `fragment`.
    turn: held during the transfer, to limit the number of simultaneous transfers of several states; after waiting for it,
    offers are requested again, because rounds have continued. copy_below: look for a backup copy of a state whose
    holders have all departed, namely the newest copy of a round below this one, on any peer. reached: returns the round
    of the local state if the offered one continues it, else None.
    """
    partial = PartialState() if partial is None else partial
    ours = (layout, nbytes)
    question = StateAsk(fragment, copy_below is not None)

    def choose(found: Offers) -> tuple[tuple[PeerId, ...], bool]:
        return best(found, ours, peers) if copy_below is None else (newest(found, copy_below, ours), False)

    async def find() -> tuple[OfferSearch, StateOffer] | OtherModelState | None:
        search = OfferSearch(peers, lambda peer: send(peer, question), receive_queue, patience, accept, choose)
        partial.search = search.progress
        offer = await search.run()
        if offer is None:
            partial.search = replace(search.progress, limit=patience, over=True)
            return None
        partial.search = None
        return (search, offer) if (offer.layout, offer.nbytes) == ours else OtherModelState(offer.nbytes)

    found = await find()
    if not isinstance(found, tuple):
        return found
    async with _held(turn or asyncio.Semaphore(), receive_queue) as waited:
        found = await find() if waited else found
        if not isinstance(found, tuple):
            return found
        search, offer = found
        if (replay := replay_of(search.offers, offer, reached(offer), have)) is not None:
            return replay
        try:
            return await _fetch(
                search, offer, send, receive_queue, have=have, patience=patience, partial=partial, fragment=fragment
            )
        finally:
            partial.transfer = None


@asynccontextmanager
async def _held(turn: asyncio.Semaphore, receive_queue: asyncio.Queue[StateMessage]) -> AsyncIterator[bool]:
    """Hold `turn`; yields True if we had to wait for it.

    Messages that arrive during the wait are discarded, because the peers will be asked again.
    """

    async def forget() -> None:
        while True:
            await receive_queue.get()

    waits = turn.locked()
    forgetting = asyncio.create_task(forget()) if waits else None
    try:
        await turn.acquire()
    finally:
        if forgetting is not None:
            forgetting.cancel()
    try:
        yield waits
    finally:
        turn.release()


async def _fetch(
    search: OfferSearch,
    offer: StateOffer,
    send: Callable[[PeerId, Message], None],
    receive_queue: asyncio.Queue[StateMessage],
    *,
    have: Sequence[Digest],
    patience: float,
    partial: PartialState,
    fragment: int,
) -> FetchedState | None:
    """Fetch the state of an offer from all peers that made it and whose links are not lost.

    Returns None if no source is left.
    """
    offers = search.offers
    chosen = tuple(sorted(peer for peer, one in offers.items() if one.offer.digest == offer.digest))
    hashes, nbytes = offers[chosen[0]].hashes, offer.nbytes
    needed = [index for index, found in enumerate(hashes) if index >= len(have) or have[index] != found]
    here = [peer for peer in chosen if peer not in search.away]
    sources = [peer for peer in here if peer not in partial.liars] or here
    # Chunks are copied to here, so that the transport can use its buffers again: it would retain as many as were held at once.
    blocks = [np.empty(BLOCK * CHUNK_BYTES, np.uint8).data for _ in range(0, len(needed), BLOCK)]
    places = {
        index: blocks[place // BLOCK][place % BLOCK * CHUNK_BYTES :][: min(CHUNK_BYTES, nbytes - index * CHUNK_BYTES)]
        for place, index in enumerate(needed)
    }
    del blocks  # each lasts until its last chunk is installed
    chunks: dict[int, Buffer] = {}
    for index in needed:
        if (earlier := partial.chunks.get(hashes[index])) is not None:
            places[index][:] = earlier
            chunks[index] = places[index]
    partial.chunks = {hashes[index]: chunk for index, chunk in chunks.items()}
    missing = sum(len(place) for index, place in places.items() if index not in chunks)
    partial.transfer = transfer = Transfer(offer.round, nbytes, nbytes - missing, sources)
    asked: dict[int, list[PeerId]] = {}
    load: Counter[PeerId] = Counter()
    now = asyncio.get_running_loop().time
    moved = dict.fromkeys(sources, now())
    late: set[PeerId] = set()
    last, longest = now(), dict.fromkeys(sources, STALL * patience)

    def give_up(peer: PeerId) -> None:
        """Stop using a source; request the chunks that it still owes from others."""
        if peer in sources:
            sources.remove(peer)
        for askers in asked.values():
            askers[:] = [one for one in askers if one != peer]
        del load[peer]

    while len(chunks) < len(needed):
        for index in needed:
            if index in chunks or not late.issuperset(askers := asked.setdefault(index, [])):
                continue
            free = [peer for peer in sources if load[peer] < IN_FLIGHT and peer not in late and peer not in askers]
            if not free:
                continue
            peer = min(free, key=lambda one: load[one])
            askers.append(peer)
            moved[peer] = now() if not load[peer] else moved[peer]
            load[peer] += 1
            send(peer, StateFetch(offer.round, index, fragment))
        if not sources:
            return None
        # A source has `longest` for its next chunk, whatever other sources send meanwhile.
        owing = [peer for peer in sources if load[peer] and peer not in late]
        slowest = min(owing, key=lambda one: moved[one] + longest[one], default=None)
        until = last + SILENCE if slowest is None else moved[slowest] + longest[slowest]
        try:
            async with asyncio.timeout_at(until):
                peer, frame = await receive_queue.get()
        except TimeoutError:
            if slowest is None:
                return None
            late.add(slowest)
            continue
        if frame is None:
            give_up(peer)
            continue
        if isinstance(frame, Offered):
            continue
        message = frame.message
        if not isinstance(message, StateChunk) or message.round != offer.round:
            continue
        if message.index not in asked or peer not in (askers := asked[message.index]):
            continue
        askers.remove(peer)
        load[peer] -= 1
        place, whole = places[message.index], len(frame.payload) == len(places[message.index])
        if whole and message.index not in chunks:
            place[:] = frame.payload
            found = blake3.blake3(
                place
            ).digest()  # of the copy: another process may change memory that it shares with us
        else:
            found = frame.hashed()
        if whole and found == hashes[message.index]:
            chunks[message.index] = partial.chunks[hashes[message.index]] = place
            longest[peer] = min(LATEST, max(longest[peer], SLOWER * (now() - moved[peer])))
            last = moved[peer] = now()
            transfer.here += len(place)
            late.discard(peer)
        else:
            if len(frame.payload):  # otherwise the source has moved on to the state of a later round
                partial.liars.add(peer)
            give_up(peer)
    return FetchedState(offer, hashes, chunks, chosen, offers[chosen[0]].chain)
