"""How a joiner or a straggler gets the state of the last committed round: from many peers at once, each chunk checked.

Several peers offer the hashes of their state's chunks; enough of them must agree on one digest, of all that were asked and not
only of those that answer first: who applies a round answers when it is done with it. Nobody is waited for whose answer could
change nothing. Then only chunks that
differ from what is here are fetched, a few at a time from every source that offered that digest; a source that sends a wrong
chunk is not asked again, one that has no more of it is left out. Equal states cost nothing but the offers. What has been
fetched when a try fails is of use to the next one (`Partial`), as far as the chunks are the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import blake3
from thinwire.compression.codec import Buffer
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import (
    CHUNK_BYTES,
    Digest,
    Message,
    PeerId,
    StateAsk,
    StateChunk,
    StateFetch,
    StateOffer,
)

IN_FLIGHT = 4
"""Chunks asked of one source at a time: enough to fill its link, little to lose with it."""

STALL = 5
"""Patiences that a source may take for one chunk, and that offers are waited for while they are too few."""

AGED = 5
"""With this many offers two thirds must agree; with fewer more than half, and all that speak of the same round."""

LEAP = 2**20
"""Rounds that a member can have missed: from one that is far ahead of all others there would be no way back."""

LAST_ROUND = 2**32 - 2
"""No round from here on: the next one's number would not fit a message."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A state to install: its offer, the chunk hashes, and the chunks that differ from what was here."""

    offer: StateOffer
    hashes: tuple[Digest, ...]
    chunks: Mapping[int, Buffer]
    sources: tuple[PeerId, ...]


