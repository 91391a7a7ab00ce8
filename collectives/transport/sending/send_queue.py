"""Queues of outgoing frames.

Each peer has one for control and one for bulk, so that a slow peer delays no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from thinwire.collectives.transport.interface import Transport
from thinwire.collectives.transport.sending.link_rates import LinkRates
from thinwire.collectives.transport.sending.own_bandwidth import Bandwidth
from thinwire.collectives.transport.sending.peer_queue import PeerQueue, cost
from thinwire.collectives.transport.sending.round_outflows import ROUND_DATA, RoundOutflows, of_round
from thinwire.collectives.transport.sending.send_priority import Reader, SendPriority
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
)

MAX_BULK = 8 * MAX_CHUNKS
"""Most bulk frames that wait for one peer, four times what a round can need.

A peer that exceeds it is treated as unreachable.
"""

MAX_CONTROL = 512
"""Most control frames that wait for one peer: those of ten rounds, or some minutes of probes."""

MEMBERSHIP_NEWS = (Gossip, PushPull)
"""Control messages that are sent only when nothing else waits for the peer."""

STATE = (StateChunk, StateOffer)
"""Bulk data of a peer that is no part of the swarm yet."""


class SendQueue:
    """Queues for all peers of one transport; calls `unreachable` when the transport cannot reach a peer.

    Frames that we send unasked are bounded by the rounds (`begin` drops obsolete ones) and consist of views of data
    that is in memory anyway. Frames that a peer has requested are sent when no other one waits for it; the code that
    answers first checks how many still wait (`requested`). State goes after rounds (see send_priority.py), news about
    members after all other control messages to a peer.
    """

    def __init__(self, transport: Transport, unreachable: Callable[[PeerId], None] = lambda peer: None) -> None:
        self._transport, self._unreachable = transport, unreachable
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Receives the exception of a local failure, for example in a send.

        The code that runs the peer awaits it.
        """
        self.bandwidth = Bandwidth(transport.up_limit)
        """Estimate of our link, from the bytes that `sample_bandwidth` reads."""
        self.debtors: dict[PeerId, int] = {}
        """Peers behind relays that owe us data of which no byte has come, with the bulk bytes of their links."""
        self.link_rates = LinkRates()
        """Rates of the paths to other peers."""
        self._control: dict[PeerId, PeerQueue] = {}
        self._bulk: dict[PeerId, PeerQueue] = {}
        self._state: dict[PeerId, PeerQueue] = {}
        """Frames with pauses, of state and of past rounds: the pauses are no property of a path."""
        self._bulk_priority = SendPriority(self.sample_bandwidth, self.bandwidth.uplink)
        self._control_priority = SendPriority()
        self._begun: dict[int, int] = {}
        """Round of each fragment for which we have not sent a contribution."""
        self._outflows = RoundOutflows(transport.delivered, self._waits)
        self._now = asyncio.get_running_loop().time

    # --- frames

    def control(self, to: PeerId, message: Message) -> None:
        """Queue a control message."""
        self._put(self._control, to, Frame(message), deferred=isinstance(message, MEMBERSHIP_NEWS))

    def bulk(self, to: PeerId, frame: Frame, *, requested: bool = False, paced: bool = False) -> None:
        """Queue a frame with a payload; the payload must not change before it is sent.

        `requested`: the peer has asked for it. `paced`: requested, too, and the frame shares the part of the uplink that state
        has, and is queued only once, however often it is requested.
        """
        message = frame.message
        if not requested:
            self._outflows.queued(to, frame)
            if isinstance(message, (Chunk, Partial)) and self._begun.get(message.fragment) == message.round:
                del self._begun[message.fragment]
                self._bulk_priority.end_training()
        if paced and to in self._state and self._state[to].defers(message):
            return
        queues = self._state if paced or isinstance(message, STATE) else self._bulk
        self._put(queues, to, frame, deferred=requested or paced)

    def requested(self, to: PeerId, kind: type[Message] = Message, fragment: int | None = None) -> int:
        """Return the number of requested frames of a kind that wait for a peer, of one fragment if given.

        Frames with pauses count only if a kind is given.
        """
        queues = (self._bulk,) if kind is Message else (self._bulk, self._state)
        return sum(one[to].deferred(kind, fragment) for one in queues if to in one)

    def hurry(self, reader: Reader, hurried: bool) -> None:
        """Send state to a reader without pauses, or with them."""
        self._bulk_priority.hurry(reader, hurried)

    def withdraw(self, to: PeerId, kind: type[Message], fragment: int) -> list[Frame]:
        """Remove the frames of state of a kind and fragment that wait for a peer, and return them."""
        return self._state[to].take_deferred(kind, fragment) if to in self._state else []

    def end_pauses(self, to: PeerId, fragment: int) -> None:
        """Send the waiting results of a fragment to a peer without pauses."""
        for frame in self.withdraw(to, Result, fragment):
            self.bulk(to, frame, requested=True)

    @property
    def idle(self) -> bool:
        """True if everything but frames with pauses was handed to the transport."""
        return not self._control and not self._bulk

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return length and limit of the longest queue of each kind."""
        return {
            "control queue": (_longest(self._control), MAX_CONTROL),
            "bulk queue": (_longest(self._bulk), MAX_BULK),
            "state queue": (_longest(self._state), MAX_BULK),
        }

    # --- rounds

    def begin(self, round: int, fragment: int = 0) -> None:
        """Begin a round: drop waiting frames of this fragment from before the previous round."""
        self._begun[fragment] = round
        self._outflows.begin(round, fragment)
        self._bulk_priority.begin_training()

        def obsolete(frame: Frame) -> bool:
            message = frame.message
            return isinstance(message, ROUND_DATA) and message.fragment == fragment and message.round < round - 1

        for queue in self._bulk.values():
            queue.drop(obsolete)

    def rest(self) -> None:
        """Free memory of the transport that only exchanges need: inner steps begin."""
        self._transport.rest()

    def drop_ring_frames(self, round: int, fragment: int) -> None:
        """Drop waiting unrequested frames of a round's ring: another ballot has begun."""
        concerned = of_round(round, fragment)
        for queue in self._bulk.values():
            queue.drop(lambda frame: isinstance(frame.message, (Partial, Result)) and concerned(frame))

    def drop_data(self, peer: PeerId, round: int, fragment: int) -> None:
        """Drop waiting unrequested data of a round for a peer: another partner was drawn, or it is sent again."""
        if peer in self._bulk:
            self._bulk[peer].drop(of_round(round, fragment))

    def last_sent(self, round: int, fragment: int) -> float:
        """Return the time at which the last bulk frame of a round left this queue; 0.0 if unknown.

        Requested frames do not count: another peer decides how many there are.
        """
        return self._outflows.last_sent(round, fragment)

    def uplink_limits(self, round: int, fragment: int) -> bool:
        """Return True if most peers that get data of a round from us unasked lack some of it.

        Then our uplink is what limits, and not the receivers.
        """
        return self._outflows.most_lack(round, fragment)

    def _waits(self, peer: PeerId, round: int, fragment: int) -> bool:
        return peer in self._bulk and self._bulk[peer].has(of_round(round, fragment))

    # --- measured rates

    def sample_bandwidth(self) -> None:
        """Sample the transferred bytes, if due: called after each bulk frame, and when a round progresses."""
        if self.bandwidth.due(now := self._now()):
            up, down = self._transport.totals()
            self.bandwidth.add_sample(up - self._bulk_priority.paced, down, now)

    def received(self, peer: PeerId) -> int:
        """Return the bulk bytes received over the link to a peer."""
        return self._transport.bulk_received(peer)

    def received_over_relay(self, peer: PeerId) -> int | None:
        """Return the bulk bytes received over the link to a peer; None if the link has no relay."""
        return self.received(peer) if self._transport.relay_of(peer) is not None else None

    def note_debtor(self, peer: PeerId, before: int | None) -> None:
        """Note that the data of a peer is overdue, if its link has a relay, and no byte has come.

        before: `received_over_relay` when the wait for the data began.
        """
        if before is not None and self.received_over_relay(peer) == before:
            self.debtors[peer] = before

    # --- ends

    def drop(self, peer: PeerId) -> None:
        """Drop everything queued for a peer whose link broke."""
        self.debtors.pop(peer, None)
        for queues in (self._control, self._bulk, self._state):
            if peer in queues:
                queues[peer].clear()
        self._outflows.on_link_down(peer)

    def fail(self, error: BaseException) -> None:
        """Report a local failure to the code that runs the peer."""
        if not self.failure.done():
            self.failure.set_exception(error)

    async def close(self) -> None:
        """Stop all queues."""
        self.failure.cancel()
        for queue in (*self._control.values(), *self._bulk.values(), *self._state.values()):
            await queue.close()

    def _ended(self, queue: PeerQueue, error: BaseException | None) -> None:
        """Remove a queue that has nothing left to send: peers join and leave."""
        for queues in (self._control, self._bulk, self._state):
            if queues.get(queue.peer) is queue:
                del queues[queue.peer]
                if queues is self._bulk:
                    self.link_rates.over(queue.peer, self._now())
        if error is not None:
            self.fail(error)

    # --- handing over a frame: to the transport at once, or into a queue

    def _put(self, queues: dict[PeerId, PeerQueue], to: PeerId, frame: Frame, *, deferred: bool = False) -> None:
        if to not in queues:
            if self._sent_at_once(queues, to, frame, deferred):
                return
            if queues is self._bulk:
                self.link_rates.wait(to, self._now())
            queues[to] = self._queue(queues, to)
        queues[to].put(frame, deferred=deferred)

    def _sent_at_once(self, queues: dict[PeerId, PeerQueue], to: PeerId, frame: Frame, deferred: bool) -> bool:
        paced = cost(to, frame) if queues is self._state else None
        if (paced is not None and not self._bulk_priority.free(*paced)) or not self._transport.offer(to, frame):
            return False
        if paced is not None:
            self._bulk_priority.begin_pause(*paced)
        if queues is not self._control:
            self.sample_bandwidth()
            self._sent(to, frame, deferred)
        return True

    def _queue(self, queues: dict[PeerId, PeerQueue], to: PeerId) -> PeerQueue:
        where = self._transport, to, self._unreachable, self._ended
        if queues is self._control:
            return PeerQueue(*where, MAX_CONTROL, self._control_priority)
        return PeerQueue(*where, MAX_BULK, self._bulk_priority, self._sent, queues is self._state)

    def _sent(self, to: PeerId, frame: Frame, deferred: bool) -> None:
        """Count a sent bulk frame."""
        if not deferred:
            self._outflows.sent(frame, self._now())
        self.link_rates.sent(to, nbytes(frame.payload), self._now())


def _longest(queues: dict[PeerId, PeerQueue]) -> int:
    return max(map(len, queues.values())) if queues else 0
