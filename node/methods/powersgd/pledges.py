"""Who has pledged to be in the second of two rounds, with which weight, and who has broken such a pledge.

A step of two rounds is made when the second one's record names those of the first, all of them. So who contributes to the first
round binds the others: its weight is settled there, and when it is missing in the second the step comes to nothing. Whoever
broke a pledge sits out the next step, then 2, 4 and so on, and each pledge that it keeps takes one step back; but it is let in
when too few others contribute. When more than half are missing it was not they who failed, and nobody is blamed.

All this is part of the state that replicas share: a pure function of the two records, so all judge alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from thinwire.compression.core.types import Floats
from thinwire.swarm.manifest.tables import MAX_WEIGHT
from thinwire.swarm.messages.registry import MAX_GROUP, Contribution, PeerId

MOST = 6
"""The longest rest is two to the power of this less one, in steps."""

_ROWS, _PEER, _WEIGHT = 2 * MAX_GROUP, 16, 4
_ROW = _PEER + _WEIGHT + 2

SIZE = _ROWS * _ROW
"""Numbers that the pledges of a swarm take in a state: per peer its name and weight as 16-bit numbers, then broken and rest."""


@dataclass(slots=True)
class Pledge:
    """One peer's. weight: in the first round of the step in progress, 0 when it is not in it. broken: pledges that count
    against it. rest: steps for which it is to sit out.
    """

    weight: int = 0
    broken: int = 0
    rest: int = 0


Pledges = dict[PeerId, Pledge]


def read(numbers: Floats) -> Pledges:
    """The pledges in SIZE numbers of a state, whatever these are: who sent them may have lied."""
    words = np.clip(np.nan_to_num(numbers), 0, 65_535).astype("<u2").reshape(_ROWS, _ROW)
    found = {}
    for row in words[words[:, :_PEER].any(axis=1)]:
        weight = int.from_bytes(row[_PEER : _PEER + _WEIGHT].tobytes(), "little")
        broken, rest = int(row[-2]), int(row[-1])
        found[row[:_PEER].tobytes()] = Pledge(min(weight, MAX_WEIGHT), min(broken, MOST), min(rest, 1 << MOST))
    return found


def write(pledges: Pledges, numbers: Floats) -> None:
    """Put pledges where `read` finds them. When there are too many, those that rest longest are kept."""
    order = sorted(pledges, key=lambda peer: (not pledges[peer].weight, -pledges[peer].rest, peer))[:_ROWS]
    words = np.zeros((_ROWS, _ROW), "<u2")
    for row, peer in zip(words, sorted(order), strict=False):
        one = pledges[peer]
        row[:-2] = np.frombuffer(peer + one.weight.to_bytes(2 * _WEIGHT, "little"), "<u2")
        row[-2:] = one.broken, one.rest
    numbers[:] = words.reshape(-1)


def weights(pledges: Pledges) -> dict[PeerId, int]:
    """Who is in the step in progress, and with which weight."""
    return {peer: one.weight for peer, one in pledges.items() if one.weight}


def resting(pledges: Pledges) -> frozenset[PeerId]:
    """Who is to sit out the next step."""
    return frozenset(peer for peer, one in pledges.items() if one.rest)


def begin(pledges: Pledges, contributors: Iterable[Contribution]) -> None:
    """A first round has committed with these."""
    for entry in contributors:
        pledges.setdefault(entry.peer, Pledge()).weight = entry.weight


def settle(pledges: Pledges, named: Collection[PeerId], members: Collection[PeerId]) -> None:
    """The second round has committed: its record names these, and its members were those."""
    due = set(weights(pledges))
    missing = due.difference(named)
    blamed = missing if 2 * len(missing) <= len(due) else set()
    for peer, one in list(pledges.items()):
        kept = peer in due and not missing and not one.rest
        one.weight, one.rest, one.broken = 0, max(0, one.rest - 1), max(0, one.broken - kept)
        if peer in blamed:
            one.broken = min(MOST, one.broken + 1)
            one.rest = 2 ** (one.broken - 1)
        if not one.broken or (not one.rest and peer not in members):
            del pledges[peer]
