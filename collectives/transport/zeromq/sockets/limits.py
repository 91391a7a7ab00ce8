"""All limits of the real transport: deadlines, rates, caps. Tests pass smaller ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.collectives.transport.circuits.limits import CircuitLimits
from thinwire.collectives.transport.frame_limit import FrameLimits
from thinwire.collectives.transport.shared_memory.local_sockets import SharedLimits


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in seconds, bytes and counts, with production defaults.

    - `handshake`: how long a connection may stay unauthenticated.
    - `knock`: how long a stranger waits for a gate's answer.
    - `hold`: how long a gate delays a Hello while we dial the same peer.
    - `young`: age up to which a link is not replaced.
    - `heartbeat`, `silence`: how often to probe a quiet control connection, and after how long without an answer it is lost.
    - `stall`: how long a peer may take none of the data sent to it.
    - `rate` (bytes/s), `rate_window`: least speed of a record once it has begun, and the time over which it is measured;
      silence between records is allowed.
    - `visits`: concurrent connections at the gate.
    - `half_open`: unauthenticated bulk connections.
    - `slots`: offered links that were not taken yet.
    - `address_*`, `key_*`: token buckets of new connections for each source address and for each transport key.
    - `visit_*`: token bucket of all visits at the gate that begin a handshake, which costs half a millisecond of a core.
    - `network_*`: token bucket of the visits of one network. A network that has emptied it cannot use the last half of the
      bucket of all visits.
    - `receive_queue`: bytes received and not yet taken by `recv`.
    - `window`: bytes of one unfinished control message.
    - `returned`: concurrent visits of ours to the gates of visitors, to test their addresses.
    - `ballast_*`: token bucket of answers with ballast, by which a visitor measures its downlink.
    - `circuits`, `shared`, `frames`: see CircuitLimits, SharedLimits and FrameLimits.
    - `retry_first`, `retry_last`: bounds of the jittered back-off between dials.
    - `peers`: stored records.
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
    receive_queue: int = 64 << 20
    window: int = 4 << 20
    retry_first: float = 0.25
    retry_last: float = 60.0
    peers: int = 4096
    circuits: CircuitLimits = field(default_factory=CircuitLimits)
    shared: SharedLimits = field(default_factory=SharedLimits)
    frames: FrameLimits = field(default_factory=FrameLimits)


@dataclass(slots=True)
class Retry:
    """Back-off of dials to one peer.

    `at` is the earliest next dial (monotonic seconds), `pause` the last wait before jitter, `reason` that of the last failure.
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
