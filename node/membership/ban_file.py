"""Evidence against banned peers, and revocations, on disk: a ban outlasts a restart of all peers."""

from __future__ import annotations

from pathlib import Path

import msgspec
from thinwire.node.membership.known_peers_file import replace_file
from thinwire.node.runtime.disk import Disk

LONGEST = 4 << 20
"""Bytes of the file: less than 600 for each of at most MAX_PEERS peers, and 97 for each revocation."""

_decoder = msgspec.msgpack.Decoder(tuple[bytes, ...])


class BanFile:
    """Gossip items with evidence, one for each banned peer, and with revocations.

    `thinwire revoke` writes such a file, too, from which the daemon reads revocations. Readers check each item, so the file
    needs no checksum.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path, self._disk = path, disk

    def load(self) -> tuple[bytes, ...]:
        """Return the stored items; none if the file is absent or damaged: other peers have the evidence, too."""
        try:
            return _decoder.decode(self._disk.read(self._path, LONGEST))
        except (OSError, msgspec.MsgspecError):
            return ()

    def save(self, items: tuple[bytes, ...]) -> None:
        """Replace the stored items. Raises OSError."""
        replace_file(self._path, self._disk, msgspec.msgpack.encode(items))
