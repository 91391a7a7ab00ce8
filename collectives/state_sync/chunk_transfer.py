"""Transfer of the chunks that differ from the local ones, a few at a time from every source.

Each chunk is checked. A source that sends a wrong chunk is not asked again, and neither is one that no longer has the state.
Late chunks of a source are requested from others, too: the source may be slow, or may never send them. Chunks fetched by a
failed try are reused by the next one (`PartialState`) if they are still the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import blake3
import numpy as np
from thinwire.collectives.state_sync.offer_search import MOST_PATIENCES, Search, StateMessage
from thinwire.collectives.state_sync.state_offers import Offered
from thinwire.compression.core.types import Buffer
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import CHUNK_BYTES, Digest, Message, PeerId, StateChunk, StateFetch

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


@dataclass(slots=True)
class Transfer:
    """Progress of the transfer of the state of a round.

    nbytes: size of the state. here: bytes of it that are present. sources: peers that may be asked for chunks.
    """

    round: int
    nbytes: int
    here: int
    sources: Collection[PeerId]


@dataclass(slots=True)
class PartialState:
    """Chunks of failed tries by hash, of one state at most, and peers that sent wrong chunks.

    `transfer`: the try in progress, if chunks are fetched. `search`: the wait for offers before it.
    """

    chunks: dict[Digest, Buffer] = field(default_factory=dict)
    liars: set[PeerId] = field(default_factory=set)
    transfer: Transfer | None = None
    search: Search | None = None


@dataclass(slots=True)
class _Source:
    """Source of chunks.

    progressed_at: time of its last chunk, or of the request after which it owes one. longest: seconds that it has for its next
    chunk, whatever other sources send meanwhile. owed: number of chunks requested from it.
    """

    progressed_at: float
    longest: float
    owed: int = 0
    late: bool = False

    @property
    def due(self) -> float:
        """Time at which it becomes late."""
        return self.progressed_at + self.longest

    @property
    def awaited(self) -> bool:
        """True if a chunk of it is waited for."""
        return self.owed > 0 and not self.late


class ChunkTransfer:
    """Transfer of the state that has been `offered` by all `sources`.

    have: hashes of the local chunks. partial: remains of earlier tries, updated by this one. receive_queue: messages about
    this `fragment`. `chunks`: those that are here, of those that differ.
    """

    def __init__(
        self,
        offered: Offered,
        sources: Sequence[PeerId],
        partial: PartialState,
        send: Callable[[PeerId, Message], None],
        receive_queue: asyncio.Queue[StateMessage],
        *,
        have: Sequence[Digest],
        patience: float,
        fragment: int,
    ) -> None:
        self._round, self._fragment, self._hashes = offered.offer.round, fragment, offered.hashes
        self._send, self._receive_queue, self._partial = send, receive_queue, partial
        self._now = asyncio.get_running_loop().time
        self._last = self._now()
        """Time of the last chunk of any source."""
        self._sources = {peer: _Source(self._last, MOST_PATIENCES * patience) for peer in sources}
        differ = [index for index, found in enumerate(self._hashes) if index >= len(have) or have[index] != found]
        self._asked: dict[int, list[PeerId]] = {index: [] for index in differ}
        """Sources that owe each of the chunks that differ."""
        self._places = _places(differ, offered.offer.nbytes)
        self.chunks: dict[int, Buffer] = {}
        self._reuse()
        missing = sum(len(place) for index, place in self._places.items() if index not in self.chunks)
        nbytes = offered.offer.nbytes
        partial.transfer = self._progress = Transfer(self._round, nbytes, nbytes - missing, self._sources)

    def _reuse(self) -> None:
        """Take over chunks of an earlier try."""
        for index, place in self._places.items():
            if (earlier := self._partial.chunks.get(self._hashes[index])) is not None:
                place[:] = earlier
                self.chunks[index] = place
        self._partial.chunks = {self._hashes[index]: chunk for index, chunk in self.chunks.items()}

    async def run(self) -> bool:
        """Fetch the chunks. Returns False if no source is left, or none sends any."""
        while len(self.chunks) < len(self._places):
            self._request()
            if not self._sources or not await self._receive():
                return False
        return True

    def _request(self) -> None:
        """Request the chunks that only late sources owe, if any, from others."""
        for index, owing in self._asked.items():
            if index in self.chunks or any(not self._sources[peer].late for peer in owing):
                continue
            free = [
                peer
                for peer, source in self._sources.items()
                if source.owed < IN_FLIGHT and not source.late and peer not in owing
            ]
            if not free:
                continue
            peer = min(free, key=lambda one: self._sources[one].owed)
            owing.append(peer)
            source = self._sources[peer]
            if not source.owed:
                source.progressed_at = self._now()
            source.owed += 1
            self._send(peer, StateFetch(self._round, index, self._fragment))

    async def _receive(self) -> bool:
        """Process the next message, or the delay of a source. Returns False if no source sends any more."""
        awaited = [source for source in self._sources.values() if source.awaited]
        slowest = min(awaited, key=lambda one: one.due, default=None)
        try:
            async with asyncio.timeout_at(self._last + SILENCE if slowest is None else slowest.due):
                peer, frame = await self._receive_queue.get()
        except TimeoutError:
            if slowest is None:
                return False
            slowest.late = True
            return True
        if frame is None:
            self._give_up(peer)
        elif isinstance(frame, Frame) and isinstance(frame.message, StateChunk) and frame.message.round == self._round:
            self._take(peer, frame.message.index, frame)
        return True

    def _take(self, peer: PeerId, index: int, frame: Frame) -> None:
        """Check a chunk that a source owes."""
        owing = self._asked.get(index, [])
        if peer not in owing:
            return
        owing.remove(peer)
        source, now = self._sources[peer], self._now()
        source.owed -= 1
        if self._is_right(index, frame):
            self._store(index)
            source.longest = min(LATEST, max(source.longest, SLOWER * (now - source.progressed_at)))
            self._last = source.progressed_at = now
            source.late = False
        else:
            if len(frame.payload):  # otherwise the source has only the state of a later round
                self._partial.liars.add(peer)
            self._give_up(peer)

    def _store(self, index: int) -> None:
        """Note that a chunk is stored; another source may have sent it before, so it counts once."""
        if index not in self.chunks:
            place = self._places[index]
            self.chunks[index] = self._partial.chunks[self._hashes[index]] = place
            self._progress.here += len(place)

    def _is_right(self, index: int, frame: Frame) -> bool:
        """Return True if a chunk has the hash in the offer; copy it if it is missing."""
        place = self._places[index]
        if len(frame.payload) != len(place):
            return False
        if index in self.chunks:
            return frame.hashed() == self._hashes[index]
        place[:] = frame.payload
        # The hash is that of the copy, because another process may change memory that it shares with us.
        return blake3.blake3(place).digest() == self._hashes[index]

    def _give_up(self, peer: PeerId) -> None:
        """Stop using a source; the chunks that it still owes will be requested from others."""
        self._sources.pop(peer, None)
        for owing in self._asked.values():
            if peer in owing:
                owing.remove(peer)


def _places(indices: Sequence[int], nbytes: int) -> dict[int, memoryview]:
    """Return memory for chunks of a state of `nbytes`; each block of it is free after its last chunk.

    Chunks are copied to here, so that the transport can use its buffers again: it would retain as many as were held at once.
    """
    blocks = [np.empty(BLOCK * CHUNK_BYTES, np.uint8).data for _ in range(0, len(indices), BLOCK)]
    return {
        index: blocks[place // BLOCK][place % BLOCK * CHUNK_BYTES :][: min(CHUNK_BYTES, nbytes - index * CHUNK_BYTES)]
        for place, index in enumerate(indices)
    }
