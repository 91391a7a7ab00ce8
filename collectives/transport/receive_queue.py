"""Queue of received frames: control before bulk, each bounded in bytes; a limit of small frames."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from thinwire.collectives.transport.interface import Arrival
from thinwire.collectives.transport.rate_limit import TokenBuckets
from thinwire.swarm.messages.registry import Activation, Message, Passed, PeerId, Ready, Route, StateChunk

ANNOUNCED = 1024
"""Announcements that are remembered: as many as the fragments of a run, which each have one at a time."""

MUTUAL = (Route, Activation, Passed, StateChunk)
"""Frames of pipelines and of the transfer of a state: a peer that gets one sends others in return."""

_OVERHEAD = 1024
"""Bytes that an arrival takes besides its frame's, so that many small ones are bounded too."""


class BoundedQueue:
    """Queue that calls `pause(True)` at `limit` bytes, and `pause(False)` once half of that is taken."""

    def __init__(self, limit: int, pause: Callable[[bool], None]) -> None:
        self.held = 0
        """Bytes waiting."""
        self.full = False
        """True if senders are held back."""
        self._limit, self._pause = limit, pause
        self._entries: deque[tuple[Arrival, int]] = deque()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def put(self, arrival: Arrival, size: int) -> None:
        """Add an arrival without waiting: data read before the pause takes effect is still accepted."""
        size += _OVERHEAD
        self._entries.append((arrival, size))
        self.held += size
        if self.held >= self._limit and not self.full:
            self.full = True
            self._pause(True)

    def take(self) -> Arrival:
        """Remove and return the oldest arrival."""
        arrival, size = self._entries.popleft()
        self._took(size)
        return arrival

    def forget(self, peer: bytes) -> None:
        """Drop everything received from a peer."""
        gone = sum(size for arrival, size in self._entries if arrival.peer == peer)
        self._entries = deque(entry for entry in self._entries if entry[0].peer != peer)
        self._took(gone)

    def _took(self, size: int) -> None:
        self.held -= size
        if self.full and self.held <= self._limit // 2:
            self.full = False
            self._pause(False)


class ReceiveQueue:
    """Both queues; `pause_control` and `pause_bulk` hold back the senders of one kind."""

    def __init__(self, limit: int, pause_control: Callable[[bool], None], pause_bulk: Callable[[bool], None]) -> None:
        self.control = BoundedQueue(limit, pause_control)
        self.bulk = BoundedQueue(limit, pause_bulk)
        self._something = asyncio.Event()
        self._closed = False

    def put(self, arrival: Arrival, size: int, *, bulk: bool = False) -> None:
        """Add an arrival of `size` bytes."""
        (self.bulk if bulk else self.control).put(arrival, size)
        self._something.set()

    def forget(self, peer: bytes) -> None:
        """Drop everything received from a peer."""
        self.control.forget(peer)
        self.bulk.forget(peer)

    def close(self) -> None:
        """Close the queue: `get` raises RuntimeError for present and later callers."""
        self._closed = True
        self._something.set()

    async def get(self) -> Arrival:
        """Return the next arrival, control first. Raises RuntimeError when closed."""
        while not self._closed:
            if self.control or self.bulk:
                return (self.control or self.bulk).take()
            self._something.clear()
            await self._something.wait()
        raise RuntimeError("the transport is closed")


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Numbers of small frames that a peer may send, see FrameLimit.

    They are those at once, a second, for each of our rounds, and for each frame that we send to it in work for each other
    (MUTUAL). `pause`: seconds for which its link is then not read. `small`: bytes of payload from which on a bulk frame is not
    small.
    """

    burst: int = 1024
    rate: float = 250.0
    round: int = 32
    answers: int = 4
    pause: float = 0.1
    small: int = 64 << 10


class FrameLimit:
    """Limit of the small frames of each peer: control messages, and bulk frames with few bytes of payload.

    A peer may send some at once, then some per second and for each announcement of ours: most frames belong to our rounds,
    which no other peer can hasten. It may also send some for each frame that it gets from us in a pipeline
    or a transfer of state. A link whose peer has sent more is not read for a while, so that the rest waits with the
    sender.
    """

    def __init__(self, limits: FrameLimits) -> None:
        self.limits = limits
        self.pauses: Counter[PeerId] = Counter()
        """Number of such pauses of each peer."""
        self._buckets = TokenBuckets(limits.burst, limits.rate)
        self._ahead = 0.0
        """Seconds for which the buckets have been filled in advance."""
        self._announced: dict[tuple[int, int, int, bytes], None] = {}

    def admits(self, peer: PeerId, now: float, *, payload: int = 0) -> bool:
        """Count a frame that has come; return False if it is one too many.

        `payload`: its bytes of payload if it is bulk.
        """
        return payload >= self.limits.small or self._buckets.take(peer, now + self._ahead)

    def sent(self, peer: PeerId, message: Message) -> None:
        """Allow the frames that answer a message to a peer.

        An announcement allows all peers the frames of a round, the first time that it is sent.
        """
        if isinstance(message, MUTUAL):
            self._buckets.give(peer, self.limits.answers)
        if not isinstance(message, Ready):
            return
        key = message.round, message.fragment, message.attempt, message.life
        if key not in self._announced:
            self._ahead += self.limits.round / self.limits.rate
            self._announced[key] = None
            if len(self._announced) > ANNOUNCED:
                del self._announced[next(iter(self._announced))]
