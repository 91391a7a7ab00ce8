"""All limits of the real transport: deadlines, rates, caps. Tests pass smaller ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from thinwire.collectives.transport.circuits.limits import CircuitLimits
from thinwire.collectives.transport.shared_memory.local_sockets import SharedLimits
from thinwire.swarm.messages.registry import Message, PeerId, Ready


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in seconds, bytes and counts, with production defaults.

    - `handshake`: how long a connection may stay unauthenticated. `knock`: how long a stranger waits for a gate's answer.
    - `hold`: how long a gate delays a Hello for our own dial to the same peer. `young`: a younger link is not replaced.
    - `heartbeat`, `silence`: how often to probe a quiet control connection, and after how long without an answer it is lost.
    - `stall`: how long a peer may take none of the data sent to it. `rate` (bytes/s), over `rate_window`: the least speed of
      a record once it has begun; silence between records is allowed.
    - `visits`: concurrent connections at the gate; `half_open`: unauthenticated bulk connections; `slots`: offered links that
      were not taken yet. `address_*`, `key_*`: token buckets of new connections per source address and per transport key.
      `visit_*`: token bucket of all visits at the gate that begin a handshake, half a millisecond of a core each;
      `network_*`: of the visits of a network that may use its last half.
    - `receive_queue`: bytes received and not yet taken by `recv`; `window`: bytes of one unfinished control message.
    - `returned`: concurrent visits in return; `ballast_*`: token bucket of answers with ballast.
    - `frame_*`: token bucket of the small frames of each peer, see FrameLimit. `small`: bytes of payload from which on a bulk
      frame is not small.
    - `circuits`, `shared`: see there.
    - `retry_first`, `retry_last`: bounds of the jittered back-off between dials. `peers`: records stored.
    """

    handshake: float = 5.0
    knock: float = 8.0
    hold: float = 3.0
    young: float = 2.0
    heartbeat: float = 10.0
    silence: float = 30.0
    stall: float = 30.0
    rate: int = 2048
    rate_window: float = 5.0
    visits: int = 128
    half_open: int = 128
    slots: int = 64
    address_burst: int = 256
    address_rate: float = 20.0
    key_burst: int = 16
    key_rate: float = 1.0
    visit_burst: int = 512
    visit_rate: float = 200.0
    network_burst: int = 16
    network_rate: float = 1.0
    returned: int = 8
    ballast_burst: int = 4
    ballast_rate: float = 0.1
    frame_burst: int = 4096
    frame_rate: float = 500.0
    frame_round: int = 64
    frame_pause: float = 0.1
    small: int = 64 << 10
    receive_queue: int = 64 << 20
    window: int = 4 << 20
    retry_first: float = 0.25
    retry_last: float = 60.0
    peers: int = 4096
    circuits: CircuitLimits = field(default_factory=CircuitLimits)
    shared: SharedLimits = field(default_factory=SharedLimits)


FEW = 64
"""Buckets that are stored although they may be full."""


class TokenBuckets:
    """Token buckets by key: each holds `burst` tokens and gains `rate` per second.

    Full buckets are forgotten, at the latest when there are twice as many as were kept the last time.
    """

    def __init__(self, burst: int, rate: float, capacity: int = 4096) -> None:
        self._burst, self._rate, self._capacity = float(burst), rate, capacity
        self._levels: dict[bytes | str, tuple[float, float]] = {}
        self._most = min(FEW, capacity)

    def take(self, key: bytes | str, now: float, leave: float = 0.0) -> bool:
        """Take one token at time `now` (seconds, monotonic) if at least `leave` tokens are left.

        False: there are fewer, or too many keys have buckets that are not full.
        """
        level, since = self._levels.pop(key, (self._burst, now))
        level = min(self._burst, level + (now - since) * self._rate)
        if len(self._levels) >= self._most:
            self._forget(now)
            if len(self._levels) >= self._capacity:
                return False
            self._most = min(self._capacity, max(FEW, 2 * len(self._levels)))
        granted = level >= 1.0 + leave
        self._levels[key] = (level - 1.0 if granted else level, now)
        return granted

    def _forget(self, now: float) -> None:
        full = [k for k, (level, since) in self._levels.items() if level + (now - since) * self._rate >= self._burst]
        for key in full:
            del self._levels[key]


ANNOUNCED = 1024
"""Announcements that are remembered: as many as the fragments of a run, which each have one at a time."""


class FrameLimit:
    """Limit of the small frames of each peer: control messages, and bulk frames with few bytes of payload.

    A peer may send `frame_burst` at once, then `frame_rate` per second and `frame_round` for each announcement of ours: most
    frames belong to our rounds, which no other peer can hasten. A link whose peer has sent more is not read for `frame_pause`
    seconds, so that the rest waits with the sender.
    """

    def __init__(self, limits: Limits) -> None:
        self.pauses: Counter[PeerId] = Counter()
        """Number of such pauses of each peer."""
        self._limits = limits
        self._buckets = TokenBuckets(limits.frame_burst, limits.frame_rate)
        self._ahead = 0.0
        """Seconds for which the buckets have been filled in advance."""
        self._announced: dict[tuple[int, int, int, bytes], None] = {}

    def admits(self, peer: PeerId, now: float, *, payload: int = 0) -> bool:
        """Count a frame that has come, with so many bytes of payload if it is bulk; return False if it is one too many."""
        return payload >= self._limits.small or self._buckets.take(peer, now + self._ahead)

    def sent(self, message: Message) -> None:
        """Allow all peers the frames of a round if this is our announcement, the first time that it is sent."""
        if not isinstance(message, Ready):
            return
        key = message.round, message.fragment, message.attempt, message.life
        if key not in self._announced:
            self._ahead += self._limits.frame_round / self._limits.frame_rate
            self._announced[key] = None
            if len(self._announced) > ANNOUNCED:
                del self._announced[next(iter(self._announced))]


@dataclass(slots=True)
class Retry:
    """Back-off of dials to one peer.

    `at` is the earliest next dial (monotonic seconds), `pause` the last wait before jitter, `reason` of the last failure.
    """

    at: float = 0.0
    pause: float = 0.0
    reason: str = ""

    def failed(self, now: float, limits: Limits, jitter: float, *, final: bool) -> None:
        """Double the wait after a failed dial, times `jitter`.

        Use the longest wait at once if the answer was `final`.
        """
        longer = max(limits.retry_first, 2 * self.pause)
        self.pause = limits.retry_last if final else min(limits.retry_last, longer)
        self.at = now + self.pause * jitter
