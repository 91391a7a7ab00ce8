"""News on their way: which gossip items still have to be told, and how often each was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .protocol import PeerId

Subject: TypeAlias = tuple[str, PeerId, PeerId]
"""What an item is about (kind, by whom, about whom); newer news on a subject replace older."""

MAX_ITEMS = 8
"""Items in one message, see protocol.Items."""

MAX_QUEUE = 4096


@dataclass(slots=True)
class _News:
    item: bytes
    order: int
    told: int = 0


class Broadcast:
    """A queue that hands out what was told least often, the newest first; `len` is what is left to tell."""

    def __init__(self) -> None:
        self._news: dict[Subject, _News] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._news)

    def add(self, subject: Subject, item: bytes) -> None:
        self._count += 1
        self._news.pop(subject, None)
        self._news[subject] = _News(item, self._count)
        if len(self._news) > MAX_QUEUE:
            del self._news[max(self._news, key=lambda key: (self._news[key].told, -self._news[key].order))]

    def forget(self, subject: Subject) -> None:
        self._news.pop(subject, None)

    def take(self, budget: int, most: int, times: int) -> list[bytes]:
        """At most `most` items of at most `budget` bytes together; one that was told `times` times is dropped."""
        chosen: list[bytes] = []
        for subject, news in sorted(self._news.items(), key=lambda entry: (entry[1].told, -entry[1].order)):
            if len(chosen) >= most:
                break
            if len(news.item) <= budget:
                budget -= len(news.item)
                chosen.append(news.item)
                news.told += 1
                if news.told >= times:
                    del self._news[subject]
        return chosen
