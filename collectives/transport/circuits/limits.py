"""Limits of circuits: deadlines and caps, and the bytes of a day. Tests pass smaller ones."""

from __future__ import annotations

from dataclasses import dataclass

DAY = 86_400.0
"""Seconds of a day."""


class Allowance:
    """Bytes that may still be relayed: at most `daily`, and each second adds an equal part of them.

    Once they are used up, none may be relayed until there are enough for an hour: a circuit that ends after a second is
    useless. `daily`: bytes a day; 0: no limit. Times are seconds of one monotonic clock.
    """

    def __init__(self, daily: int, now: float) -> None:
        self.daily = daily
        self._left, self._since, self._spent = float(daily), now, False

    def take(self, count: int, now: float) -> None:
        """Use bytes."""
        self._refill(now)
        self._left -= count
        self._spent |= bool(self.daily) and self._left <= 0

    def spent(self, now: float) -> bool:
        """Return True if nothing may be relayed."""
        self._refill(now)
        return self._spent

    def left(self, now: float) -> int | None:
        """Return the bytes that are left; None: no limit."""
        self._refill(now)
        return max(0, int(self._left)) if self.daily else None

    def _refill(self, now: float) -> None:
        self._left = min(float(self.daily), self._left + (now - self._since) * self.daily / DAY)
        self._since = now
        self._spent &= self._left < self.daily / 24


@dataclass(frozen=True, slots=True)
class CircuitLimits:
    """Limits in seconds and counts, with production defaults.

    - `pair`, `asker`: circuits at one relay of one pair, and asked for by one peer, those that wait for an end included. A
      link has four, and one more while it opens.
    - `direct`: seconds to try a peer's addresses before relays are asked (no limit without relays). `search`: seconds to
      ask relays. `again`: longest pause in seconds between two direct dials of a peer with a circuit.
    - `token`: how long a relay waits for both ends. `idle`: how long no circuit of a pair may carry a byte; control
      connections send heartbeats more often.
    - `answer`: how long to wait for a relay's answer. `relays`: relays that are asked in one dial.
    - `avoid`: shortest and longest time in which a relay that has passed on no bulk data is not asked for the same peer again.
    - `invited`: concurrent visits to relays because another peer has asked for us; `answers`: answers that wait to be sent.
    """

    pair: int = 10
    asker: int = 128
    direct: float = 4.0
    search: float = 8.0
    again: float = 60.0
    token: float = 5.0
    idle: float = 60.0
    answer: float = 2.0
    relays: int = 4
    avoid: tuple[float, float] = (15.0, 900.0)
    invited: int = 16
    answers: int = 128
