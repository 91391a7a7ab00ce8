"""Pledges: a contributor of the first round of a step must be in the second one, with the same weight.

A step is made only if the records of both rounds name the same contributors. A peer that breaks its pledge sits out the
next step, then 2, 4, … steps; each fulfilled pledge takes one doubling back. It is admitted if too few others
contribute. If more than half are missing, no peer is blamed. The pledges are part of the common state, a pure function
of the two records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from thinwire.compression.core.types import Floats
from thinwire.swarm.manifest.tables import MAX_WEIGHT
from thinwire.swarm.messages.registry import MAX_GROUP, Contribution, PeerId

MOST = 6
"""A peer sits out at most two to the power of (this − 1) steps."""

_ROWS, _PEER, _WEIGHT = 2 * MAX_GROUP, 16, 4
_ROW = _PEER + _WEIGHT + 2

SIZE = _ROWS * _ROW
"""Elements of the pledges in a state: per peer, id and weight as 16-bit numbers, broken and rest."""


@dataclass(slots=True)
class Pledge:
    """Pledge of one peer for the step in progress, and the consequences of those that it has broken.

    weight: its weight in the first round of the step, with which it has to contribute to the second one; 0: it has not
    contributed. broken: number of broken pledges that still count against it. rest: steps that it has to sit out.
    """

    weight: int = 0
    broken: int = 0
    rest: int = 0


Pledges = dict[PeerId, Pledge]


def read(numbers: Floats) -> Pledges:
    """Decode the SIZE numbers of a state. A lying peer may have sent any values."""
    words = np.clip(np.nan_to_num(numbers), 0, 65_535).astype("<u2").reshape(_ROWS, _ROW)
    found = {}
    for row in words[words[:, :_PEER].any(axis=1)]:
        weight = int.from_bytes(row[_PEER : _PEER + _WEIGHT].tobytes(), "little")
        broken, rest = int(row[-2]), int(row[-1])
        found[row[:_PEER].tobytes()] = Pledge(min(weight, MAX_WEIGHT), min(broken, MOST), min(rest, 1 << MOST))
    return found


def write(pledges: Pledges, numbers: Floats) -> None:
    """Encode pledges in place. If there are too many, those with the longest rest are stored."""
    order = sorted(pledges, key=lambda peer: (not pledges[peer].weight, -pledges[peer].rest, peer))[:_ROWS]
    words = np.zeros((_ROWS, _ROW), "<u2")
    for row, peer in zip(words, sorted(order), strict=False):
        one = pledges[peer]
        row[:-2] = np.frombuffer(peer + one.weight.to_bytes(2 * _WEIGHT, "little"), "<u2")
        row[-2:] = one.broken, one.rest
    numbers[:] = words.reshape(-1)


def weights(pledges: Pledges) -> dict[PeerId, int]:
    """Return the weights of the contributors of the step in progress."""
    return {peer: one.weight for peer, one in pledges.items() if one.weight}


def resting(pledges: Pledges) -> frozenset[PeerId]:
    """Return the peers that sit out the next step."""
    return frozenset(peer for peer, one in pledges.items() if one.rest)


def begin(pledges: Pledges, contributors: Iterable[Contribution]) -> None:
    """Record the contributors of a committed first round."""
    for entry in contributors:
        pledges.setdefault(entry.peer, Pledge()).weight = entry.weight


def settle(pledges: Pledges, named: Collection[PeerId], members: Collection[PeerId]) -> None:
    """Settle after the commit of a second round that names the peers `named`, and had these members."""
    due = set(weights(pledges))
    missing = due.difference(named)
    blamed = missing if 2 * len(missing) <= len(due) else set()
    for peer, one in list(pledges.items()):
        fulfilled = peer in due and not missing and not one.rest
        one.weight, one.rest, one.broken = 0, max(0, one.rest - 1), max(0, one.broken - fulfilled)
        if peer in blamed:
            one.broken = min(MOST, one.broken + 1)
            one.rest = 2 ** (one.broken - 1)
        if not one.broken or (not one.rest and peer not in members):
            del pledges[peer]
