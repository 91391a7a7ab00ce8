"""Keys of a peer in tests without real signatures."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.swarm.messages.registry import Message, PeerId


class FakeKeys:
    """Keyring with the given functions. A peer's id is also its public key."""

    def __init__(
        self,
        me: PeerId,
        sign: Callable[[PeerId, Message], bytes] = lambda peer, message: bytes(64),
        verify: Callable[[PeerId, Message, bytes], bool] = lambda peer, message, signature: True,
    ) -> None:
        """sign: returns the signature of a peer."""
        self.me, self._sign, self.verify = me, sign, verify

    def key_of(self, peer: PeerId) -> bytes | None:
        return peer

    def sign(self, message: Message) -> bytes:
        return self._sign(self.me, message)

    def verify_with(self, key: bytes, peer: PeerId, message: Message, signature: bytes) -> bool:
        return key == peer and self.verify(peer, message, signature)
