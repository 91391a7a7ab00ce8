"""Activations that arrive before their route, because routes come from the origin."""

from __future__ import annotations

from collections import Counter, deque

from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Activation, PeerId

BYTES = 32 << 20
"""Maximum waiting bytes of one peer; the oldest are dropped, and their micro-batch is retried."""

FRAMES = 4096
"""Largest number of waiting frames of one peer."""

TOTAL = 4 * BYTES
"""Maximum waiting bytes of all peers; the oldest ones of the peer with most bytes are dropped."""


class EarlyActivations:
    """Frames with activations that wait for their route, by sender; see the limits above."""

    def __init__(self) -> None:
        self._waiting: dict[PeerId, deque[Frame]] = {}
        self._bytes: Counter[PeerId] = Counter()

    def put(self, peer: PeerId, frame: Frame) -> None:
        """Store an Activation until its route arrives."""
        waiting, sizes = self._waiting.setdefault(peer, deque()), self._bytes
        waiting.append(frame)
        sizes[peer] += len(frame.payload)
        while len(waiting) > FRAMES or sizes[peer] > BYTES:
            self._give_way(peer)
        while sizes.total() > TOTAL:
            self._give_way(sizes.most_common(1)[0][0])

    def _give_way(self, peer: PeerId) -> None:
        self._bytes[peer] -= len(self._waiting[peer].popleft().payload)

    def take(self, step: int, micro: int, attempt: int) -> list[tuple[PeerId, Frame]]:
        """Remove and return all frames of an attempt of a micro-batch, in the order of arrival from each peer."""
        found: list[tuple[PeerId, Frame]] = []
        for peer, waiting in list(self._waiting.items()):
            mine = [frame for frame in waiting if _key(frame) == (step, micro, attempt)]
            if mine:
                found += [(peer, frame) for frame in mine]
                self._keep(peer, [frame for frame in waiting if _key(frame) != (step, micro, attempt)])
        return found

    def older(self, step: int) -> None:
        """Drop frames of steps before `step`."""
        for peer, waiting in list(self._waiting.items()):
            self._keep(peer, [frame for frame in waiting if _key(frame)[0] >= step])

    def forget(self, peer: PeerId) -> None:
        """Drop all frames of a peer."""
        self._waiting.pop(peer, None)
        self._bytes.pop(peer, None)

    def _keep(self, peer: PeerId, frames: list[Frame]) -> None:
        if frames:
            self._waiting[peer] = deque(frames)
            self._bytes[peer] = sum(len(frame.payload) for frame in frames)
        else:
            self.forget(peer)


def _key(frame: Frame) -> tuple[int, int, int]:
    message = frame.message
    assert isinstance(message, Activation)
    return message.step, message.micro, message.attempt
