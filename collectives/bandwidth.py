"""What a peer's link carries, told from the bytes that real transfers moved: no probe, no clock, no socket.

Between two rounds a link is mostly idle, and in a round it mostly waits for slower ones. So what counts is the densest stretch:
the least time in which a quarter of all bytes since the last round went through. What went too fast for us to see says
nothing, and what was too little does not either.

Up, a peer's own contribution fills the link whoever else there is. Down, results come no faster than the slowest contributes;
but hardly any access link carries less down than up, so that what goes up is the least that is announced for both.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST = 1 << 18
"""Bytes in one direction since the last round below which nothing is learned."""

PART = 4
"""The stretch has at least one part in so many of these bytes."""

STEP_BYTES, STEP_SECONDS = 1 << 14, 0.01
"""A look counts once so many bytes have moved since the one before; nobody need look more often than this."""

SHORTEST = 0.02
"""Seconds: a stretch that is over sooner is no measure."""

LOOKS = 1024
"""Looks that are kept; when there are more every second one is forgotten."""

RISE, FALL = 0.5, 0.2
"""Parts by which an estimate follows a higher and a lower measure: a link that was not full looks slower than it is."""

CEILING = 2**40
"""Bytes/s; no link is faster."""


class Bandwidth:
    """One peer's link. `up` and `down`: bytes/s, smoothed over rounds; 0: unknown."""

    def __init__(self) -> None:
        self.up = self.down = 0
        self._looks: list[tuple[float, int, int]] = []
        self._base = (0, 0)
        self._quiet: tuple[float, int, int] | None = None
        self._at = float("-inf")

    def due(self, now: float) -> bool:
        """Whether it is time for another look."""
        return now >= self._at + STEP_SECONDS

    def look(self, up: int, down: int, now: float) -> None:
        """So many bytes have been moved since the beginning."""
        self._at = now
        _, last_up, last_down = self._looks[-1] if self._looks else (now, *self._base)
        if up - last_up + down - last_down < STEP_BYTES:
            self._quiet = (now, up, down)
            return
        if self._quiet is not None:
            self._looks.append(self._quiet)
            self._quiet = None
        self._looks.append((now, up, down))
        if len(self._looks) > LOOKS:
            del self._looks[1:-1:2]

    def known(self) -> tuple[int, int]:
        """What was announced last."""
        return self.up, max(self.up, self.down)

    def settle(self) -> tuple[int, int]:
        """A round is over: what to announce, bytes/s up and down. What is looked at from now on is of the next."""
        times = [now for now, _, _ in self._looks]
        ups, downs = [up for _, up, _ in self._looks], [down for _, _, down in self._looks]
        self.up = _follow(self.up, densest(times, ups, self._base[0]))
        self.down = _follow(self.down, densest(times, downs, self._base[1]))
        if self._looks:
            self._base = self._looks[-1][1:]
            self._looks.clear()
        return self.known()


def _follow(known: int, found: float) -> int:
    if not found:
        return known
    if not known:
        return min(CEILING, max(1, int(found)))
    part = RISE if found > known else FALL
    return min(CEILING, max(1, int(known + part * (found - known))))


def densest(times: Sequence[float], moved: Sequence[int], base: int) -> float:
    """Bytes/s of the densest stretch that has a PART of all bytes; 0.0 when there is none, or one that is too short.

    `moved` counts on from `base`.
    """
    if not moved or moved[-1] - base < LEAST:
        return 0.0
    least = (moved[-1] - base) / PART
    best, first = 0.0, 0
    for last in range(1, len(moved)):
        while moved[last] - moved[first + 1] >= least:
            first += 1
        if (nbytes := moved[last] - moved[first]) >= least:
            if (seconds := times[last] - times[first]) < SHORTEST:
                return 0.0
            best = max(best, nbytes / seconds)
    return best
