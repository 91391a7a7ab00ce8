"""Frames that came before the message that gives them a meaning, kept so that no sender takes the room of another."""

from __future__ import annotations

from collections import deque

from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import PeerId


class Stash:
    """At most `total` frames, of one sender at most `each`. When it is full, who has most in it loses its last."""

    def __init__(self, total: int, each: int) -> None:
        self.total, self._each = total, each
        self._frames: dict[PeerId, deque[tuple[int, Frame]]] = {}
        self._count = self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, sender: PeerId, frame: Frame) -> None:
        """Keep a frame, if there is room for it."""
        mine = self._frames.setdefault(sender, deque())
        if len(mine) >= self._each:
            return
        if self._size >= self.total:
            longest = max(self._frames.values(), key=len)
            if len(longest) <= len(mine) + 1:
                return
            longest.pop()
            self._size -= 1
        mine.append((self._count, frame))
        self._count += 1
        self._size += 1

    def take(self) -> list[tuple[PeerId, Frame]]:
        """All of them in the order in which they came; none are kept."""
        found = [(at, sender, frame) for sender, frames in self._frames.items() for at, frame in frames]
        self.clear()
        return [(sender, frame) for _, sender, frame in sorted(found, key=lambda entry: entry[0])]

    def clear(self) -> None:
        """Forget them."""
        self._frames, self._size = {}, 0
