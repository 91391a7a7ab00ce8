"""How many inner steps each peer makes, so that unequal peers arrive together (`outer.work = "by-power"`).

The rule is local and needs no agreement: how many steps a peer makes is its own affair, and its contribution counts by its
tokens. Every announcement carries the speed that its peer has measured over its own inner steps. A round is meant to last as
long as the usual peer, the one in the middle, takes for H steps; of two in the middle the faster. Each makes as many as fit
into that time: H_m = round(v_m / v · H), one at least. The middle, because then H keeps its meaning for most, no single
peer's word, true or not, sets the pace of all, and one very fast peer does not leave the others a step or two; where there are
but two, one's word does, so nobody makes fewer than FEWEST · H steps. `spread` bounds what a fast one adds: replicas that train
on for too long drift apart, and its weight would drown the others. Who has not measured itself yet makes H / spread steps, and
so knows its speed early. Speeds count tokens: what is a step has to be the same for all, as it is but in training loops of
one's own with batches that differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

FRESH = 3
"""Rounds for which an announced speed counts."""

FEWEST = 1 / 16
"""Part of H that everybody makes at least."""


def steps_by_power(own: float, others: Iterable[float], steps: int, spread: float) -> int:
    """Inner steps of one peer's next round. `own`, `others`: tokens/s, 0 for unknown; `steps`: H."""
    if not (math.isfinite(own) and own > 0):
        return max(1, round(steps / spread))
    speeds = sorted((own, *(speed for speed in others if math.isfinite(speed) and speed > 0)), reverse=True)
    part = own / speeds[(len(speeds) - 1) // 2]
    return max(1, round(steps * min(spread, max(FEWEST, part))))
