"""Attempt of a micro-batch to pass through the stages, from the origin's point of view."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from thinwire.collectives.transport.payload_assembly import PayloadAssembly
from thinwire.compression.boundary_codec import Boundary
from thinwire.node.pipeline.step.timeouts import Leg, Timeouts
from thinwire.swarm.messages.registry import Activation, Hop, Passed, PeerId

NO_NEXT, NO_PREVIOUS = "no link to the next", "no link to the one before"
"""Reasons of a host that has lost the link to a neighbour on the route."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why an attempt failed, and the peer that may have caused it."""

    reason: str
    suspects: tuple[PeerId, ...]


class Attempt:
    """Attempt to send one micro-batch along a path and back.

    `since`: the earliest time at which the peer that is `due` could have begun its part.
    """

    def __init__(
        self, micro: int, attempt: int, path: tuple[Hop, ...], boundary: Boundary, batch: int, length: int, since: float
    ) -> None:
        self.micro, self.attempt, self.path, self.since = micro, attempt, path, since
        self.backward = False
        self._there = PayloadAssembly(boundary.nbytes(batch, length, backward=False))
        self._back = PayloadAssembly(boundary.nbytes(batch, length, backward=True))
        self._position = 0
        self._failure: Failure | None = None
        self._news = asyncio.Event()

    @property
    def peers(self) -> Sequence[PeerId]:
        """Peers of the route in the direction of travel."""
        peers = [hop.peer for hop in self.path]
        return peers[::-1] if self.backward else peers

    @property
    def due(self) -> Leg:
        """Peer that has to pass the micro-batch on, or has passed on what is about to arrive here."""
        arriving = self._position == len(self.path)
        return self.peers[self._position - arriving], arriving

    def needs(self, peer: PeerId) -> bool:
        """Return True if a peer still has something to do."""
        return peer in (self.peers[self._position :] if self.backward else self.peers) or peer == self.due[0]

    def turn(self, since: float) -> None:
        """Reverse the direction of travel: the loss is known from `since` on."""
        self.backward, self.since, self._position = True, since, 0

    def fail(self, reason: str, *suspects: PeerId) -> None:
        """Mark the attempt as failed; only the first reason is stored."""
        self._failure = self._failure or Failure(reason, suspects)
        self._news.set()

    def passed(self, peer: PeerId, message: Passed, now: float) -> bool:
        """Record that a stage has passed it on, or will not; return False if that is known already."""
        if peer not in self.peers or message.attempt != self.attempt:
            return False
        at = self.peers.index(peer)
        if message.reason:
            self.fail(message.reason, *self._suspects(peer, message.reason))
            return True
        if message.backward != self.backward or at < self._position:
            return False
        self._position, self.since = at + 1, now
        self._news.set()
        return True

    def _suspects(self, peer: PeerId, reason: str) -> Sequence[PeerId]:
        """Return the peers that may be at fault after a peer's refusal."""
        path = [hop.peer for hop in self.path]
        at = path.index(peer)
        if reason in (NO_NEXT, NO_PREVIOUS):
            return path[at + 1 : at + 2] if reason == NO_NEXT else path[max(0, at - 1) : at]
        if reason == "payload":  # spoiled by the peer that reports it, or by the one before it
            at = self.peers.index(peer)
            return self.peers[max(0, at - 1) : at + 1]
        return (peer,)

    def take(self, peer: PeerId, message: Activation, payload: bytes | bytearray | memoryview) -> None:
        """Take a piece of the output of the last stage, or of the first one backward."""
        if (message.attempt, message.backward) != (self.attempt, self.backward) or peer != self.peers[-1]:
            return
        assembly = self._back if self.backward else self._there
        if not assembly.add(message.piece, payload):
            self.fail("payload", peer)
        elif assembly.complete:
            self._news.set()

    async def arrival(self, patience: Timeouts) -> bytes | Failure:
        """Return the payload that comes out at the other end, or the reason why none will."""
        assembly = self._back if self.backward else self._there
        while self._failure is None and not assembly.complete:
            self._news.clear()
            left = patience.left(self.due, self.since)
            if not left:
                self.fail("stalled", self.due[0])
                break
            with suppress(TimeoutError):  # others may show meanwhile that the peer still works
                async with asyncio.timeout(left):
                    await self._news.wait()
        if self._failure is None:
            patience.record((self.peers[-1], True), self.since)
        return self._failure or assembly.payload()
