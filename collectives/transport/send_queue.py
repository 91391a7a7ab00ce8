"""Queues of outgoing frames.

Each peer has one for control and one for bulk, so that a slow peer delays no other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from thinwire.collectives.transport.interface import Transport
from thinwire.collectives.transport.link_rates import LinkRates
from thinwire.collectives.transport.own_bandwidth import Bandwidth
from thinwire.collectives.transport.send_priority import Reader, SendPriority
from thinwire.swarm.frame import Frame, nbytes
from thinwire.swarm.messages.registry import (
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
"""Most bulk frames that wait for one peer, four times what a round can need.

A peer that exceeds it is treated as unreachable.
"""

NEWS = (Gossip, PushPull)
"""Control messages that are sent only when nothing else waits for the peer."""

ROUND = (Chunk, Partial, Result, Subtotal)
"""Bulk data of rounds."""

STATE = (StateChunk, StateOffer)
"""Bulk data of a peer that is no part of the swarm yet."""

MAX_CONTROL = 512
"""Most control frames that wait for one peer: those of ten rounds, or some minutes of probes."""


class PeerQueue:
    """Frames to one peer in order, urgent ones first.

    One task sends them and ends when the queue is empty. `paced`: `later` frames have pauses (send_priority.py).
    """

    def __init__(
        self,
        transport: Transport,
        peer: PeerId,
        unreachable: Callable[[PeerId], None],
        ended: Callable[[PeerQueue, BaseException | None], None],
        longest: int,
        precedence: SendPriority,
        sent: Callable[[PeerId, Frame, bool], None] = lambda peer, frame, urgent: None,
        paced: bool = False,
    ) -> None:
        self.peer, self.paced = peer, paced
        self._transport, self._unreachable, self._over, self._longest = transport, unreachable, ended, longest
        self._precedence, self._sent = precedence, sent
        self._urgent: deque[Frame] = deque()
        self._later: deque[Frame] = deque()
        self._leaving: Frame | None = None
        """Urgent frame that is being sent."""
        self._task: asyncio.Task[None] | None = None

    def put(self, frame: Frame, *, later: bool = False) -> None:
        """Queue a frame; `later` frames (those that a peer asked for) are sent when no other waits."""
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
        """Return the number of waiting `later` frames of a kind, of one fragment if given."""
        found = (frame.message for frame in self._later if isinstance(frame.message, kind))
        return sum(fragment is None or getattr(message, "fragment", None) == fragment for message in found)

    def holds(self, message: Message) -> bool:
        """Return whether a `later` frame with this message waits."""
        return any(frame.message == message for frame in self._later)

    def take(self, kind: type[Message], fragment: int) -> list[Frame]:
        """Remove the `later` frames of a kind and a fragment, and return them."""
        found: list[Frame] = []
        left: deque[Frame] = deque()
        for frame in self._later:
            wanted = isinstance(frame.message, kind) and getattr(frame.message, "fragment", None) == fragment
            (found if wanted else left).append(frame)
        self._later = left
        self._precedence.drop(0)  # A frame may have waited for its turn.
        return found

    def owes(self, round: int, fragment: int) -> bool:
        """Return whether data of a round that the peer has not asked for waits, or is being sent."""
        return any(_of_round(frame, round, fragment) for frame in (self._leaving, *self._urgent) if frame is not None)

    def keep(self, wanted: Callable[[Frame], bool]) -> None:
        """Drop the urgent frames that are not `wanted` any more."""
        before, self._urgent = len(self._urgent), deque(frame for frame in self._urgent if wanted(frame))
        self._precedence.drop(before - len(self._urgent))

    def clear(self) -> None:
        """Drop all frames not yet handed to the transport."""
        self._precedence.drop(len(self._urgent))
        self._urgent.clear()
        self._later.clear()

    async def _drain(self) -> None:
        while self._urgent or self._later:
            if self.paced and not self._urgent:
                await self._precedence.turn(lambda: not self._later, *state_of(self.peer, self._later[0]))
                if not self._later:
                    continue
            urgent = bool(self._urgent)
            frame = self._urgent.popleft() if urgent else self._later.popleft()
            self._leaving = frame if urgent else None
            try:
                taken = await self._transport.send(self.peer, frame)
            finally:
                self._leaving = None
                self._precedence.sent(urgent, nbytes(frame.payload))
            if taken:
                self._sent(self.peer, frame, urgent)
            else:
                self.clear()
                self._unreachable(self.peer)

    async def close(self) -> None:
        """Stop sending."""
        self.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _of_round(frame: Frame, round: int, fragment: int) -> bool:
    message = frame.message
    return isinstance(message, ROUND) and (message.round, message.fragment) == (round, fragment)


def state_of(peer: PeerId, frame: Frame) -> tuple[int, Reader]:
    """Return the bytes and the reader of a frame with pauses.

    An offer counts no bytes: the joiner waits for it, and it is small.
    """
    message = frame.message
    return 0 if isinstance(message, StateOffer) else nbytes(frame.payload), (peer, getattr(message, "fragment", 0))


@dataclass(slots=True)
class Outflow:
    """Data of a round that we send unasked. left: time at which its last frame left; 0.0: none."""

    round: int
    receivers: set[PeerId] = field(default_factory=set)
    pending: dict[PeerId, int | None] = field(default_factory=dict)
    """For each receiver that may lack some of it: the bulk bytes of the link with which all has arrived.

    None: part of it was not handed to the transport at the last look.
    """
    left: float = 0.0

    @property
    def most_lack(self) -> bool:
        """True if most receivers may lack some of it."""
        return 2 * len(self.pending) > len(self.receivers)


class SendQueue:
    """Queues for all peers of one transport; calls `unreachable` when the transport cannot reach a peer.

    Frames that we send unasked are bounded by the rounds (`begin` drops obsolete ones) and consist of views of data
    that is in memory anyway. Requested data is queued with `later`; the code that answers first checks how much of it
    still waits. State goes after rounds (see send_priority.py), news about members after all other control messages to
    a peer.
    """

    def __init__(self, transport: Transport, unreachable: Callable[[PeerId], None] = lambda peer: None) -> None:
        self._transport, self._unreachable = transport, unreachable
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Receives the exception of a local failure, for example in a send.

        The code that runs the peer awaits it.
        """
        self.bandwidth = Bandwidth()
        """Estimate of our link, from the bytes that `look` samples."""
        self._control: dict[PeerId, PeerQueue] = {}
        self._bulk: dict[PeerId, PeerQueue] = {}
        self._state: dict[PeerId, PeerQueue] = {}
        """Frames with pauses, of state and of past rounds: the pauses are no property of a path."""
        self._bulk_priority, self._control_priority = SendPriority(self.look, self.bandwidth.uplink), SendPriority()
        self._begun: dict[int, int] = {}
        """Round of each fragment for which we have not sent a contribution."""
        self._outflows: dict[int, Outflow] = {}
        """Data of the round of each fragment."""
        self._now = asyncio.get_running_loop().time
        self.ways = LinkRates()
        """Rates of the paths to other peers."""

    def control(self, to: PeerId, message: Message) -> None:
        """Queue a control message."""
        self._put(self._control, to, MAX_CONTROL, Frame(message), later=isinstance(message, NEWS))

    def bulk(self, to: PeerId, frame: Frame, *, later: bool = False, paced: bool = False) -> None:
        """Queue a frame with a payload; the payload must not change before it is sent.

        `paced`: it shares the part of the uplink that state has, and is queued only once, however often it is requested.
        """
        message = frame.message
        if isinstance(message, (Chunk, Partial)) and self._begun.get(message.fragment) == message.round and not later:
            del self._begun[message.fragment]
            self._bulk_priority.busy()
        if isinstance(message, ROUND) and not later and (outflow := self._outflow(message.round, message.fragment)):
            outflow.receivers.add(to)
            outflow.pending[to] = None
        if paced and to in self._state and self._state[to].holds(message):
            return
        lanes = self._state if paced or isinstance(message, STATE) else self._bulk
        self._put(lanes, to, LONGEST, frame, later=later or paced)

    def look(self) -> None:
        """Sample the transferred bytes, if due: after each bulk frame, and whenever the rounds have news."""
        if self.bandwidth.due(now := self._now()):
            up, down = self._transport.totals()
            self.bandwidth.look(up - self._bulk_priority.paced, down, now)

    def hurry(self, reader: Reader, hurried: bool) -> None:
        """Send state to a reader without pauses, or with them."""
        self._bulk_priority.hurry(reader, hurried)

    def release(self, to: PeerId, fragment: int) -> None:
        """Send the waiting results of a fragment to a peer without pauses."""
        if to in self._state:
            for frame in self._state[to].take(Result, fragment):
                self.bulk(to, frame, later=True)

    def came(self, peer: PeerId) -> int:
        """Return the bulk bytes received over the link to a peer."""
        return self._transport.came(peer)

    def later(self, to: PeerId, kind: type[Message] = Message, fragment: int | None = None) -> int:
        """Return the number of `later` frames of a kind that wait for a peer, of one fragment if given.

        Frames with pauses count only if a kind is given.
        """
        lanes = (self._bulk,) if kind is Message else (self._bulk, self._state)
        return sum(one[to].later(kind, fragment) for one in lanes if to in one)

    def left(self, round: int, fragment: int) -> float:
        """Return the time at which the last bulk frame of a round left this queue; 0.0 if unknown.

        Requested frames do not count: another peer decides how many there are.
        """
        outflow = self._outflow(round, fragment)
        return outflow.left if outflow is not None else 0.0

    def sending(self, round: int, fragment: int) -> bool:
        """Return whether most peers that get data of a round from us unasked lack some of it.

        Then our uplink is what limits, and not the receivers. Asks the transport about those that may lack something.
        """
        outflow = self._outflow(round, fragment)
        if outflow is None:
            return False
        for peer, last in list(outflow.pending.items()):
            if not outflow.most_lack:
                break
            taken, arrived = self._transport.delivered(peer)
            if last is None and not (peer in self._bulk and self._bulk[peer].owes(round, fragment)):
                outflow.pending[peer] = last = taken
            if last is not None and arrived >= last:
                del outflow.pending[peer]
        return outflow.most_lack

    def _outflow(self, round: int, fragment: int) -> Outflow | None:
        outflow = self._outflows.get(fragment)
        return outflow if outflow is not None and outflow.round == round else None

    @property
    def idle(self) -> bool:
        """True if everything but frames with pauses was handed to the transport."""
        return not self._control and not self._bulk

    def begin(self, round: int, fragment: int = 0) -> None:
        """Begin a round: drop waiting frames of this fragment from before the previous round."""
        self._begun[fragment] = round
        self._outflows[fragment] = Outflow(round)
        self._bulk_priority.rest()

        def wanted(frame: Frame) -> bool:
            message = frame.message
            if not isinstance(message, ROUND) or message.fragment != fragment:
                return True
            return message.round >= round - 1

        for lane in self._bulk.values():
            lane.keep(wanted)

    def recall(self, round: int, fragment: int) -> None:
        """Drop waiting unrequested frames of a round's ring: another ballot has begun."""

        def wanted(frame: Frame) -> bool:
            message = frame.message
            return not isinstance(message, (Partial, Result)) or (message.round, message.fragment) != (round, fragment)

        for lane in self._bulk.values():
            lane.keep(wanted)

    def withdraw(self, peer: PeerId, round: int, fragment: int) -> None:
        """Drop waiting chunks of our own contribution for a peer: another partner was drawn."""

        def wanted(frame: Frame) -> bool:
            message = frame.message
            return not isinstance(message, Chunk) or (message.round, message.fragment) != (round, fragment)

        if peer in self._bulk:
            self._bulk[peer].keep(wanted)

    def drop(self, peer: PeerId) -> None:
        """Drop everything queued for a peer whose link broke."""
        for lanes in (self._control, self._bulk, self._state):
            if peer in lanes:
                lanes[peer].clear()
        for outflow in self._outflows.values():
            outflow.pending.pop(peer, None)  # The next link counts from 0.

    def _ended(self, lane: PeerQueue, error: BaseException | None) -> None:
        """Remove a queue that has nothing left to send: peers come and go."""
        for lanes in (self._control, self._bulk, self._state):
            if lanes.get(lane.peer) is lane:
                del lanes[lane.peer]
                if lanes is self._bulk:
                    self.ways.over(lane.peer, self._now())
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Report a local failure to the code that runs the peer."""
        if not self.failure.done():
            self.failure.set_exception(error)

    async def close(self) -> None:
        """Stop all queues."""
        self.failure.cancel()
        for lane in (*self._control.values(), *self._bulk.values(), *self._state.values()):
            await lane.close()

    def _put(
        self, lanes: dict[PeerId, PeerQueue], to: PeerId, longest: int, frame: Frame, *, later: bool = False
    ) -> None:
        bulk = lanes is not self._control
        if to not in lanes:
            state = state_of(to, frame) if lanes is self._state else None
            if (state is None or self._bulk_priority.free(*state)) and self._transport.offer(to, frame):
                if state is not None:
                    self._bulk_priority.took(*state)
                if bulk:
                    self.look()
                    self._left(to, frame, not later)
                return
            if lanes is self._bulk:
                self.ways.wait(to, self._now())
            precedence, sent = (
                (self._bulk_priority, self._left)
                if bulk
                else (self._control_priority, lambda peer, frame, urgent: None)
            )
            paced = lanes is self._state
            lanes[to] = PeerQueue(self._transport, to, self._unreachable, self._ended, longest, precedence, sent, paced)
        lanes[to].put(frame, later=later)

    def _left(self, to: PeerId, frame: Frame, urgent: bool) -> None:
        """Count a sent bulk frame. urgent: no peer has asked for it."""
        message = frame.message
        if urgent and isinstance(message, ROUND) and (outflow := self._outflow(message.round, message.fragment)):
            outflow.left = self._now()
        self.ways.sent(to, nbytes(frame.payload), self._now())
