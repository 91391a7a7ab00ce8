"""News on their way: which gossip items still have to be told, and how often each was."""

from __future__ import annotations

import heapq
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
        # (told, -order, subject), the next one first; an entry whose news are gone or were told since is void.
        self._queue: list[tuple[int, int, Subject]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._news)

    def add(self, subject: Subject, item: bytes) -> None:
        self._count += 1
        self._news[subject] = _News(item, self._count)
        self._push(subject)
        if len(self._news) > MAX_QUEUE:
            del self._news[max(self._news, key=lambda key: (self._news[key].told, -self._news[key].order))]
        if len(self._queue) > 2 * len(self._news) + 64:
            self._queue = [entry for entry in self._queue if self._valid(entry)]
            heapq.heapify(self._queue)

    def forget(self, subject: Subject) -> None:
        self._news.pop(subject, None)

    def take(self, budget: int, most: int, times: int) -> list[bytes]:
        """At most `most` items of at most `budget` bytes together; one that was told `times` times is dropped."""
        chosen: list[bytes] = []
        later: list[tuple[int, int, Subject]] = []
        skipped = 0
        while self._queue and len(chosen) < most and skipped < SKIPS:
            told, order, subject = heapq.heappop(self._queue)
            news = self._news.get(subject)
            if news is None or news.told != told or news.order != -order:
                continue  # void
            if (size := len(news.item)) <= budget:
                budget -= size
                chosen.append(news.item)
                news.told += 1
            else:
                skipped += 1
            if news.told < times:
                later.append((news.told, order, subject))
            else:
                del self._news[subject]
        for entry in later:
            heapq.heappush(self._queue, entry)
        return chosen

    def _push(self, subject: Subject) -> None:
        news = self._news[subject]
        heapq.heappush(self._queue, (news.told, -news.order, subject))

    def _valid(self, entry: tuple[int, int, Subject]) -> bool:
        news = self._news.get(entry[2])
        return news is not None and (news.told, -news.order) == entry[:2]
