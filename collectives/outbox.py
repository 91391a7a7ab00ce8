"""Frames on their way out: a lane for control and one for bulk per peer, so that one slow peer delays nobody else."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from thinwire.collectives.precedence import Precedence
from thinwire.collectives.transport import Transport
from thinwire.collectives.ways import Ways
from thinwire.swarm.frame import Frame, nbytes
from thinwire.swarm.protocol import (
    MAX_CHUNKS,
    Chunk,
    Gossip,
    Message,
    Partial,
    PeerId,
    PushPull,
    Result,
    StateChunk,
    StateOffer,
    Subtotal,
)

LONGEST = 8 * MAX_CHUNKS
"""Most bulk frames that wait for one peer, four times what a round can need: who lets more pile up does not keep up."""

NEWS = (Gossip, PushPull)
"""Control messages that go when nothing else waits for the peer."""

WORDS = 512
"""Most control frames that wait for one peer: ten rounds of them, or some minutes of probes."""


class Lane:
    """Frames to one peer in order, urgent ones first, sent by one task that ends when there is nothing left."""

    def __init__(
        self,
        transport: Transport,
        peer: PeerId,
        unreachable: Callable[[PeerId], None],
        ended: Callable[[Lane, BaseException | None], None],
        longest: int,
        precedence: Precedence,
        sent: Callable[[PeerId, Frame], None] = lambda peer, frame: None,
    ) -> None:
        self.peer = peer
        self._transport, self._unreachable, self._over, self._longest = transport, unreachable, ended, longest
        self._precedence, self._sent = precedence, sent
        self._urgent: deque[Frame] = deque()
        self._later: deque[Frame] = deque()
        self._task: asyncio.Task[None] | None = None

    def put(self, frame: Frame, *, later: bool = False) -> None:
        """Queue a frame; `later` ones (what a peer asked for) go when no other waits."""
        if len(self._urgent) + len(self._later) >= self._longest:
            self.clear()
            self._unreachable(self.peer)
            return
        (self._later if later else self._urgent).append(frame)
        self._precedence.add(not later)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._drain())
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if task is self._task or error is not None:
            self._over(self, error)

    def later(self, kind: type[Message], fragment: int | None) -> int:
        """How many frames of a kind wait that may go later, of one fragment where it is given."""
        found = (frame.message for frame in self._later if isinstance(frame.message, kind))
        return sum(fragment is None or getattr(message, "fragment", None) == fragment for message in found)

    def keep(self, wanted: Callable[[Frame], bool]) -> None:
        """Forget the urgent frames that are not wanted any more."""
        before, self._urgent = len(self._urgent), deque(frame for frame in self._urgent if wanted(frame))
        self._precedence.drop(before - len(self._urgent))

    def clear(self) -> None:
        """Forget what has not been handed to the transport yet."""
        self._precedence.drop(len(self._urgent))
        self._urgent.clear()
        self._later.clear()

    async def _drain(self) -> None:
        while self._urgent or self._later:
            if not self._urgent and yields(self._later[0]):
                await self._precedence.turn(lambda: bool(self._urgent) or not self._later)
                if self._urgent or not self._later:
                    continue
            urgent = bool(self._urgent)
            frame = self._urgent.popleft() if urgent else self._later.popleft()
            try:
                taken = await self._transport.send(self.peer, frame)
            finally:
                self._precedence.sent(urgent)
            if taken:
                self._sent(self.peer, frame)
            else:
                self.clear()
                self._unreachable(self.peer)

    async def close(self) -> None:
        """Stop sending."""
        self.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def yields(frame: Frame) -> bool:
    """Whether a frame waits for those of rounds to any peer: state does."""
    return isinstance(frame.message, (StateChunk, StateOffer))


class Outbox:
    """All lanes of one peer's transport; `unreachable` is told when the transport cannot reach a peer.

    What we send of our own accord is bounded by the rounds (`begin` drops what is of no more use) and consists of views of what
    is held anyway. What others ask for goes `later`, and whoever answers looks first how much of that still waits. State goes
    after rounds (see precedence.py), news of members after all else that one peer is told.
    """

    def __init__(self, transport: Transport, unreachable: Callable[[PeerId], None] = lambda peer: None) -> None:
        self._transport, self._unreachable = transport, unreachable
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception of what failed for a reason of ours, such as a send; whoever runs the peer awaits it."""
        self.handed: Callable[[], None] = lambda: None
        """Told whenever a frame of bulk has been handed to the transport."""
        self._control: dict[PeerId, Lane] = {}
        self._bulk: dict[PeerId, Lane] = {}
        self._precedence, self._words = Precedence(lambda: self.handed()), Precedence()
        self._now = asyncio.get_running_loop().time
        self.ways = Ways()
        """What the ways to others carry."""

    def control(self, to: PeerId, message: Message) -> None:
        """Queue a control message."""
        self._put(self._control, to, WORDS, Frame(message), later=isinstance(message, NEWS))

    def bulk(self, to: PeerId, frame: Frame, *, later: bool = False) -> None:
        """Queue a frame with a payload; the payload must not change before it is sent."""
        self._put(self._bulk, to, LONGEST, frame, later=later)

    def came(self, peer: PeerId) -> int:
        """See `Transport.came`."""
        return self._transport.came(peer)

    def later(self, to: PeerId, kind: type[Message] = Message, fragment: int | None = None) -> int:
        """How many frames of a kind to a peer wait that may go later, of one fragment where it is given."""
        return self._bulk[to].later(kind, fragment) if to in self._bulk else 0

    @property
    def idle(self) -> bool:
        """Whether everything has been handed to the transport."""
        return not self._control and not self._bulk

    def begin(self, round: int, fragment: int = 0) -> None:
        """A round begins: what waits of those of this fragment before the last one is of no more use to anybody."""

        def wanted(frame: Frame) -> bool:
            message = frame.message
            if not isinstance(message, (Chunk, Partial, Result, Subtotal)) or message.fragment != fragment:
                return True
            return message.round >= round - 1

        for lane in self._bulk.values():
            lane.keep(wanted)

    def recall(self, round: int, fragment: int) -> None:
        """What waits of a round's ring, and was not asked for, is of no more use: another ballot has begun."""

        def wanted(frame: Frame) -> bool:
            message = frame.message
            return not isinstance(message, (Partial, Result)) or (message.round, message.fragment) != (round, fragment)

        for lane in self._bulk.values():
            lane.keep(wanted)

    def withdraw(self, peer: PeerId, round: int, fragment: int) -> None:
        """What waits for a peer of our own contribution to a round is of no use to it: another partner was drawn."""

        def wanted(frame: Frame) -> bool:
            message = frame.message
            return not isinstance(message, Chunk) or (message.round, message.fragment) != (round, fragment)

        if peer in self._bulk:
            self._bulk[peer].keep(wanted)

    def drop(self, peer: PeerId) -> None:
        """Forget everything queued for a peer whose link broke."""
        for lanes in (self._control, self._bulk):
            if peer in lanes:
                lanes[peer].clear()

    def _ended(self, lane: Lane, error: BaseException | None) -> None:
        """A lane has nothing left to send: peers come and go, so that it is not kept."""
        for lanes in (self._control, self._bulk):
            if lanes.get(lane.peer) is lane:
                del lanes[lane.peer]
                if lanes is self._bulk:
                    self.ways.over(lane.peer, self._now())
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Something of ours has gone wrong: whoever runs the peer gets to know."""
        if not self.failure.done():
            self.failure.set_exception(error)

    async def close(self) -> None:
        """Stop all lanes."""
        self.failure.cancel()
        for lane in (*self._control.values(), *self._bulk.values()):
            await lane.close()

    def _put(self, lanes: dict[PeerId, Lane], to: PeerId, longest: int, frame: Frame, *, later: bool = False) -> None:
        bulk = lanes is self._bulk
        if to not in lanes:
            waits = bulk and self._precedence.urgent and yields(frame)
            if not waits and self._transport.offer(to, frame):
                if bulk:
                    self.handed()
                    self._left(to, frame)
                return
            if bulk:
                self.ways.wait(to, self._now())
                lane = Lane(self._transport, to, self._unreachable, self._ended, longest, self._precedence, self._left)
            else:
                lane = Lane(self._transport, to, self._unreachable, self._ended, longest, self._words)
            lanes[to] = lane
        lanes[to].put(frame, later=later)

    def _left(self, to: PeerId, frame: Frame) -> None:
        """A frame of bulk is on its way."""
        self.ways.sent(to, nbytes(frame.payload), self._now())
