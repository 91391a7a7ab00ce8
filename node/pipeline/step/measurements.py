"""Measurements of peers and links from the origin's point of view, the input of its plans.

Clocks of different peers are never compared. The origin notes when a message arrives that a peer has passed a
micro-batch on; the peer reports how long it computed. The time between two peers' messages is the transfer time between
the peers, plus the difference of the messages' own transfer times, which cancels out over both directions. If a peer
was still busy with another micro-batch when this one arrived, the measurement is only an upper bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np
from thinwire.node.pipeline.planner.problem import Problem
from thinwire.node.pipeline.planner.simulate_kernel import BACKWARD, LOSS
from thinwire.node.pipeline.step.timeouts import CLOCK_STEP
from thinwire.swarm.messages.registry import PeerId

NEWEST = 9
"""Number of measurements of one kind that count, the newest ones; outliers do not move their median."""

IDLE = 0.05
"""A peer has waited if it was idle for more than this fraction of its computing time."""

ME: PeerId = b""
"""The origin."""


@dataclass(slots=True)
class _LinkTimes:
    """Seconds from one peer to another: measured values, and upper bounds."""

    exact: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    bounds: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))

    @property
    def seconds(self) -> float:
        return median(self.exact) if self.exact else min(self.bounds)


@dataclass(frozen=True, slots=True)
class _Report:
    """Times in seconds at which a peer started and the origin learned its end; `idle`: it had waited."""

    began: float
    reported: float
    idle: bool


class Measurements:
    """Measurements of one origin; see the module. `now`: seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._computed: dict[tuple[PeerId, str], deque[float]] = {}
        self._links: dict[tuple[PeerId, PeerId], _LinkTimes] = {}
        self._reports: dict[tuple[int, bool], dict[PeerId, _Report]] = {}
        self._done: dict[PeerId, float] = {}
        self._waited: dict[PeerId, float] = {}

    # Input

    def own(self, part: str, asked: float) -> None:
        """Record that the origin has computed `part` ("begin", "turn" or "finish") of a micro-batch.

        `asked`: time at which that was ready.
        """
        now = self.now()
        self._add(ME, part, now - max(asked, self._done.get(ME, asked)))
        self._done[ME] = now

    def sent(self, micro: int, *, backward: bool) -> None:
        """Record that the origin has just sent a micro-batch, or its gradient."""
        now = self.now()
        self._reports[micro, backward] = {ME: _Report(now, now, True)}

    def passed(self, peer: PeerId, micro: int, seconds: float, *, backward: bool) -> None:
        """Record that a peer has passed on a micro-batch after `seconds` of computing, as it reports."""
        reports, now = self._reports.get((micro, backward)), self.now()
        if reports is None or peer in reports:
            return
        most = now - reports[ME].began
        seconds = min(max(0.0, seconds), most) if seconds == seconds else most
        self._add(peer, "backward" if backward else "forward", seconds)
        idle = now - seconds - self._done.get(peer, -np.inf)
        reports[peer] = _Report(now - seconds, now, idle > IDLE * seconds + CLOCK_STEP)
        self._done[peer] = now

    def arrived(self, micro: int, peers: Sequence[PeerId], *, backward: bool) -> None:
        """Record that a micro-batch, or its gradient, has just arrived over these peers, in this order."""
        reports, now = self._reports.pop((micro, backward), {}), self.now()
        known = [(ME, reports.get(ME)), *((peer, reports.get(peer)) for peer in peers), (ME, _Report(now, now, True))]
        for (a, before), (b, after) in pairwise(known):
            if before is not None and after is not None:
                link = self._links.setdefault((a, b), _LinkTimes())
                (link.exact if after.idle else link.bounds).append(after.began - before.reported)
                self._waited[b] = self._waited.get(b, 0.0) + max(0.0, after.reported - before.reported - link.seconds)

    def closed(self) -> None:
        """End a step: nothing is in progress any more."""
        self._reports.clear()

    def waited(self) -> dict[PeerId, float]:
        """Return the seconds that micro-batches waited or were computed at each peer since the last call.

        Divided by the elapsed seconds this is the mean number of micro-batches there.
        """
        found, self._waited = self._waited, {}
        found.pop(ME, None)
        return found

    def _add(self, peer: PeerId, part: str, seconds: float) -> None:
        self._computed.setdefault((peer, part), deque(maxlen=NEWEST)).append(seconds)

    # Output

    def work(self, peer: PeerId) -> float | None:
        """Return the seconds of a forward pass, scaled so that a plan's passes take their real time."""
        parts = ("begin", "turn", "finish") if peer == ME else ("forward", "backward")
        known = [median(self._computed[peer, part]) for part in parts if (peer, part) in self._computed]
        if len(known) < len(parts):
            return None
        return max(CLOCK_STEP, sum(known) / (1.0 + BACKWARD + (LOSS if peer == ME else 0.0)))

    def delay(self, a: PeerId, b: PeerId) -> float | None:
        """Return the seconds of a micro-batch between two peers, the mean of both directions."""
        known = [self._links[pair].seconds for pair in ((a, b), (b, a)) if pair in self._links]
        return max(0.0, sum(known) / len(known)) if known else None

    def instance(
        self, stages: Sequence[Sequence[PeerId]], *, length: int, paths: int, rounds: int, room: int, swaps: int
    ) -> Problem:
        """Return the input of a planner: the origin as peer 0, then those of `stages` (1 and up) in order.

        An unmeasured peer counts as fast as the median. An unused link counts as fast as the fastest known link of
        either end, whichever is slower: so plans try links that may be better, and measure them.
        """
        peers = [ME, *(peer for stage in stages for peer in stage)]
        works = [self.work(peer) for peer in peers]
        known = [seconds for seconds in works if seconds is not None]
        usual = median(known) if known else 1.0
        delays = np.full((len(peers), len(peers)), np.nan)
        for i, a in enumerate(peers):
            for j, b in enumerate(peers):
                seconds = self.delay(a, b) if i != j else None
                delays[i, j] = np.nan if seconds is None else seconds
        measured = ~np.isnan(delays)
        middle = float(np.median(delays[measured])) if measured.any() else usual
        nearest = np.where(measured, delays, np.inf).min(axis=1)
        nearest[np.isinf(nearest)] = middle
        delays = np.where(measured, delays, np.maximum(nearest[:, None], nearest[None, :]))
        np.fill_diagonal(delays, 0.0)
        numbers = iter(range(1, len(peers)))
        return Problem(
            name="",
            delays=delays,
            stages=((0,), *(tuple(next(numbers) for _ in stage) for stage in stages)),
            work=np.array([usual if seconds is None else seconds for seconds in works]),
            memory=np.array([paths, *(room for _ in peers[1:])], np.int64),
            length=length,
            per_start=paths,
            rounds=rounds,
            gap=0.0,
            swaps=swaps,
        )
