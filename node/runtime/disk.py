"""Interface to the disk.

It has the few operations of a checkpoint, so that a test can stop after any of them.

`RealDisk` is the production implementation. Every method raises OSError as the operating system does; callers handle a
full or broken disk.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Protocol


class DiskFile(Protocol):
    """A new file that is being written, front to back."""

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`."""
        ...

    def sync(self) -> None:
        """Return when the content is on the medium. The file's name is not, until its directory is synced too."""
        ...

    def close(self) -> None:
        """Close the file; without `sync` its content may still be lost."""
        ...


class ScratchFile(Protocol):
    """A file without a name: it ends with the last reference to it, or with the process."""

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`."""
        ...

    def read(self, start: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `start` on, or fewer at the end of the file."""
        ...


class Disk(Protocol):
    """Files and directories, with separate syncs for both, because a power cut treats them differently."""

    def make_directory(self, path: Path) -> None:
        """Create a directory and its missing parents, on the medium too; do nothing if it exists."""
        ...

    def create(self, path: Path) -> DiskFile:
        """Open a file that must not exist yet."""
        ...

    def scratch(self, path: Path, free: int) -> ScratchFile:
        """Open a file without a name in a directory. Raises OSError if fewer than `free` bytes are free there."""
        ...

    def overwrite(self, path: Path, data: bytes) -> None:
        """Replace the first bytes of an existing file; return when they are on the medium.

        The other bytes stay. After a crash or an error each page of the new data may be old, new, or torn.
        """
        ...

    def size(self, path: Path) -> int:
        """Return the length of a regular file in bytes. Raises OSError if it is absent or not a regular file."""
        ...

    def read(self, path: Path, nbytes: int) -> bytes:
        """Return the first `nbytes` bytes of a file, or all if it is shorter."""
        ...

    def names(self, path: Path) -> list[str]:
        """Return the sorted names in a directory; empty if it does not exist."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Move a file or directory, atomically replacing a file (not a full directory) of the new name."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Return when creations, renames and removals in this directory are on the medium."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file."""
        ...

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        ...


_sync_data: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
"""Flush of a file's data without its time stamps; `fsync` where the system has no `fdatasync`."""


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view) :]


class _RealFile:
    def __init__(self, path: Path) -> None:
        # Unbuffered: the writer brings large pieces, and an error belongs to the write that caused it.
        self._file = open(path, "xb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        _write_all(self._file, data)

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class _RealScratch:
    def __init__(self, path: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=path, buffering=0)
        weakref.finalize(self, self._file.close)

    def write(self, data: bytes | memoryview) -> None:
        _write_all(self._file, data)

    def read(self, start: int, nbytes: int) -> bytes:
        self._file.seek(start)
        return self._file.read(nbytes)


class RealDisk:
    """The operating system's files. New directories are accessible to their owner only."""

    def make_directory(self, path: Path) -> None:
        missing = [place for place in (path, *path.parents) if not place.exists()]
        for place in reversed(missing):
            place.mkdir(mode=0o700, exist_ok=True)
            self.sync_directory(place.parent)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))

    def create(self, path: Path) -> DiskFile:
        return _RealFile(path)

    def scratch(self, path: Path, free: int) -> ScratchFile:
        if shutil.disk_usage(path).free < free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return _RealScratch(path)

    def overwrite(self, path: Path, data: bytes) -> None:
        with open(path, "r+b", buffering=0) as file:
            _write_all(file, data)
            _sync_data(file.fileno())

    def size(self, path: Path) -> int:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        return status.st_size

    def read(self, path: Path, nbytes: int) -> bytes:
        with open(path, "rb") as file:
            return file.read(nbytes)

    def names(self, path: Path) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def sync_directory(self, path: Path) -> None:
        if os.name != "posix":
            return  # a directory cannot be opened there; the file system journals its entries
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)


def present(path: Path) -> bool:
    """Return True if a path exists; a text that no path can have names none."""
    try:
        return path.exists()
    except OSError:
        return False
