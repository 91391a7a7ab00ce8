"""State transfer: a joiner or straggler fetches the state of the last committed round from many peers.

It searches for the best offer of a state (offer_search.py), then it fetches the chunks that differ from the local ones
(chunk_transfer.py). If the states are equal, only the offers are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from thinwire.collectives.state_sync.chunk_transfer import ChunkTransfer, PartialState
from thinwire.collectives.state_sync.offer_search import Accept, OfferSearch, StateMessage, accept_all
from thinwire.collectives.state_sync.state_offers import LocalState, Offers, Replay, best, newest, replay_of
from thinwire.compression.core.types import Buffer
from thinwire.swarm.messages.registry import (
    Chain,
    Digest,
    Message,
    PeerId,
    StateAsk,
    StateOffer,
)


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


@dataclass(frozen=True, slots=True)
class OtherModelState:
    """Result if the offered state belongs to another model; `nbytes` is its size."""

    nbytes: int


async def fetch_state(
    peers: Collection[PeerId],
    send: Callable[[PeerId, Message], None],
    receive_queue: asyncio.Queue[StateMessage],
    ours: LocalState,
    *,
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

    - `peers`: reachable peers. The collection may change meanwhile: new peers are asked, and departed ones are not waited for.
    - `receive_queue`: messages about this `fragment`.
    - `patience`: seconds to wait for all offers. After MOST_PATIENCES of them the peers that have answered are enough. If all
      have answered, but were between two rounds, they are asked again at once.
    - `accept`: decides which offers count.
    - `partial`: remains of earlier tries, updated by this one.
    - `turn`: held during the transfer, to limit the number of simultaneous transfers of several states. After a wait for it,
      offers are requested again, because rounds have continued.
    - `copy_below`: look for a backup copy of a state whose holders have all departed: for the newest copy of a round below
      this one, on any peer.
    - `reached`: returns the round of the local state if the offered one continues it, else None.
    """
    partial = PartialState() if partial is None else partial
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
        return (search, offer) if ours.has_model_of(offer) else OtherModelState(offer.nbytes)

    found = await find()
    if not isinstance(found, tuple):
        return found
    async with _held(turn or asyncio.Semaphore(), receive_queue) as waited:
        found = await find() if waited else found
        if not isinstance(found, tuple):
            return found
        search, offer = found
        if (replay := replay_of(search.offers, offer, reached(offer), ours)) is not None:
            return replay
        return await _fetch(
            search, offer, send, receive_queue, have=ours.hashes, patience=patience, partial=partial, fragment=fragment
        )


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
    chosen = tuple(sorted(peer for peer, one in search.offers.items() if one.offer.digest == offer.digest))
    offered = search.offers[chosen[0]]
    here = [peer for peer in chosen if peer not in search.away]
    sources = [peer for peer in here if peer not in partial.liars] or here
    try:
        transfer = ChunkTransfer(
            offered, sources, partial, send, receive_queue, have=have, patience=patience, fragment=fragment
        )
        if not await transfer.run():
            return None
    finally:
        partial.transfer = None
    return FetchedState(offer, offered.hashes, transfer.chunks, chosen, offered.chain)
