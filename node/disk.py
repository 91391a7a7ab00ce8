"""The seam to the disk: the few operations a checkpoint is made of, so that a test can stop after any of them.

`RealDisk` is the one of life. Every method raises OSError as the operating system does; who uses a disk decides what a
full or broken one means.
"""

from __future__ import annotations

import errno
import os
import stat
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
        """Give the file up; without `sync` its content may still be lost."""
        ...


class Disk(Protocol):
    """Files and directories, with the two syncs spelled out because a power cut tells them apart."""

    def make_directory(self, path: Path) -> None:
        """Make a directory and its missing parents, on the medium too; nothing happens when it is there."""
        ...

    def create(self, path: Path) -> DiskFile:
        """Open a file that must not exist yet."""
        ...

    def size(self, path: Path) -> int:
        """Length of a regular file in bytes; OSError when it is absent or something else."""
        ...

    def read(self, path: Path, nbytes: int) -> bytes:
        """The first `nbytes` bytes of a file, or all when it is shorter."""
        ...

    def names(self, path: Path) -> list[str]:
        """What is in a directory, sorted; empty when there is no such directory."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Move, replacing a file (not a full directory) of the new name in one step."""
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


class _RealFile:
    def __init__(self, path: Path) -> None:
        # Unbuffered: the writer brings large pieces, and an error belongs to the write that caused it.
        self._file = open(path, "xb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[self._file.write(view) :]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class RealDisk:
    """The operating system's files. Directories are made for their owner alone."""

    def make_directory(self, path: Path) -> None:
        missing = [place for place in (path, *path.parents) if not place.exists()]
        for place in reversed(missing):
            place.mkdir(mode=0o700, exist_ok=True)
            self.sync_directory(place.parent)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))

    def create(self, path: Path) -> DiskFile:
        return _RealFile(path)

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
            return  # a directory cannot be opened there; its entries are journaled by the file system
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)
