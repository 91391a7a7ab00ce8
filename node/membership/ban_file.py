"""Evidence against banned peers, and revocations, on disk: a ban outlasts a restart of all peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
from thinwire.node.membership.known_peers_file import replace_file
from thinwire.node.runtime.disk import Disk
from thinwire.node.runtime.event_log import Emit

LONGEST = 4 << 20
"""Bytes of the file: less than 600 for each of at most MAX_PEERS peers, and 97 for each revocation."""

WRITE_SECONDS = 10.0
"""Least time between two writes.

Strangers can cause any number of bans, and a write waits for the disk.
"""

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


class StoredBans:
    """The file of bans of a running peer, written when the bans of its roster have changed.

    present: returns the roster's items (`Roster.ban_items`). attend: runs a task until the peer stops (`Presence.attend`). If a
    write fails, `emit` receives an alarm, once until a write succeeds.
    """

    def __init__(
        self,
        file: BanFile,
        *,
        present: Callable[[], tuple[bytes, ...]],
        attend: Callable[[Coroutine[Any, Any, None]], None],
        emit: Emit,
    ) -> None:
        self._file, self._present, self._attend, self._emit = file, present, attend, emit
        self._items: tuple[bytes, ...] = ()
        """Content of the file, as far as this process knows."""
        self._waits = self._failed = False
        """True if the last write is less than WRITE_SECONDS ago; true if it has failed."""

    def load(self) -> tuple[bytes, ...]:
        """Return the items of the file."""
        self._items = self._file.load()
        return self._items

    def save(self) -> None:
        """Write the present bans at once, or when WRITE_SECONDS have passed since the last write."""
        if not self._waits and self.write():
            self._waits = True
            self._attend(self._save_later())

    async def _save_later(self) -> None:
        await asyncio.sleep(WRITE_SECONDS)
        self._waits = False
        self.save()

    def write(self) -> bool:
        """Write the present bans now. Return False if the file has them already."""
        items = self._present()
        if items == self._items:
            return False
        try:
            self._file.save(items)
            self._items, self._failed = items, False
        except OSError as error:
            if not self._failed:
                self._emit("alarm", {"detail": f"cannot store the evidence against banned peers: {error.strerror}"})
            self._failed = True
        return True
