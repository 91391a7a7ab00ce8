"""News on their way: which gossip items still have to be told, and how often each was."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import TypeAlias

from .protocol import PeerId

Subject: TypeAlias = tuple[str, PeerId, PeerId]
"""What an item is about (kind, by whom, about whom); newer news on a subject replace older."""

MAX_ITEMS = 8
"""Items in one message, see protocol.Items."""

MAX_QUEUE = 4096


SKIPS = 3
"""Items that may be passed over in one message because they are too long for what is left of it."""


@dataclass(slots=True)
class _News:
    item: bytes
    order: int
    told: int = 0


class Broadcast:
    """A queue that hands out what was told least often, the newest first; `len` is what is left to tell."""

    def __init__(self) -> None:
        self._news: dict[Subject, _News] = {}
        # By how often they were told: (order, subject), the next one last. Void when there are no such news, or newer ones.
        self._levels: list[list[tuple[int, Subject]]] = [[]]
        self._count = 0

    def __len__(self) -> int:
        return len(self._news)

    def add(self, subject: Subject, item: bytes) -> None:
        self._count += 1
        self._news[subject] = _News(item, self._count)
        self._levels[0].append((self._count, subject))
        if len(self._news) > MAX_QUEUE:
            del self._news[max(self._news, key=lambda key: (self._news[key].told, -self._news[key].order))]
        if sum(map(len, self._levels)) > 2 * len(self._news) + 64:
            self._levels = [
                [entry for entry in level if self._valid(told, *entry)] for told, level in enumerate(self._levels)
            ]

    def forget(self, subject: Subject) -> None:
        self._news.pop(subject, None)

    def take(self, budget: int, most: int, times: int) -> list[bytes]:
        """At most `most` items of at most `budget` bytes together; one that was told `times` times is dropped."""
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
                    news.told += 1
                else:
                    skipped += 1
                if news.told < times:
                    later.append((news.told, entry))
                else:
                    del self._news[entry[1]]
        for told, entry in later:
            if told == len(self._levels):
                self._levels.append([])
            insort(self._levels[told], entry)
        return chosen

    def _valid(self, told: int, order: int, subject: Subject) -> bool:
        news = self._news.get(subject)
        return news is not None and news.told == told and news.order == order
