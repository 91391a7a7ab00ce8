"""Small files that a peer needs after a restart: above all, whom it knew."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import blake3
import msgspec
from thinwire.collectives.transport import Contact

from .disk import Disk

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


class _Checked(msgspec.Struct, frozen=True):
    known: _Known
    check: str


class AnchorFile:
    """Where other peers were reachable when this one last saw them: the way back into a swarm whose seeds are gone. And whether
    it was without them by common decision (`alone`): then it is the swarm, and they look for it.

    The file has everything twice, with a check: a founder that cannot read it would begin its run anew beside the others.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path, self._disk = path, disk
        self._saved = _Known((), False)
        self.damaged = False
        """Whether `load` has found a file of which nothing can be believed."""
        self._whole = True
        """Whether there is no half of the file that must be made anew."""

    def load(self) -> tuple[Contact, ...]:
        """What was saved last, most useful first; empty when there is nothing that can be read."""
        try:
            data = self._disk.read(self._path, LONGEST)
        except FileNotFoundError:
            data = None
        except OSError:
            data = b""
        halves = [] if data is None else [_known(data[: len(data) // 2]), _known(data[len(data) // 2 :])]
        found = next((half for half in halves if half is not None), None)
        self.damaged, self._whole = data is not None and found is None, None not in halves
        self._saved = found or _Known((), False)
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
        if not known.anchors or (known == self._saved and self._whole):
            return
        try:
            replace_file(self._path, self._disk, 2 * (msgspec.json.encode(_Checked(known, _check(known))) + b"\n"))
        except OSError:
            return
        self._saved, self._whole = known, True


def _check(known: _Known) -> str:
    return blake3.blake3(msgspec.json.encode(known)).hexdigest()


def _known(line: bytes) -> _Known | None:
    try:
        found = msgspec.json.decode(line, type=_Checked)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found.known if found.check == _check(found.known) else None


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
