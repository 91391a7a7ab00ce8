"""Estimate of a peer's uplink and downlink from the bytes of real transfers.

It sends no probes and needs no clock or socket. Between two rounds a link is mostly idle, and during a round it mostly
waits for slower links. So the measure is the densest stretch: the shortest time in which a quarter of all bytes since
the last round went through. Stretches that are too short and amounts that are too small are ignored.

Uplink: a peer's own contribution fills its link, whatever other peers do. Downlink: results arrive no faster than the
slowest peer contributes; but hardly any access link has less downlink than uplink, so the announced downlink is at
least the uplink.
"""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.swarm.quantized_links import CEILING

LEAST = 1 << 18
"""Bytes in one direction since the last round below which the estimate does not change."""

PART = 4
"""The stretch contains at least 1/PART of these bytes."""

STEP_BYTES, STEP_SECONDS = 1 << 14, 0.01
"""Bytes between two samples that count, and the shortest useful time between samples in seconds."""

SHORTEST = 0.02
"""Shortest stretch, in seconds, that counts as a measurement."""

MAX_SAMPLES = 1024
"""Most samples to store; beyond that every second one is dropped."""

RISE, FALL = 0.5, 0.2
"""Smoothing factors for a higher and a lower measurement.

A link that was not full looks slower than it is.
"""


class Bandwidth:
    """Estimate for one peer's link. `up`, `down`: bytes/s, smoothed over rounds; 0 means unknown.

    up_limit: bytes/s that the owner allows for sending (0: no limit). The estimate of the uplink is at most that: a burst
    that such a limit lets pass would look like a faster link.
    """

    def __init__(self, up_limit: int = 0) -> None:
        self.up = self.down = 0
        self._ceiling = min(up_limit or CEILING, CEILING)
        self._samples: list[tuple[float, int, int]] = []
        self._base = (0, 0)
        self._quiet: tuple[float, int, int] | None = None
        self._at = float("-inf")

    @property
    def samples(self) -> int:
        """Number of stored samples, at most MAX_SAMPLES."""
        return len(self._samples)

    def due(self, now: float) -> bool:
        """Return True if it is time for another sample."""
        return now >= self._at + STEP_SECONDS

    def add_sample(self, up: int, down: int, now: float) -> None:
        """Add a sample: total bytes sent and received since the start."""
        self._at = now
        _, last_up, last_down = self._samples[-1] if self._samples else (now, *self._base)
        if up - last_up + down - last_down < STEP_BYTES:
            self._quiet = (now, up, down)
            return
        if self._quiet is not None:
            self._samples.append(self._quiet)
            self._quiet = None
        self._samples.append((now, up, down))
        if len(self._samples) > MAX_SAMPLES:
            del self._samples[1:-1:2]

    def known(self) -> tuple[int, int]:
        """Return the estimates (up, down) in bytes/s that were announced last."""
        return self.up, max(self.up, self.down)

    def uplink(self) -> int:
        """Return the uplink in bytes/s: the estimate, else what the round in progress shows; 0 if unknown."""
        times, ups = [at for at, _, _ in self._samples], [up for _, up, _ in self._samples]
        return self.up or _follow(0, densest(times, ups, self._base[0]), self._ceiling)

    def end_round(self) -> tuple[int, int]:
        """End a round: return (up, down) in bytes/s to announce. Later samples count for the next round."""
        times = [now for now, _, _ in self._samples]
        ups, downs = [up for _, up, _ in self._samples], [down for _, _, down in self._samples]
        self.up = _follow(self.up, densest(times, ups, self._base[0]), self._ceiling)
        self.down = _follow(self.down, densest(times, downs, self._base[1]), CEILING)
        if self._samples:
            self._base = self._samples[-1][1:]
            self._samples.clear()
        return self.known()


def _follow(known: int, found: float, ceiling: int) -> int:
    if not found:
        return known
    part = 1.0 if not known else RISE if found > known else FALL
    return min(ceiling, max(1, int(known + part * (found - known))))


def densest(times: Sequence[float], totals: Sequence[int], base: int) -> float:
    """Return bytes/s of the densest stretch with 1/PART of all bytes.

    `totals` holds running totals that start at `base`. Returns 0.0 if there is no stretch, or it is too short.
    """
    if not totals or totals[-1] - base < LEAST:
        return 0.0
    least = (totals[-1] - base) / PART
    best, first = 0.0, 0
    for last in range(1, len(totals)):
        while totals[last] - totals[first + 1] >= least:
            first += 1
        if (nbytes := totals[last] - totals[first]) >= least:
            if (seconds := times[last] - times[first]) < SHORTEST:
                return 0.0
            best = max(best, nbytes / seconds)
    return best
