"""What partners to be have announced before its time, kept until it can be heard."""

from __future__ import annotations

from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Base, Message, PeerId, Ready


class EarlyMessages:
    """Announcements (Base, Ready) of rounds to come, or of who is not known to be our partner yet: of so many peers the
    newest of each kind.
    """

    def __init__(self, peers: int) -> None:
        self.most = 2 * peers
        self._peers = peers
        self._kept: dict[PeerId, dict[type[Message], Frame]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Of whom there is something."""
        return tuple(self._kept)

    def keep(self, peer: PeerId, frame: Frame) -> None:
        """Keep an announcement, if there is room for another peer's."""
        if peer in self._kept or len(self._kept) < self._peers:
            self._kept.setdefault(peer, {})[type(frame.message)] = frame

    def take(self, peer: PeerId, round: int) -> list[Frame]:
        """Those of a peer that are of this round, or older; they are not kept any more."""
        frames = self._kept.pop(peer, {})
        later = {kind: frame for kind, frame in frames.items() if _round_of(frame) > round}
        if later:
            self._kept[peer] = later
        return [frame for kind, frame in frames.items() if kind not in later]

    def drop(self, peer: PeerId) -> None:
        """Forget a peer's."""
        self._kept.pop(peer, None)


def _round_of(frame: Frame) -> int:
    return frame.message.round if isinstance(frame.message, (Base, Ready)) else 0
