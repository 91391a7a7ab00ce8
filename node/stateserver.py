"""Serving the replica's state to joiners, and fetching it when this peer is the one that is behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from thinwire.collectives.outbox import Outbox
from thinwire.collectives.statesync import Fetched, Foreign, fetch_state
from thinwire.node.outer import Replica
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import CHUNK_BYTES, Digest, PeerId, StateAsk, StateChunk, StateFetch, StateOffer

SNAPSHOT_SECONDS = 15.0
"""How long a copy of the state is kept for joiners after the last chunk was asked for."""


BUSY_SECONDS = 5.0
"""How long a copy of an older state is kept for those who are in the middle of it."""


@dataclass(slots=True)
class _Snapshot:
    offer: StateOffer
    hashes: tuple[Digest, ...]
    raw: memoryview
    used: float


class StateServer:
    """What a joiner is served is a copy, so that rounds go on meanwhile; it is made when somebody asks and dropped later.

    Until `resume` says that this peer is part of the swarm (`entered`), it is no source: it answers that it has nothing.
    """

    def __init__(self, replica: Replica, outbox: Outbox, now: Callable[[], float], *, entered: bool) -> None:
        self._entered = entered
        self._replica, self._outbox, self._now = replica, outbox, now
        self._snapshot: _Snapshot | None = None
        self._older: _Snapshot | None = None
        self._waiting: set[PeerId] = set()
        self._held = False
        self._mail: asyncio.Queue[tuple[PeerId, Frame]] | None = None

    def hold(self) -> None:
        """The replica is about to change in another thread: offer nothing until `resume`."""
        self._held = True

    def resume(self) -> None:
        """The replica is whole again: answer those who asked meanwhile."""
        self._held, self._entered = False, True
        waiting, self._waiting = sorted(self._waiting), set()
        for peer in waiting:
            self._offer(peer)

    def routed(self, peer: PeerId, frame: Frame) -> None:
        """A frame about state."""
        message = frame.message
        if isinstance(message, StateAsk):
            self._offer(peer)
        elif isinstance(message, StateFetch):
            self._serve(peer, message)
        elif self._mail is not None:
            self._mail.put_nowait((peer, frame))

    def ticked(self) -> None:
        """Drop the copy when nobody wants it any more."""
        if self._snapshot is not None and self._now() > self._snapshot.used + SNAPSHOT_SECONDS:
            self._snapshot = None
        if self._older is not None and self._now() > self._older.used + BUSY_SECONDS:
            self._older = None

    async def fetch(
        self, peers: Collection[PeerId], *, patience: float, newer_than: int, voices: Collection[PeerId]
    ) -> Fetched | Foreign | None:
        """The state that these peers agree on, see `fetch_state`."""
        self._mail = asyncio.Queue()
        try:
            return await fetch_state(
                sorted(peers),
                self._outbox.control,
                self._mail,
                layout=self._replica.layout,
                have=self._replica.hashes,
                nbytes=self._replica.state.nbytes,
                patience=patience,
                newer_than=newer_than,
                voices=voices,
            )
        finally:
            self._mail = None

    def _offer(self, peer: PeerId) -> None:
        replica, snapshot = self._replica, self._snapshot
        if not self._entered:
            nothing = StateOffer(replica.round, replica.digest, replica.layout, replica.state.nbytes, ())
            self._outbox.bulk(peer, Frame(nothing), later=True)
            return
        if self._held:
            self._waiting.add(peer)
            return
        if snapshot is None or snapshot.offer.digest != replica.digest:
            raw = replica.state.copy().view(np.uint8).data
            busy = snapshot is not None and self._now() < snapshot.used + BUSY_SECONDS
            self._older = snapshot if busy else None
            offer = StateOffer(replica.round, replica.digest, replica.layout, raw.nbytes, replica.members)
            snapshot = self._snapshot = _Snapshot(offer, tuple(replica.hashes), raw, self._now())
        snapshot.used = self._now()
        self._outbox.bulk(peer, Frame(snapshot.offer, b"".join(snapshot.hashes)), later=True)

    def _serve(self, peer: PeerId, message: StateFetch) -> None:
        payload = memoryview(b"")
        for snapshot in (self._snapshot, self._older):
            if snapshot is not None and snapshot.offer.round == message.round:
                payload = snapshot.raw[message.index * CHUNK_BYTES : (message.index + 1) * CHUNK_BYTES]
                snapshot.used = self._now()
                break
        self._outbox.bulk(peer, Frame(StateChunk(message.round, message.index), payload), later=True)
