"""Keyring: signs the messages of one peer in a run, and checks the signatures of others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from thinwire.swarm.frame import sign_message, verify_message
from thinwire.swarm.identity.identity import Identity, peer_id_of
from thinwire.swarm.lineage import Verify
from thinwire.swarm.messages.registry import Digest, Message, PeerId


class Keyring:
    """Private key of one peer, and public keys of the others.

    `lookup`: returns the public key of another peer, None if unknown.
    """

    def __init__(self, identity: Identity, run_id: Digest, lookup: Callable[[PeerId], bytes | None]) -> None:
        self.me, self.run_id = identity.peer_id, run_id
        self._identity, self._lookup = identity, lookup
        self._borrowed: dict[PeerId, bytes] = {}

    def key_of(self, peer: PeerId) -> bytes | None:
        """Return the public key of a peer, None if unknown."""
        if peer == self.me:
            return self._identity.public_key
        return self._lookup(peer) or self._borrowed.get(peer)

    def borrow(self, keys: Iterable[bytes], peers: Collection[PeerId]) -> None:
        """Store those of the given public keys that belong to `peers`, until `forget`."""
        found = ((peer_id_of(key), key) for key in keys)
        self._borrowed.update((peer, key) for peer, key in found if peer in peers)

    def forget(self) -> None:
        """Delete all borrowed keys."""
        self._borrowed.clear()

    def sign(self, message: Message) -> bytes:
        """Return our signature under a message."""
        return sign_message(message, b"", self._identity, self.run_id)

    def verify(self, peer: PeerId, message: Message, signature: bytes) -> bool:
        """Return True if the peer's key is known, and `signature` is its signature under the message."""
        return self._valid(self.key_of(peer), message, signature)

    def verify_with(self, key: bytes, peer: PeerId, message: Message, signature: bytes) -> bool:
        """Return True if this is the peer's public key, and `signature` is its signature under the message."""
        return peer_id_of(key) == peer and self._valid(key, message, signature)

    def with_keys(self, keys: Iterable[bytes]) -> Verify:
        """Return a function like `verify` that also knows these public keys."""
        more = {peer_id_of(key): key for key in keys}
        return lambda peer, message, signature: self._valid(more.get(peer) or self.key_of(peer), message, signature)

    def _valid(self, key: bytes | None, message: Message, signature: bytes) -> bool:
        return key is not None and verify_message(message, signature, key, self.run_id)
