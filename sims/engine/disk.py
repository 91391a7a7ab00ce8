"""Disk of a simulated peer: a crash loses some or all of the data that was not synced.

Implements the Disk of node/runtime/disk.py. Operations take no virtual time themselves; the time that a slow disk would
take is added to `spent`, and the caller has to wait for it.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeAlias

from thinwire.node.runtime.disk import DiskFile, ScratchFile

PAGE = 4096
"""Bytes of a page, the unit of damage when a write is torn."""


@dataclass(slots=True, eq=False)
class _File:
    live: bytes | bytearray = b""
    """Present content; a bytearray while it is being written.

    After a sync it is the same object as `durable`: the files of a thousand peers take a gigabyte.
    """
    durable: bytes = b""


@dataclass(slots=True, eq=False)
class _Folder:
    live: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)


_Node: TypeAlias = "_File | _Folder"


class SimDisk:
    """Simulated disk; it survives the process that uses it (see `crash`).

    rng: determines the effects of a crash. May be set: `capacity` in bytes; `delay` in seconds per operation; `broken`,
    the error number with which every change fails (0: none); `lying`, True if a sync succeeds without effect; `lied`,
    True if one ever did; `forgot`, True if a crash has followed meanwhile; `rotted`, True if a bit ever flipped; `before`,
    called with the name of every changing operation before it is executed.
    """

    def __init__(self, rng: random.Random) -> None:
        self.capacity: int | None = None
        self.delay = 0.0
        self.broken = 0
        self.lying = self.lied = self.forgot = self.rotted = False
        self.before: Callable[[str], None] = lambda operation: None
        self.spent = 0.0
        """Seconds that operations should have taken since the caller last set it to 0."""
        self._rng = rng
        self._root = _Folder()
        self._crashes = 0
        """Crashes so far: a file that was opened before the last one is unusable."""

    # --- faults

    def crash(self) -> None:
        """Lose power: of the data that was not synced a part remains, and its last page may be torn.

        Names that were not synced remain or not, folder by folder. Open files become unusable.
        """
        self.forgot |= self.lying
        self._crashes += 1
        self._settle(self._root)

    def _settle(self, folder: _Folder) -> None:
        # Sorted, so that equal content gives equal random draws.
        kept = folder.live if self._rng.random() < 0.5 else folder.durable
        folder.live = dict(sorted(kept.items()))
        folder.durable = dict(folder.live)
        for node in folder.live.values():
            if isinstance(node, _Folder):
                self._settle(node)
            else:
                node.live = node.durable = self._torn(node)

    def _torn(self, file: _File) -> bytes:
        """Return the synced data and a random part of the rest; the last page of it may hold garbage.

        Of data that was overwritten and not synced all pages are old, all are new, or each is old, new, or torn: new up
        to a random byte, then old.
        """
        safe = len(file.durable)
        whole = bytearray(file.live)
        if not whole.startswith(file.durable):
            kinds = self._rng.choice((("old",), ("new",), ("old", "new", "torn")))
            for at in range(0, safe, PAGE):
                end = min(at + PAGE, safe)
                if changed := [place for place in range(at, end) if whole[place] != file.durable[place]]:
                    kind = self._rng.choice(kinds)
                    border = {"old": at, "new": end, "torn": self._rng.choice(changed)}[kind]
                    whole[border:end] = file.durable[border:end]
        if len(whole) <= safe:
            return bytes(whole)
        kept = bytes(whole)[: self._rng.randint(safe, len(whole)) if self._rng.random() < 0.5 else safe]
        page = max(safe, (len(kept) - 1) // PAGE * PAGE)
        if len(kept) > page and self._rng.random() < 0.5:
            kept = kept[:page] + self._rng.randbytes(len(kept) - page)
        return kept

    def rot(self) -> str:
        """Flip one bit of a random file on the medium. Returns its path, or "" if there is no data."""
        files = [(path, file) for path, file in self._files(self._root, Path("/")) if file.live]
        if not files:
            return ""
        self.rotted = True
        path, file = self._rng.choice(files)
        content = bytearray(file.live)
        bit = self._rng.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        file.live = bytes(content)
        file.durable = file.live[: len(file.durable)]
        return str(path)

    def used(self) -> int:
        """Return the total size of all files in bytes."""
        return sum(len(file.live) for _, file in self._files(self._root, Path("/")))

    def _files(self, folder: _Folder, path: Path) -> Iterator[tuple[Path, _File]]:
        for name in sorted(folder.live):
            node = folder.live[name]
            if isinstance(node, _Folder):
                yield from self._files(node, path / name)
            else:
                yield path / name, node

    # --- the Disk interface

    def make_directory(self, path: Path) -> None:
        folder = self._root
        for part in _parts(path):
            node = folder.live.get(part)
            if node is None:
                self._change("make_directory", path)
                node = folder.live[part] = folder.durable[part] = _Folder()
            if not isinstance(node, _Folder):
                _fail(errno.ENOTDIR, path)
            folder = node

    def create(self, path: Path) -> DiskFile:
        self._change("create", path)
        folder = self._folder(path.parent)
        if path.name in folder.live:
            _fail(errno.EEXIST, path)
        folder.live[path.name] = file = _File()
        return _OpenFile(self, file, path, self._crashes)

    def scratch(self, path: Path, free: int) -> ScratchFile:
        self._change("scratch", path)
        self._folder(path)
        if self._room(free) < free:
            _fail(errno.ENOSPC, path)
        return _OpenFile(self, _File(), path, self._crashes)

    def overwrite(self, path: Path, data: bytes) -> None:
        file = self._file(path)
        grows = len(data) > len(file.live)
        self._change("overwrite", path, grows=grows)
        room = self._room(len(data) - len(file.live))
        new = data[: len(file.live) + room]
        file.live = new + bytes(file.live[len(new) :])
        if len(new) < len(data):
            _fail(errno.ENOSPC, path)
        self._change("sync", path, grows=grows)
        if not self.lying:
            file.durable = file.live

    def size(self, path: Path) -> int:
        return len(self._file(path).live)

    def read(self, path: Path, nbytes: int) -> bytes:
        self.spent += self.delay
        return bytes(self._file(path).live[:nbytes])

    def names(self, path: Path) -> list[str]:
        try:
            return sorted(self._folder(path).live)
        except FileNotFoundError:
            return []

    def rename(self, old: Path, new: Path) -> None:
        self._change("rename", old)
        source, target = self._folder(old.parent), self._folder(new.parent)
        node, there = source.live.get(old.name), target.live.get(new.name)
        if node is None:
            _fail(errno.ENOENT, old)
        if isinstance(there, _Folder) and there.live:
            _fail(errno.ENOTEMPTY, new)
        del source.live[old.name]
        target.live[new.name] = node

    def sync_directory(self, path: Path) -> None:
        self._change("sync_directory", path)
        folder = self._folder(path)
        if not self.lying:
            folder.durable = dict(folder.live)

    def remove(self, path: Path) -> None:
        self._change("remove", path)
        self._file(path)
        del self._folder(path.parent).live[path.name]

    def remove_directory(self, path: Path) -> None:
        self._change("remove_directory", path)
        if self._folder(path).live:
            _fail(errno.ENOTEMPTY, path)
        del self._folder(path.parent).live[path.name]

    # --- shared with open files

    def write(self, file: _File, data: bytes, path: Path, crashes: int) -> None:
        """Append to an open file."""
        self._change("write", path, crashes)
        room = self._room(len(data))
        if isinstance(file.live, bytes):
            file.live = bytearray(file.live)
        file.live += data[:room]
        if room < len(data):
            _fail(errno.ENOSPC, path)

    def read_part(self, file: _File, start: int, nbytes: int, path: Path, crashes: int) -> bytes:
        """Return a part of an open file."""
        if crashes != self._crashes:
            _fail(errno.EIO, path)
        self.spent += self.delay
        return bytes(file.live[start : start + nbytes])

    def sync(self, file: _File, path: Path, crashes: int) -> None:
        """Make an open file's content durable."""
        self._change("sync", path, crashes)
        file.live = bytes(file.live)
        if not self.lying:
            file.durable = file.live

    def _room(self, wanted: int) -> int:
        """Return by how many bytes a file can grow, at most `wanted`."""
        return max(0, wanted if self.capacity is None else min(wanted, self.capacity - self.used()))

    def _change(self, operation: str, path: Path, crashes: int | None = None, *, grows: bool = True) -> None:
        if crashes not in (None, self._crashes):
            _fail(errno.EIO, path)
        self.before(operation)
        self.spent += self.delay
        full = self.broken == errno.ENOSPC
        if self.broken and operation not in ("remove", "remove_directory") and (grows or not full):
            _fail(self.broken, path)

    def _folder(self, path: Path) -> _Folder:
        folder = self._root
        for part in _parts(path):
            node = folder.live.get(part)
            if node is None:
                _fail(errno.ENOENT, path)
            if not isinstance(node, _Folder):
                _fail(errno.ENOTDIR, path)
            folder = node
        return folder

    def _file(self, path: Path) -> _File:
        node = self._folder(path.parent).live.get(path.name)
        if not isinstance(node, _File):
            _fail(errno.ENOENT, path)
        return node


class _OpenFile:
    def __init__(self, disk: SimDisk, file: _File, path: Path, crashes: int) -> None:
        self._disk, self._file, self._path, self._crashes = disk, file, path, crashes

    def write(self, data: bytes | memoryview) -> None:
        self._disk.write(self._file, bytes(data), self._path, self._crashes)

    def read(self, start: int, nbytes: int) -> bytes:
        return self._disk.read_part(self._file, start, nbytes, self._path, self._crashes)

    def sync(self) -> None:
        self._disk.sync(self._file, self._path, self._crashes)

    def close(self) -> None:
        pass


def _parts(path: Path) -> tuple[str, ...]:
    return path.parts[1:] if path.is_absolute() else path.parts


def _fail(number: int, path: Path) -> NoReturn:
    raise OSError(number, os.strerror(number), str(path))
