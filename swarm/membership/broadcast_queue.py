"""Queue of gossip items to spread, with the number of times that each item has been sent."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TypeAlias

import msgspec
from thinwire.swarm.membership.gossip_items import MAX_BYTES
from thinwire.swarm.messages.registry import PeerId

Subject: TypeAlias = tuple[str, PeerId, PeerId]
"""Subject of an item (kind, sender, target). A newer item on a subject replaces the older one."""

MAX_QUEUE = 4096
"""Maximum number of items in the queue."""

SKIPS = 3
"""Maximum number of items that one message may skip because they do not fit into the remaining space."""

UNLIMITED = 1 << 30
"""Most sends of an item that only `take` limits, by `times`."""


class Entry(msgspec.Struct, order=True, gc=False):
    """Item of the queue. The first two fields are its place in the order, which no other entry has.

    rank: minus the sends so far. number: how many items were added before. most: maximum number of sends.
    """

    rank: int
    number: int
    item: bytes
    subject: Subject
    most: int


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
            self.forget(self._order[0].subject)
        self._added += 1
        self._smallest = min(self._smallest, len(item))
        self._entries[subject] = entry = Entry(0, self._added, item, subject, most)
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
        full = self._smallest if order and -order[0].rank < times else 0
        place, skips = len(order), SKIPS
        while place and most and skips and budget >= full:
            place -= 1
            entry = order[place]
            size = len(entry.item)
            if size <= budget:
                budget -= size
                most -= 1
                chosen.append(entry.item)
                del order[place]
                entry.rank -= 1
                if -entry.rank < times and -entry.rank < entry.most:
                    again.append(entry)
                else:
                    del entries[entry.subject]
            else:
                skips -= 1
                if -entry.rank >= times:
                    del order[place], entries[entry.subject]
        for entry in again:
            insort(order, entry)
        return chosen
