"""Small files that a peer needs after a restart: above all, the peers that it knew."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import blake3
import msgspec
from thinwire.collectives.transport.interface import Contact
from thinwire.node.runtime.disk import Disk

MOST = 64
"""Maximum number of stored addresses: some should be reachable, and the file stays readable."""

FEW = 8
"""Number of addresses of which one is probably reachable, if all were reachable together."""

LONGEST = 1 << 16
"""Bytes of a small file."""


class _Anchor(msgspec.Struct, frozen=True):
    address: str
    transport_key: bytes


class _Known(msgspec.Struct, frozen=True, omit_defaults=True):
    known_peers: tuple[_Anchor, ...]
    alone: bool
    absent: tuple[_Anchor, ...] = ()


class _Checked(msgspec.Struct, frozen=True):
    known: _Known
    check: str


class KnownPeersFile:
    """Last known addresses of other peers: the route back into a swarm whose seeds are gone.

    Also stores `alone`: whether this peer was the only member by a decision of all, so that it is the swarm and the others
    search for it; and `absent`: the peers that it could not reach, by which two parts of a swarm that restart after a
    partition find each other. The file contains everything twice, with a checksum: a founder that could not read it would
    start its run again beside the others.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path, self._disk = path, disk
        self._saved = _Known((), False)
        self.damaged = False
        """True if `load` found a file without a valid copy."""
        self._whole = True
        """True if both copies in the file are valid."""

    def load(self) -> tuple[Contact, ...]:
        """Return the contacts saved last, most useful first; empty if nothing is readable."""
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
        return _contacts(self._saved.known_peers)

    @property
    def few(self) -> bool:
        """True if the contacts last saved or loaded are so few that all may be gone at once."""
        return len(self._saved.known_peers) < FEW

    @property
    def alone(self) -> bool:
        """The value last saved or loaded."""
        return self._saved.alone

    @property
    def absent(self) -> tuple[Contact, ...]:
        """Peers last saved or loaded that could not be reached then."""
        return _contacts(self._saved.absent)

    def save(self, contacts: Iterable[Contact], *, alone: bool = False, absent: Iterable[Contact] = ()) -> None:
        """Replace the file by the first MOST of these contacts, and of the `absent`; ignore a failing disk.

        Without contacts the previous ones stay: a peer that is alone after a split needs those that it knew.
        """
        known = _Known(_anchors(contacts) or self._saved.known_peers, alone, _anchors(absent))
        if not known.known_peers or (known == self._saved and self._whole):
            return
        try:
            replace_file(self._path, self._disk, 2 * (msgspec.json.encode(_Checked(known, _check(known))) + b"\n"))
        except OSError:
            return
        self._saved, self._whole = known, True


def _anchors(contacts: Iterable[Contact]) -> tuple[_Anchor, ...]:
    return tuple(_Anchor(contact.address, contact.transport_key) for contact in islice(contacts, MOST))


def _contacts(anchors: Iterable[_Anchor]) -> tuple[Contact, ...]:
    return tuple(Contact(anchor.address, anchor.transport_key) for anchor in anchors)


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
