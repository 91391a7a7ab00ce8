"""State transfer: a joiner or straggler fetches the state of the last committed round from many peers.

Several peers offer the hashes of their state's chunks; enough of them must agree on one digest. All peers are asked,
and the first answers alone do not decide, because a peer that applies a round answers only when it has finished. A
missing answer that could not change the decision is not waited for. Then only the chunks that differ from the local
ones are fetched, a few at a time from every source that offered that digest, and each chunk is checked. A source that
sends a wrong chunk is not asked again, and neither is one that no longer has the state. If the states are equal, only
the offers are sent. Chunks fetched by a failed try are reused by the next one (`PartialState`) as far as they are still the
same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import blake3
from thinwire.compression.core.types import Buffer
from thinwire.swarm.frame import Frame
from thinwire.swarm.lineage import lineage_of
from thinwire.swarm.messages.registry import (
    CHUNK_BYTES,
    LIFE,
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

STALL = 5
"""Multiple of the patience that a source may take per chunk, and that too few offers are waited for."""

AGED = 5
"""With this many offers, two thirds must agree.

With fewer, more than half must agree, and no offer may be of the same round but different.
"""

LEAP = 2**20
"""Maximum number of rounds that a member can have missed; there is no way back from a round far ahead."""

LAST_ROUND = 2**32 - 2
"""First round whose offers are not accepted, because the next number would not fit a message."""


@dataclass(frozen=True, slots=True)
class FetchedState:
    """State to install: its offer, the chunk hashes, and the chunks that differ from the local ones."""

    offer: StateOffer
    hashes: tuple[Digest, ...]
    chunks: Mapping[int, Buffer]
    sources: tuple[PeerId, ...]


@dataclass(slots=True)
class PartialState:
    """Remains of failed tries: chunks by hash (at most one state's), and peers that sent wrong chunks."""

    chunks: dict[Digest, Buffer] = field(default_factory=dict)
    liars: set[PeerId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class OtherModelState:
    """Result if the offered state belongs to another model; `nbytes` is its size."""

    nbytes: int


Offers = dict[PeerId, tuple[StateOffer, tuple[Digest, ...]]]

Mail = tuple[PeerId, Frame | None]
"""A peer's message about its state, or no frame if the link to the peer is lost."""

Believed = Callable[[Collection[PeerId]], bool]
"""Function that returns True if the common offer of these peers is accepted."""

Agreed = Callable[[Mapping[PeerId, StateOffer], Collection[PeerId], bool], tuple[PeerId, ...] | None]
"""Function that returns the peers whose common offer is accepted.

The result is empty if the offers contradict each other. It is None if more answers are needed first. Arguments: the
offers; the peers that have answered anything; whether no more answers will be awaited.
"""


def state_digest(
    round: int,
    layout: Digest,
    members: Sequence[PeerId],
    hashes: Sequence[Digest],
    lives: bytes = b"",
    lineage: bytes = b"",
) -> Digest:
    """Return blake3 over round, layout, members, their lives, the lineage and the chunk hashes."""
    hasher = blake3.blake3(b"thinwire/state/3\0" + round.to_bytes(8, "big") + layout)
    hasher.update(len(members).to_bytes(8, "big") + b"".join(members))
    hasher.update(len(lives).to_bytes(8, "big") + lives)
    hasher.update(len(lineage).to_bytes(8, "big") + lineage)
    hasher.update(b"".join(hashes))
    return hasher.digest()


def vouched(offer: StateOffer, payload: Buffer) -> tuple[Digest, ...] | None:
    """Return the chunk hashes of an offer, or None if they do not match its digest.

    Also None if the offer has no members: then it is not the result of a round, but the state of a peer that looks for
    a state itself.
    """
    raw = bytes(payload)
    if len(offer.lives) not in (0, LIFE * len(offer.members)):
        return None
    if not offer.members or len(raw) != 32 * ((offer.nbytes + CHUNK_BYTES - 1) // CHUNK_BYTES):
        return None
    hashes = tuple(raw[at : at + 32] for at in range(0, len(raw), 32))
    digest = state_digest(offer.round, offer.layout, offer.members, hashes, offer.lives, lineage_of(offer.forks))
    return hashes if digest == offer.digest else None


async def fetch_state(
    peers: Collection[PeerId],
    send: Callable[[PeerId, Message], None],
    receive_queue: asyncio.Queue[Mail],
    *,
    layout: Digest,
    have: Sequence[Digest],
    nbytes: int,
    patience: float,
    newer_than: int = -1,
    believed: Believed | None = None,
    partial: PartialState | None = None,
    fragment: int = 0,
    turn: asyncio.Semaphore | None = None,
    copy_below: int | None = None,
) -> FetchedState | OtherModelState | None:
    """Fetch the agreed state of the last committed round.

    Returns None if no offer has enough agreement (try again), and OtherModelState if the answers agree on the state of
    another model.

    peers: reachable peers. The collection may change meanwhile: new peers are asked, and departed ones are not waited
    for. have: hashes of the local chunks; nbytes: size of the state; both follow from the layout. patience: seconds to
    wait for all offers, and the unit of STALL. newer_than: rounds up to this one are of no use. believed: decides
    whether the peers behind one offer are enough; useless offers are no dissent then. Without it (a newcomer), more
    than half of the peers that may have a state must have answered and must agree; after STALL times the patience,
    those that have answered are enough. If all have answered, but the swarm was between two rounds, they are asked
    again at once. partial: remains of earlier tries, updated by this one. receive_queue: messages about this `fragment`.
    turn: held during the transfer, to limit the number of simultaneous transfers of several states; after waiting for it,
    offers are requested again, because rounds have continued. copy_below: look for a backup copy of a state whose
    holders are all gone, namely the newest copy of a round below this one, on whichever peer.
    """
    partial = PartialState() if partial is None else partial
    ours = (layout, nbytes)

    def agreed(
        found: Mapping[PeerId, StateOffer], answered: Collection[PeerId], late: bool
    ) -> tuple[PeerId, ...] | None:
        if believed is not None:
            return _believed(found, newer_than, believed, ours) or None
        if copy_below is not None:
            return _newest(found, copy_below, ours) if late or set(peers) <= set(answered) else None
        might = len(found) + len(set(peers).difference(answered))
        own = {peer: offer for peer, offer in found.items() if (offer.layout, offer.nbytes) == ours}
        # A peer that never answers has no state: it may be looking for one itself and must not block us.
        return _agreed(own or found) if 2 * len(found) > might or late else None

    def certain(found: Mapping[PeerId, StateOffer], answered: Collection[PeerId]) -> bool:
        """Return True if enough offers agree already, even if all other peers dissent (newcomers only)."""
        might = len(found) + len(set(peers).difference(answered))
        same = Counter(offer.digest for offer in found.values() if (offer.layout, offer.nbytes) == ours)
        simple = believed is None and copy_below is None
        return simple and might >= AGED and 3 * max(same.values(), default=0) >= 2 * might

    question, away = StateAsk(fragment, copy_below is not None), set[PeerId]()

    async def find() -> tuple[Offers, StateOffer] | OtherModelState | None:
        offers, chosen = await _offers(
            peers, lambda peer: send(peer, question), receive_queue, patience, agreed, certain, away
        )
        offer = offers[chosen[0]][0] if chosen else None
        if offer is None:
            return None
        if (offer.layout, offer.nbytes) != ours:
            return OtherModelState(offer.nbytes)
        return (offers, offer) if offer.round > newer_than else None

    found = await find()
    if not isinstance(found, tuple):
        return found
    async with _held(turn or asyncio.Semaphore(), receive_queue) as waited:
        found = await find() if waited else found
        if not isinstance(found, tuple):
            return found
        return await _fetch(
            *found, away, send, receive_queue, have=have, patience=patience, partial=partial, fragment=fragment
        )


@asynccontextmanager
async def _held(turn: asyncio.Semaphore, receive_queue: asyncio.Queue[Mail]) -> AsyncIterator[bool]:
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
    offers: Offers,
    offer: StateOffer,
    away: Collection[PeerId],
    send: Callable[[PeerId, Message], None],
    receive_queue: asyncio.Queue[Mail],
    *,
    have: Sequence[Digest],
    patience: float,
    partial: PartialState,
    fragment: int,
) -> FetchedState | None:
    """Fetch the state of an offer from all peers that made it and are not `away`.

    Returns None if no source is left.
    """
    chosen = tuple(sorted(peer for peer, (one, _) in offers.items() if one.digest == offer.digest))
    hashes, nbytes = offers[chosen[0]][1], offer.nbytes
    needed = [index for index, found in enumerate(hashes) if index >= len(have) or have[index] != found]
    here = [peer for peer in chosen if peer not in away]
    sources = [peer for peer in here if peer not in partial.liars] or here
    offered = set(hashes)
    partial.chunks = {one: chunk for one, chunk in partial.chunks.items() if one in offered}
    chunks = {index: partial.chunks[hashes[index]] for index in needed if hashes[index] in partial.chunks}
    asked: dict[int, PeerId] = {}
    load: Counter[PeerId] = Counter()
    now = asyncio.get_running_loop().time
    moved = dict.fromkeys(sources, now())

    def give_up(peer: PeerId) -> None:
        """Stop using a source; request the chunks that it still owes from others."""
        if peer in sources:
            sources.remove(peer)
        for index in [index for index, one in asked.items() if one == peer]:
            del asked[index]
        del load[peer]

    while len(chunks) < len(needed):
        for index in needed:
            free = [peer for peer in sources if load[peer] < IN_FLIGHT]
            if not free:
                break
            if index not in chunks and index not in asked:
                peer = min(free, key=lambda one: load[one])
                asked[index] = peer
                moved[peer] = now() if not load[peer] else moved[peer]
                load[peer] += 1
                send(peer, StateFetch(offer.round, index, fragment))
        if not sources:
            return None
        # A source has STALL times the patience for its next chunk, whatever other sources send meanwhile.
        slowest = min((peer for peer in sources if load[peer]), key=lambda one: moved[one])
        try:
            async with asyncio.timeout_at(moved[slowest] + STALL * patience):
                peer, frame = await receive_queue.get()
        except TimeoutError:
            give_up(slowest)
            continue
        if frame is None:
            give_up(peer)
            continue
        message = frame.message
        if not isinstance(message, StateChunk) or message.round != offer.round or asked.get(message.index) != peer:
            continue
        size = min(CHUNK_BYTES, nbytes - message.index * CHUNK_BYTES)
        if len(frame.payload) == size and frame.hashed() == hashes[message.index]:
            chunks[message.index] = partial.chunks[hashes[message.index]] = frame.payload
            del asked[message.index]
            load[peer] -= 1
            moved[peer] = now()
        else:
            if len(frame.payload):  # otherwise the source has moved on to the state of a later round
                partial.liars.add(peer)
            give_up(peer)
    return FetchedState(offer, hashes, chunks, chosen)


async def _offers(
    peers: Collection[PeerId],
    ask: Callable[[PeerId], None],
    receive_queue: asyncio.Queue[Mail],
    patience: float,
    agreed: Agreed,
    certain: Callable[[Mapping[PeerId, StateOffer], Collection[PeerId]], bool],
    away: set[PeerId],
) -> tuple[Offers, tuple[PeerId, ...]]:
    """Collect consistent offers. Returns them, and the peers whose offer is accepted.

    away: receives the peers whose link was lost after they were asked. Their offers count, but they are not waited for,
    and chunks cannot be fetched from them.
    """
    found: Offers = {}
    asked: set[PeerId] = set()
    answered: set[PeerId] = set()

    def offered() -> dict[PeerId, StateOffer]:
        return {peer: offer for peer, (offer, _) in found.items()}

    async def listen() -> None:
        """Wait until all asked and reachable peers have answered, or until those that have are enough."""
        while not answered.issuperset(asked.intersection(peers) - away) and not certain(offered(), answered):
            peer, frame = await receive_queue.get()
            if frame is None:
                away.add(peer)
                continue
            offer = frame.message
            if not isinstance(offer, StateOffer) or peer not in asked:
                continue
            answered.add(peer)
            away.discard(peer)
            hashes = vouched(offer, frame.payload)
            if hashes is not None:
                found[peer] = (offer, hashes)

    waited = hurried = 0
    while True:
        for peer in sorted(peers):  # repeated, because the question may be lost with a link, and rounds continue
            asked.add(peer)
            away.discard(peer)
            ask(peer)
        try:
            async with asyncio.timeout(patience):
                await listen()
            hurried += 1
        except TimeoutError:
            waited += 1
        # Only time given to silent peers makes it late, not the number of times that the others were asked.
        chosen = agreed(offered(), answered, waited == STALL)
        if chosen or not answered or STALL in (waited, hurried):
            break
        if answered.issuperset(peers) and len({offer.round for offer in offered().values()}) > 1:
            found.clear()  # some peers had already made a step that the others were about to make
            answered.clear()
        elif chosen is not None or answered.issuperset(peers):
            break
    return found, chosen or ()


def _believed(
    offers: Mapping[PeerId, StateOffer], newer_than: int, believed: Believed, ours: tuple[Digest, int]
) -> tuple[PeerId, ...]:
    """Return the peers, sorted, whose common offer is accepted.

    The offer must be of a state like `ours` and later than `newer_than`.
    """
    same: dict[tuple[int, Digest], list[PeerId]] = {}
    for peer, offer in offers.items():
        if newer_than < offer.round < min(newer_than + LEAP, LAST_ROUND) and (offer.layout, offer.nbytes) == ours:
            same.setdefault((offer.round, offer.digest), []).append(peer)
    able = [(len(peers), round, sorted(peers)) for (round, _), peers in same.items() if believed(peers)]
    return tuple(max(able)[2]) if able else ()


def _agreed(offers: Mapping[PeerId, StateOffer]) -> tuple[PeerId, ...]:
    """Return the peers, sorted, whose common offer is accepted; empty if there is none."""
    support = Counter((offer.round, offer.digest) for offer in offers.values() if offer.round < LAST_ROUND)
    if not support:
        return ()
    (round, digest), count = max(support.items(), key=lambda item: (item[1], item[0][0]))
    # Offers of other rounds count as dissent, or one peer that names a later round would decide alone.
    same_round = sum(offer.round == round for offer in offers.values())
    few = 2 * count > len(offers) and count == same_round
    if not (3 * count >= 2 * len(offers) if len(offers) >= AGED else few):
        return ()
    return tuple(sorted(peer for peer, offer in offers.items() if offer.digest == digest))


def _newest(offers: Mapping[PeerId, StateOffer], below: int, ours: tuple[Digest, int]) -> tuple[PeerId, ...]:
    """Return the peers, sorted, that have the newest copy of a state like `ours` of a round below `below`.

    Of two copies of the same round, the one that more peers have is taken.
    """
    copies = Counter(
        (offer.round, offer.digest)
        for offer in offers.values()
        if offer.round < below and (offer.layout, offer.nbytes) == ours
    )
    if not copies:
        return ()
    _, digest = max(copies, key=lambda one: (one[0], copies[one], one[1]))
    return tuple(sorted(peer for peer, offer in offers.items() if offer.digest == digest))