@dataclass(slots=True)
class Partial:
    """What tries that failed have left behind: chunks by their hash (never more than one state's), and who sent wrong ones."""

    chunks: dict[Digest, Buffer] = field(default_factory=dict)
    liars: set[PeerId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Foreign:
    """The state that is offered is of another model: `nbytes` are its bytes."""

    nbytes: int


Offers = dict[PeerId, tuple[StateOffer, tuple[Digest, ...]]]

Mail = tuple[PeerId, Frame | None]
"""What a peer says about its state, or (no frame) that the link to it is lost."""

Believed = Callable[[Collection[PeerId]], bool]
"""Whether the common word of these peers is to be believed."""

Agreed = Callable[[Mapping[PeerId, StateOffer], Collection[PeerId], bool], tuple[PeerId, ...] | None]
"""Whose common offer is to be believed, of those that were made; nobody's when they contradict each other, and None when more
should be heard first. The second argument is who has answered, whatever it said; the third, whether no more will be heard."""


def state_digest(round: int, layout: Digest, members: Sequence[PeerId], hashes: Sequence[Digest]) -> Digest:
    """One digest for a round's state: blake3 over round, layout, member ids and the hashes of the state's chunks."""
    hasher = blake3.blake3(b"thinwire/state/1\0" + round.to_bytes(8, "big") + layout)
    hasher.update(len(members).to_bytes(8, "big") + b"".join(members))
    hasher.update(b"".join(hashes))
    return hasher.digest()


def vouched(offer: StateOffer, payload: Buffer) -> tuple[Digest, ...] | None:
    """The hashes of the chunks of what is offered; None when they are not those of its digest, or it is no round's outcome:
    without members it is the state of a peer that looks for one itself.
    """
    raw = bytes(payload)
    if not offer.members or len(raw) != 32 * ((offer.nbytes + CHUNK_BYTES - 1) // CHUNK_BYTES):
        return None
    hashes = tuple(raw[at : at + 32] for at in range(0, len(raw), 32))
    return hashes if state_digest(offer.round, offer.layout, offer.members, hashes) == offer.digest else None


async def fetch_state(
    peers: Collection[PeerId],
    send: Callable[[PeerId, Message], None],
    inbox: asyncio.Queue[Mail],
    *,
    layout: Digest,
    have: Sequence[Digest],
    nbytes: int,
    patience: float,
    newer_than: int = -1,
    believed: Believed | None = None,
    partial: Partial | None = None,
    fragment: int = 0,
    turn: asyncio.Semaphore | None = None,
    copy_below: int | None = None,
) -> Fetched | Foreign | None:
    """The agreed state of the last committed round, or None when nobody offered one that enough agree on (try again).
    Foreign when those who answered agree on the state of another model.

    `peers` are those in reach, which may change meanwhile: who comes is asked, and who is gone is not waited for.
    `have` are the hashes of the chunks that are here, `nbytes` the state's size: both follow from the layout. `patience`
    is how many seconds all offers are waited for, and the unit of STALL. Rounds up to `newer_than` are of no use.
    `believed` tells whether those who make one offer are enough; offers of no use are no dissent then. Without it, a
    newcomer's way, more than half of those who may have a state must have answered, and agree; after STALL patiences those who
    have answered will do. When all have answered and the swarm was between two rounds, they are asked again at once.
    `partial` is what earlier tries have left, and gets what this one leaves. `inbox` has what is said of
    this `fragment`. `turn` is held while chunks travel, so that of several states only some do at a time; who has waited for it
    asks for offers again, because rounds have gone on. With `copy_below` what is looked for is a copy of a state whose holders
    are all gone: the newest one of a round below that, by whomever it was kept.
    """
    partial = Partial() if partial is None else partial
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
        # Who is silent to the end has no state: it may still look for one, as we do, and must not keep us from ours.
        return _agreed(own or found) if 2 * len(found) > might or late else None

    def certain(found: Mapping[PeerId, StateOffer], answered: Collection[PeerId]) -> bool:
        """Whether a newcomer need not hear the others: enough agree already, were all of them to say something else."""
        might = len(found) + len(set(peers).difference(answered))
        same = Counter(offer.digest for offer in found.values() if (offer.layout, offer.nbytes) == ours)
        simple = believed is None and copy_below is None
        return simple and might >= AGED and 3 * max(same.values(), default=0) >= 2 * might

    question, away = StateAsk(fragment, copy_below is not None), set[PeerId]()

    async def find() -> tuple[Offers, StateOffer] | Foreign | None:
        offers, chosen = await _offers(peers, lambda peer: send(peer, question), inbox, patience, agreed, certain, away)
        offer = offers[chosen[0]][0] if chosen else None
        if offer is None:
            return None
        if (offer.layout, offer.nbytes) != ours:
            return Foreign(offer.nbytes)
        return (offers, offer) if offer.round > newer_than else None

    found = await find()
    if not isinstance(found, tuple):
        return found
    async with _held(turn or asyncio.Semaphore(), inbox) as waited:
        found = await find() if waited else found
        if not isinstance(found, tuple):
            return found
        return await _fetch(*found, away, send, inbox, have=have, patience=patience, partial=partial, fragment=fragment)


@asynccontextmanager
async def _held(turn: asyncio.Semaphore, inbox: asyncio.Queue[Mail]) -> AsyncIterator[bool]:
    """Hold `turn`: whether it had to be waited for. What peers say meanwhile they will be asked again, and is not kept."""

    async def forget() -> None:
        while True:
            await inbox.get()

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
    inbox: asyncio.Queue[Mail],
    *,
    have: Sequence[Digest],
    patience: float,
    partial: Partial,
    fragment: int,
) -> Fetched | None:
    """The state of an offer, from all who make it and are not `away`; None when none of them is left to ask."""
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
        """Ask a source no more; what it still owes is asked of others."""
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
        # A source has STALL patiences for its next chunk, whatever others say meanwhile.
        slowest = min((peer for peer in sources if load[peer]), key=lambda one: moved[one])
        try:
            async with asyncio.timeout_at(moved[slowest] + STALL * patience):
                peer, frame = await inbox.get()
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
            if len(frame.payload):  # else its round is over there, and it serves another state by now
                partial.liars.add(peer)
            give_up(peer)
    return Fetched(offer, hashes, chunks, chosen)


async def _offers(
    peers: Collection[PeerId],
    ask: Callable[[PeerId], None],
    inbox: asyncio.Queue[Mail],
    patience: float,
    agreed: Agreed,
    certain: Callable[[Mapping[PeerId, StateOffer], Collection[PeerId]], bool],
    away: set[PeerId],
) -> tuple[Offers, tuple[PeerId, ...]]:
    """What is offered, as far as it fits together, and who makes the offer that is to be believed. `away` gets those whose
    link was lost after that: what they said counts, but they are not waited for, and nothing can be had from them.
    """
    found: Offers = {}
    asked: set[PeerId] = set()
    answered: set[PeerId] = set()

    def offered() -> dict[PeerId, StateOffer]:
        return {peer: offer for peer, (offer, _) in found.items()}

    async def listen() -> None:
        """Until all who were asked and are here have answered, or those who have are enough."""
        while not answered.issuperset(asked.intersection(peers) - away) and not certain(offered(), answered):
            peer, frame = await inbox.get()
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
        for peer in sorted(peers):  # again, because a link may have broken with the question, and rounds go on
            asked.add(peer)
            away.discard(peer)
            ask(peer)
        try:
            async with asyncio.timeout(patience):
                await listen()
            hurried += 1
        except TimeoutError:
            waited += 1
        # Only time that was given to those who are silent makes it late, not how often the others were asked.
        chosen = agreed(offered(), answered, waited == STALL)
        if chosen or not answered or STALL in (waited, hurried):
            break
        if answered.issuperset(peers) and len({offer.round for offer in offered().values()}) > 1:
            found.clear()  # some had made a step that others were about to make
            answered.clear()
        elif chosen is not None or answered.issuperset(peers):
            break
    return found, chosen or ()


def _believed(
    offers: Mapping[PeerId, StateOffer], newer_than: int, believed: Believed, ours: tuple[Digest, int]
) -> tuple[PeerId, ...]:
    """Peers whose common offer of a state like `ours` is later than `newer_than` and believed, sorted."""
    same: dict[tuple[int, Digest], list[PeerId]] = {}
    for peer, offer in offers.items():
        if newer_than < offer.round < min(newer_than + LEAP, LAST_ROUND) and (offer.layout, offer.nbytes) == ours:
            same.setdefault((offer.round, offer.digest), []).append(peer)
    able = [(len(peers), round, sorted(peers)) for (round, _), peers in same.items() if believed(peers)]
    return tuple(max(able)[2]) if able else ()


def _agreed(offers: Mapping[PeerId, StateOffer]) -> tuple[PeerId, ...]:
    """Peers whose common offer is to be believed, sorted; empty when there is none."""
    support = Counter((offer.round, offer.digest) for offer in offers.values() if offer.round < LAST_ROUND)
    if not support:
        return ()
    (round, digest), count = max(support.items(), key=lambda item: (item[1], item[0][0]))
    # Offers of other rounds dissent too, or one peer that names a later round would speak for all.
    same_round = sum(offer.round == round for offer in offers.values())
    few = 2 * count > len(offers) and count == same_round
    if not (3 * count >= 2 * len(offers) if len(offers) >= AGED else few):
        return ()
    return tuple(sorted(peer for peer, offer in offers.items() if offer.digest == digest))


def _newest(offers: Mapping[PeerId, StateOffer], below: int, ours: tuple[Digest, int]) -> tuple[PeerId, ...]:
    """Peers that keep the newest copy of a state like `ours` of a round below `below`, sorted; of two of one round, the one
    that more have.
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
