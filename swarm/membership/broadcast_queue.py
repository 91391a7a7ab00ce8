"""Queue of gossip items to spread, with the number of times that each item has been sent."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import TypeAlias

from thinwire.swarm.messages.registry import PeerId

Subject: TypeAlias = tuple[str, PeerId, PeerId]
"""Subject of an item (kind, sender, target). A newer item on a subject replaces the older one."""

MAX_ITEMS = 8
"""Maximum number of items in one message, see messages.membership.Items."""

MAX_QUEUE = 4096


SKIPS = 3
"""Maximum number of items that one message may skip because they do not fit into the remaining space."""


@dataclass(slots=True)
class _News:
    item: bytes
    order: int
    times_sent: int = 0


class Broadcast:
    """Queue that returns the items sent least often first, and the newest of these first.

    `len` is the number of items left to spread.
    """

    def __init__(self) -> None:
        self._news: dict[Subject, _News] = {}
        # Indexed by the number of sends: (order, subject), the next entry last. An entry is void if its item is gone or
        # replaced.
        self._levels: list[list[tuple[int, Subject]]] = [[]]
        self._count = 0

    def __len__(self) -> int:
        return len(self._news)

    def add(self, subject: Subject, item: bytes) -> None:
        self._count += 1
        self._news[subject] = _News(item, self._count)
        self._levels[0].append((self._count, subject))
        if len(self._news) > MAX_QUEUE:
            del self._news[max(self._news, key=lambda key: (self._news[key].times_sent, -self._news[key].order))]
        if sum(map(len, self._levels)) > 2 * len(self._news) + 64:
            self._levels = [
                [entry for entry in level if self._valid(times_sent, *entry)]
                for times_sent, level in enumerate(self._levels)
            ]

    def forget(self, subject: Subject) -> None:
        self._news.pop(subject, None)

    def take(self, budget: int, most: int, times: int) -> list[bytes]:
        """Return at most `most` items with at most `budget` bytes in total.

        An item that has been sent `times` times is dropped.
        """
        chosen: list[bytes] = []
        later: list[tuple[int, tuple[int, Subject]]] = []
        skipped = 0
        for level in self._levels:
            while level and len(chosen) < most and skipped < SKIPS:
                entry = level.pop()
                news = self._news.get(entry[1])
                if news is None or news.order != entry[0]:
                    continue
                if (size := len(news.item)) <= budget:
                    budget -= size
                    chosen.append(news.item)
                    news.times_sent += 1
                else:
                    skipped += 1
                if news.times_sent < times:
                    later.append((news.times_sent, entry))
                else:
                    del self._news[entry[1]]
        for times_sent, entry in later:
            if times_sent == len(self._levels):
                self._levels.append([])
            insort(self._levels[times_sent], entry)
        return chosen

    def _valid(self, times_sent: int, order: int, subject: Subject) -> bool:
        news = self._news.get(subject)
        return news is not None and news.times_sent == times_sent and news.order == order
