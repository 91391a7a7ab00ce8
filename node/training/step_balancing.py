"""Number of inner steps per peer, so that unequal peers finish together.

Used with `outer.step_balancing = "by-speed"`.

The rule is local and needs no agreement: a peer's number of steps is its own decision, and its contribution is weighted
by its tokens. Every announcement carries the speed that its peer has measured over its inner steps. A round should last
as long as the median peer (of two the faster) takes for H steps; each peer makes as many as fit: H_m = round(v_m / v ·
H), at least one. The median keeps the meaning of H for most peers, no single peer's claim, true or not, sets the pace
of all, and one very fast peer does not reduce the others to a step or two. With only two peers one claim does set the
pace, so every peer makes at least FEWEST · H steps. `spread` limits what a fast peer adds: replicas that train too long
drift apart, and its weight would dominate. A peer without a measurement makes H / spread steps, and so learns its speed
early. Speeds count tokens: steps must have the same size on all peers, which may fail only in users' own training loops
with different batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

FRESH = 3
"""Rounds for which an announced speed counts."""

FEWEST = 1 / 16
"""Least fraction of H that every peer makes."""


def steps_by_power(own: float, others: Iterable[float], steps: int, spread: float) -> int:
    """Return the inner steps of one peer's next round.

    `own`, `others`: tokens/s, 0 for unknown; `steps`: H.
    """
    if not (math.isfinite(own) and own > 0):
        return max(1, round(steps / spread))
    speeds = sorted((own, *(speed for speed in others if math.isfinite(speed) and speed > 0)), reverse=True)
    part = own / speeds[(len(speeds) - 1) // 2]
    return max(1, round(steps * min(spread, max(FEWEST, part))))
