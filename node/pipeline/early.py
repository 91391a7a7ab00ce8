"""Activations that came before the route they belong to: routes come from the origin, activations from the stage before."""

from __future__ import annotations

from collections import Counter, deque

from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import Activation, PeerId

BYTES = 32 << 20
"""Most bytes of one peer that wait for a route; the oldest give way, and that micro-batch is tried again."""

FRAMES = 4096
"""Most frames of one peer that wait."""

TOTAL = 4 * BYTES
"""Most bytes of all peers together; of whoever has most the oldest give way."""


class Early:
    """What waits, by the peer that sent it."""

    def __init__(self) -> None:
        self._waiting: dict[PeerId, deque[Frame]] = {}
        self._bytes: Counter[PeerId] = Counter()

    def put(self, peer: PeerId, frame: Frame) -> None:
        """Let an Activation wait."""
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
        """All that belongs to a micro-batch's attempt, in the order of its arrival from each peer."""
        found: list[tuple[PeerId, Frame]] = []
        for peer, waiting in list(self._waiting.items()):
            mine = [frame for frame in waiting if _key(frame) == (step, micro, attempt)]
            if mine:
                found += [(peer, frame) for frame in mine]
                self._keep(peer, [frame for frame in waiting if _key(frame) != (step, micro, attempt)])
        return found

    def older(self, step: int) -> None:
        """Forget what is of steps before `step`."""
        for peer, waiting in list(self._waiting.items()):
            self._keep(peer, [frame for frame in waiting if _key(frame)[0] >= step])

    def forget(self, peer: PeerId) -> None:
        """Forget what a peer sent."""
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
