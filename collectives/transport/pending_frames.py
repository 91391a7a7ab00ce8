"""Buffer for frames that arrived before the message that explains them.

No sender can use up the space of others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import PeerId


class PendingFrames:
    """Buffer of at most `total` frames, `each` per sender.

    Their payloads have at most `nbytes` bytes altogether (None: unlimited). When it is full, the sender with the most in it
    loses its last frame.
    """

    def __init__(self, total: int, each: int, nbytes: int | None = None) -> None:
        self.total, self._each, self._most = total, each, nbytes
        self._frames: dict[PeerId, deque[tuple[int, Frame]]] = {}
        self._count = self._size = 0
        self._nbytes: Counter[PeerId] = Counter()

    def __len__(self) -> int:
        return self._size

    def put(self, sender: PeerId, frame: Frame) -> None:
        """Store a frame if there is room for it."""
        mine, size = self._frames.setdefault(sender, deque()), memoryview(frame.payload).nbytes
        if len(mine) >= self._each:
            return
        if self._size >= self.total:
            longest = max(self._frames, key=lambda peer: len(self._frames[peer]))
            if len(self._frames[longest]) <= len(mine) + 1:
                return
            self._drop(longest)
        while self._most is not None and size and self._nbytes.total() + size > self._most:
            fullest = max(self._nbytes, key=lambda peer: self._nbytes[peer], default=sender)
            if self._nbytes[fullest] <= self._nbytes[sender] + size:
                return
            self._drop(fullest)
        self._add(self._count, sender, frame)
        self._count += 1

    def _add(self, at: int, sender: PeerId, frame: Frame) -> None:
        self._frames.setdefault(sender, deque()).append((at, frame))
        self._nbytes[sender] += memoryview(frame.payload).nbytes
        self._size += 1

    def _drop(self, sender: PeerId) -> None:
        _, frame = self._frames[sender].pop()
        self._nbytes[sender] -= memoryview(frame.payload).nbytes
        self._size -= 1

    def take(self, wanted: Callable[[Frame], bool] = lambda frame: True) -> list[tuple[PeerId, Frame]]:
        """Remove and return the wanted frames in order of arrival; the others stay."""
        found = [(at, sender, frame) for sender, frames in self._frames.items() for at, frame in frames]
        self.clear()
        taken = []
        for at, sender, frame in sorted(found, key=lambda entry: entry[0]):
            if wanted(frame):
                taken.append((sender, frame))
            else:
                self._add(at, sender, frame)
        return taken

    def clear(self) -> None:
        """Drop all frames."""
        self._frames, self._size, self._nbytes = {}, 0, Counter()
