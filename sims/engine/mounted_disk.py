"""Access of one process to the disk of its machine."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from thinwire.node.runtime.disk import Disk, DiskFile, ScratchFile
from thinwire.sims.engine.disk import SimDisk


class MountedDisk:
    """A process's access to the disk; it ends with the process, but the disk does not."""

    def __init__(self, disk: SimDisk) -> None:
        self.mounted = True
        self._disk = disk

    def _mounted(self) -> Disk:
        if not self.mounted:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._disk

    def make_directory(self, path: Path) -> None:
        self._mounted().make_directory(path)

    def create(self, path: Path) -> DiskFile:
        return self._mounted().create(path)

    def scratch(self, path: Path, free: int) -> ScratchFile:
        return self._mounted().scratch(path, free)

    def overwrite(self, path: Path, data: bytes) -> None:
        self._mounted().overwrite(path, data)

    def size(self, path: Path) -> int:
        return self._mounted().size(path)

    def read(self, path: Path, nbytes: int) -> bytes:
        return self._mounted().read(path, nbytes)

    def names(self, path: Path) -> list[str]:
        return self._mounted().names(path)

    def rename(self, old: Path, new: Path) -> None:
        self._mounted().rename(old, new)

    def sync_directory(self, path: Path) -> None:
        self._mounted().sync_directory(path)

    def remove(self, path: Path) -> None:
        self._mounted().remove(path)

    def remove_directory(self, path: Path) -> None:
        self._mounted().remove_directory(path)
