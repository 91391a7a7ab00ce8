"""Limit of the small frames that one peer may send."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from thinwire.collectives.transport.rate_limit import TokenBuckets
from thinwire.swarm.messages.registry import Activation, Message, Passed, PeerId, Ready, Route, StateChunk

ANNOUNCED = 1024
"""Announcements that are remembered: as many as the fragments of a run, which each have one at a time."""

MUTUAL = (Route, Activation, Passed, StateChunk)
"""Frames of pipelines and of the transfer of a state: a peer that gets one sends others in return."""


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Numbers of small frames that a peer may send, see FrameLimit.

    - `burst`: at once.
    - `rate`: per second.
    - `round`: for each announcement of ours.
    - `answers`: for each frame of MUTUAL that we send to the peer.
    - `pause`: seconds for which the link of a peer that has sent more is not read.
    - `small`: bytes of payload from which a bulk frame is not small.
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
    which no other peer can hasten. It may also send some for each frame that it gets from us in a pipeline or a transfer of
    state. A link whose peer has sent more is not read for a while, so that the rest waits with the sender.
    """

    def __init__(self, limits: FrameLimits) -> None:
        self.limits = limits
        self.pauses: Counter[PeerId] = Counter()
        """Number of times that each peer was not read for a while."""
        self._buckets = TokenBuckets(limits.burst, limits.rate)
        self._ahead = 0.0
        """Seconds for which the buckets have been filled in advance."""
        self._announced: dict[tuple[int, int, int, bytes], None] = {}

    def admits(self, peer: PeerId, now: float, *, payload: int = 0) -> bool:
        """Count a received frame; return False if it is one too many.

        `payload`: its bytes of payload if it is bulk.
        """
        return payload >= self.limits.small or self._buckets.take(peer, now + self._ahead)

    def sent(self, peer: PeerId, message: Message) -> None:
        """Note a message that is sent to a peer, and allow it the frames that follow from that.

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
