"""Small files that a peer needs after a restart: above all, whom it knew."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec
from thinwire.collectives.transport import Contact

from .disk import Disk

T = TypeVar("T")

MOST = 64
"""Anchors that are kept. Some of so many are there, and a file of them can be read again."""

FEW = 8
"""Anchors of which one is there, as likely as not, when all have been there together."""

LONGEST = 1 << 16
"""Bytes of a small file."""


class _Anchor(msgspec.Struct, frozen=True):
    address: str
    transport_key: bytes


class _Known(msgspec.Struct, frozen=True):
    anchors: tuple[_Anchor, ...]
    alone: bool


class AnchorFile:
    """Where other peers were reachable when this one last saw them: the way back into a swarm whose seeds are gone. And whether
    it was without them by common decision (`alone`): then it is the swarm, and they look for it.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path, self._disk = path, disk
        self._saved = _Known((), False)

    def load(self) -> tuple[Contact, ...]:
        """What was saved last, most useful first; empty when there is nothing that can be read."""
        self._saved = _read(self._path, self._disk, _Known) or _Known((), False)
        return tuple(Contact(anchor.address, anchor.transport_key) for anchor in self._saved.anchors)

    @property
    def few(self) -> bool:
        """Whether those that were saved, or loaded, last may all be gone at once."""
        return len(self._saved.anchors) < FEW

    @property
    def alone(self) -> bool:
        """What was saved, or loaded, last."""
        return self._saved.alone

    def save(self, contacts: Iterable[Contact], *, alone: bool = False) -> None:
        """Replace the file, by the first MOST of these; a disk that does not take it costs nothing now.

        Without contacts those of before stay: who is alone after a split needs those that it knew.
        """
        anchors = tuple(_Anchor(contact.address, contact.transport_key) for contact in islice(contacts, MOST))
        known = _Known(anchors or self._saved.anchors, alone)
        if not known.anchors or known == self._saved:
            return
        try:
            replace_file(self._path, self._disk, msgspec.json.encode(known))
        except OSError:
            return
        self._saved = known


def _read(path: Path, disk: Disk, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(disk.read(path, LONGEST), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def replace_file(path: Path, disk: Disk, data: bytes) -> None:
    """Write a small file so that a crash leaves the old one or the new one. Raises OSError."""
    draft = path.with_name(f".{path.name}.new")
    disk.make_directory(path.parent)
    if draft.name in disk.names(path.parent):
        disk.remove(draft)
    file = disk.create(draft)
    try:
        file.write(data)
        file.sync()
    finally:
        file.close()
    disk.rename(draft, path)
    disk.sync_directory(path.parent)
