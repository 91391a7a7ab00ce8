"""Queue of gossip items to spread, with the number of times that each item has been sent."""

from __future__ import annotations

from bisect import insort
from typing import TypeAlias

from thinwire.swarm.membership.gossip_items import MAX_BYTES
from thinwire.swarm.messages.registry import PeerId

Subject: TypeAlias = tuple[str, PeerId, PeerId]
"""Subject of an item (kind, sender, target). A newer item on a subject replaces the older one."""

MAX_QUEUE = 4096
"""Maximum number of items in the queue."""

SKIPS = 3
"""Maximum number of items that one message may skip because they do not fit into the remaining space."""

Item: TypeAlias = tuple[int, int, bytes, Subject, int]
"""Order, size in bytes, item, subject and most sends. The order is that of `add`, so no two are equal."""

UNLIMITED = 1 << 30
"""Most sends of an item that only `take` limits, by `times`."""


class BroadcastQueue:
    """Queue that returns the items sent least often first, and the newest of these first.

    `len` is the number of items left to spread.
    """

    def __init__(self) -> None:
        self._orders: dict[Subject, int] = {}
        # Items by the number of times they were sent; in each list the next one to send is last. An item whose order is not
        # in `_valid` was forgotten or replaced.
        self._levels: list[list[Item]] = [[]]
        self._stored = 0
        """Number of items in `_levels`, valid or not."""
        self._valid: set[int] = set()
        self._count = 0
        self._smallest = MAX_BYTES
        """Size of the smallest item so far."""

    def __len__(self) -> int:
        return len(self._valid)

    def add(self, subject: Subject, item: bytes, most: int = UNLIMITED) -> None:
        """Add an item, to be sent at most `most` times."""
        self.forget(subject)
        self._count += 1
        self._orders[subject] = self._count
        self._valid.add(self._count)
        self._levels[0].append((self._count, size := len(item), item, subject, most))
        self._stored += 1
        self._smallest = min(self._smallest, size)
        if len(self._valid) > MAX_QUEUE:
            self._drop()
        if self._stored > 2 * len(self._valid) + 64:
            self._levels = [[one for one in level if one[0] in self._valid] for level in self._levels]
            self._stored = len(self._valid)

    def forget(self, subject: Subject) -> None:
        """Remove the item on a subject, if there is one."""
        order = self._orders.pop(subject, None)
        if order is not None:
            self._valid.discard(order)

    def _drop(self) -> None:
        """Forget the oldest one of the items sent most often."""
        for level in reversed(self._levels):
            for order, _, _, subject, _ in level:
                if order in self._valid:
                    self.forget(subject)
                    return

    def take(self, budget: int, most: int, times: int) -> list[bytes]:
        """Return at most `most` items with at most `budget` bytes in total.

        An item that has been sent `times` times is dropped.
        """
        chosen: list[bytes] = []
        if not self._valid:
            return chosen
        raised: list[tuple[int, Item]] = []
        skips, valid, levels = SKIPS, self._valid, self._levels
        # Skipped items stay, except those that were sent `times` times already: `times` falls when the swarm shrinks.
        full = self._smallest if len(levels) <= times else 0
        for sent, level in enumerate(levels):
            if not (most and skips and budget >= full):
                break
            place = len(level)
            while place and most and skips and budget >= full:
                place -= 1
                one = level[place]
                order, size, item, subject, limit = one
                if order not in valid:
                    del level[place]
                    self._stored -= 1
                elif size <= budget:
                    budget -= size
                    most -= 1
                    chosen.append(item)
                    del level[place]
                    if sent + 1 < times and sent + 1 < limit:
                        raised.append((sent + 1, one))
                    else:
                        self._stored -= 1
                        self.forget(subject)
                else:
                    skips -= 1
                    if sent >= times:
                        self.forget(subject)
        for sent, one in raised:
            if sent == len(levels):
                levels.append([])
            level = levels[sent]
            if level and one < level[0]:  # the usual case: newer items went before
                level.insert(0, one)
            else:
                insort(level, one)
        return chosen
