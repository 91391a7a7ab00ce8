"""Queue of the frames to one peer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from thinwire.collectives.transport.interface import Transport
from thinwire.collectives.transport.sending.send_priority import Reader, SendPriority
from thinwire.swarm.frame import Frame, nbytes
from thinwire.swarm.messages.registry import Message, PeerId, StateOffer


class PeerQueue:
    """Frames to one peer in order, in two classes: a deferred frame is sent when no other waits.

    One task sends them and ends when the queue is empty. `unreachable`: called when the transport cannot reach the peer, or
    `limit` frames wait. `ended`: called with the queue and the exception, if any, when the task has ended. `sent`: called
    with peer, frame and its class for each frame that the transport has taken. `paced`: deferred frames have pauses
    (send_priority.py).
    """

    def __init__(
        self,
        transport: Transport,
        peer: PeerId,
        unreachable: Callable[[PeerId], None],
        ended: Callable[[PeerQueue, BaseException | None], None],
        limit: int,
        priority: SendPriority,
        sent: Callable[[PeerId, Frame, bool], None] = lambda peer, frame, deferred: None,
        paced: bool = False,
    ) -> None:
        self.peer, self.paced = peer, paced
        self._transport, self._unreachable, self._on_end, self._limit = transport, unreachable, ended, limit
        self._priority, self._sent = priority, sent
        self._first: deque[Frame] = deque()
        self._deferred: deque[Frame] = deque()
        self._in_progress: Frame | None = None
        """Frame of the first class that is being sent."""
        self._task: asyncio.Task[None] | None = None

    def put(self, frame: Frame, *, deferred: bool = False) -> None:
        """Queue a frame."""
        if len(self) >= self._limit:
            self.clear()
            self._unreachable(self.peer)
            return
        (self._deferred if deferred else self._first).append(frame)
        self._priority.add(not deferred)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._send_all())
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if task is self._task or error is not None:
            self._on_end(self, error)

    def __len__(self) -> int:
        return len(self._first) + len(self._deferred)

    def deferred(self, kind: type[Message], fragment: int | None) -> int:
        """Return the number of deferred frames of a kind, of one fragment if given."""
        found = (frame.message for frame in self._deferred if isinstance(frame.message, kind))
        return sum(fragment is None or getattr(message, "fragment", None) == fragment for message in found)

    def defers(self, message: Message) -> bool:
        """Return True if a deferred frame with this message waits."""
        return any(frame.message == message for frame in self._deferred)

    def take_deferred(self, kind: type[Message], fragment: int) -> list[Frame]:
        """Remove the deferred frames of a kind and a fragment, and return them."""
        found: list[Frame] = []
        left: deque[Frame] = deque()
        for frame in self._deferred:
            wanted = isinstance(frame.message, kind) and getattr(frame.message, "fragment", None) == fragment
            (found if wanted else left).append(frame)
        self._deferred = left
        self._priority.note_dropped(0)  # A frame may have waited for its turn.
        return found

    def has(self, wanted: Callable[[Frame], bool]) -> bool:
        """Return True if a `wanted` frame of the first class waits, or is being sent."""
        return any(wanted(frame) for frame in (self._in_progress, *self._first) if frame is not None)

    def drop(self, unwanted: Callable[[Frame], bool]) -> None:
        """Drop the waiting frames of the first class that are `unwanted`."""
        before, self._first = len(self._first), deque(frame for frame in self._first if not unwanted(frame))
        self._priority.note_dropped(before - len(self._first))

    def clear(self) -> None:
        """Drop all frames not yet handed to the transport."""
        self._priority.note_dropped(len(self._first))
        self._first.clear()
        self._deferred.clear()

    async def _send_all(self) -> None:
        while self._first or self._deferred:
            if self.paced and not self._first:
                await self._priority.wait_for_turn(lambda: not self._deferred, *cost(self.peer, self._deferred[0]))
                if not self._deferred:
                    continue
            deferred = not self._first
            frame = self._deferred.popleft() if deferred else self._first.popleft()
            self._in_progress = None if deferred else frame
            try:
                taken = await self._transport.send(self.peer, frame)
            finally:
                self._in_progress = None
                self._priority.sent(not deferred, nbytes(frame.payload))
            if taken:
                self._sent(self.peer, frame, deferred)
            else:
                self.clear()
                self._unreachable(self.peer)

    async def close(self) -> None:
        """Stop sending."""
        self.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def cost(peer: PeerId, frame: Frame) -> tuple[int, Reader]:
    """Return the bytes of a frame of state for `SendPriority`, and the reader of that state.

    An offer counts no bytes: the joiner waits for it, and it is small.
    """
    message = frame.message
    return 0 if isinstance(message, StateOffer) else nbytes(frame.payload), (peer, getattr(message, "fragment", 0))
