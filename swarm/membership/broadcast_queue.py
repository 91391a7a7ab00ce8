"""Queue of gossip items to spread, with the number of times that each item has been sent."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TypeAlias

from thinwire.swarm.membership.gossip_items import MAX_BYTES
from thinwire.swarm.messages.registry import PeerId

Subject: TypeAlias = tuple[str, PeerId, PeerId]
"""Subject of an item (kind, sender, target). A newer item on a subject replaces the older one."""

MAX_QUEUE = 4096
"""Maximum number of items in the queue."""

SKIPS = 3
"""Maximum number of items that one message may skip because they do not fit into the remaining space."""

Entry: TypeAlias = tuple[int, int, int, bytes, Subject, int]
"""Minus the sends so far, number of the `add`, size in bytes, item, subject and most sends.

The first two are its place in the order, which no other entry has.
"""

UNLIMITED = 1 << 30
"""Most sends of an item that only `take` limits, by `times`."""


class BroadcastQueue:
    """Queue that returns the items sent least often first, and the newest of these first.

    `len` is the number of items left to spread.
    """

    def __init__(self) -> None:
        self._order: list[Entry] = []
        """Entries in order, the next one to send last."""
        self._entries: dict[Subject, Entry] = {}
        self._added = 0
        self._smallest = MAX_BYTES
        """Size of the smallest item so far."""

    def __len__(self) -> int:
        return len(self._order)

    def add(self, subject: Subject, item: bytes, most: int = UNLIMITED) -> None:
        """Add an item, to be sent at most `most` times.

        From a full queue the oldest one of the items sent most often is removed.
        """
        self.forget(subject)
        if len(self._order) == MAX_QUEUE:
            _, _, _, _, other, _ = self._order[0]
            self.forget(other)
        self._added += 1
        self._smallest = min(self._smallest, size := len(item))
        self._entries[subject] = entry = (0, self._added, size, item, subject, most)
        self._order.append(entry)

    def forget(self, subject: Subject) -> None:
        """Remove the item on a subject, if there is one."""
        entry = self._entries.pop(subject, None)
        if entry is not None:
            del self._order[bisect_left(self._order, entry)]

    def take(self, budget: int, most: int, times: int) -> list[bytes]:
        """Return at most `most` items with at most `budget` bytes in total.

        An item that has been sent `times` times is dropped.
        """
        chosen: list[bytes] = []
        order, entries = self._order, self._entries
        again: list[Entry] = []
        # Skipped items stay, except those that were sent `times` times already: `times` falls when the swarm shrinks.
        full = self._smallest if order and -order[0][0] < times else 0
        place, skips = len(order), SKIPS
        while place and most and skips and budget >= full:
            place -= 1
            rank, number, size, item, subject, limit = order[place]
            if size <= budget:
                budget -= size
                most -= 1
                chosen.append(item)
                del order[place]
                rank -= 1
                if -rank < times and -rank < limit:
                    again.append((rank, number, size, item, subject, limit))
                else:
                    del entries[subject]
            else:
                skips -= 1
                if -rank >= times:
                    del order[place], entries[subject]
        for entry in again:
            _, _, _, _, subject, _ = entry
            entries[subject] = entry
            insort(order, entry)
        return chosen
