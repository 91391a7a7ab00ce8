"""Announcements that arrive before their round or before their sender is a partner."""

from __future__ import annotations

from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Base, Message, PeerId, Ready


class EarlyMessages:
    """Bounded store of early Base and Ready messages: the newest of each type, for at most `peers` peers."""

    def __init__(self, peers: int) -> None:
        self.most = 2 * peers
        self._peers = peers
        self._stored: dict[PeerId, dict[type[Message], Frame]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._stored.values()))

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(self._stored)

    def keep(self, peer: PeerId, frame: Frame) -> None:
        """Store an announcement, if there is room for another peer."""
        if peer in self._stored or len(self._stored) < self._peers:
            self._stored.setdefault(peer, {})[type(frame.message)] = frame

    def take(self, peer: PeerId, round: int) -> list[Frame]:
        """Remove and return the frames of a peer for `round` or earlier rounds."""
        frames = self._stored.pop(peer, {})
        later = {kind: frame for kind, frame in frames.items() if _round_of(frame) > round}
        if later:
            self._stored[peer] = later
        return [frame for kind, frame in frames.items() if kind not in later]

    def drop(self, peer: PeerId) -> None:
        self._stored.pop(peer, None)


def _round_of(frame: Frame) -> int:
    return frame.message.round if isinstance(frame.message, (Base, Ready)) else 0
