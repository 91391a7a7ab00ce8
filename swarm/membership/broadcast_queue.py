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
    subject: Subject
    item: bytes
    times_sent: int = 0


class Broadcast:
    """Queue that returns the items sent least often first, and the newest of these first.

    `len` is the number of items left to spread.
    """

    def __init__(self) -> None:
        self._orders: dict[Subject, int] = {}
        self._news: dict[int, _News] = {}
        # Orders, indexed by the number of sends, the next one last. An order is void if its item is gone or replaced.
        self._levels: list[list[int]] = [[]]
        self._count = 0

    def __len__(self) -> int:
        return len(self._news)

    def add(self, subject: Subject, item: bytes) -> None:
        self.forget(subject)
        self._count += 1
        self._orders[subject] = self._count
        self._news[self._count] = _News(subject, item)
        self._levels[0].append(self._count)
        if len(self._news) > MAX_QUEUE:
            self.forget(max(self._news.items(), key=lambda entry: (entry[1].times_sent, -entry[0]))[1].subject)
        if sum(map(len, self._levels)) > 2 * len(self._news) + 64:
            self._levels = [[order for order in level if order in self._news] for level in self._levels]

    def forget(self, subject: Subject) -> None:
        order = self._orders.pop(subject, None)
        if order is not None:
            del self._news[order]

    def take(self, budget: int, most: int, times: int) -> list[bytes]:
        """Return at most `most` items with at most `budget` bytes in total.

        An item that has been sent `times` times is dropped.
        """
        chosen: list[bytes] = []
        if not self._news:
            return chosen
        later: list[tuple[int, int]] = []
        skips, known, levels = SKIPS, self._news, self._levels
        for level in levels:
            while level:
                if not most or not skips:
                    break
                order = level.pop()
                if (news := known.get(order)) is None:
                    continue
                item, sent = news.item, news.times_sent
                if (size := len(item)) <= budget:
                    budget -= size
                    most -= 1
                    chosen.append(item)
                    news.times_sent = sent = sent + 1
                else:
                    skips -= 1
                if sent < times:
                    later.append((sent, order))
                else:
                    self.forget(news.subject)
        for sent, order in later:
            if sent == len(levels):
                levels.append([])
            insort(levels[sent], order)
        return chosen
