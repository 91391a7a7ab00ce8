"""Files that a user names: only regular ones are read, and only up to a size.

A device such as /dev/zero has no end, and a pipe without a writer never begins.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

SETTINGS = 1 << 20
"""Limit in bytes of files of settings: manifests, scenarios, JSON. Their parsers have lower ones."""

TOKENIZER = 1 << 28
"""Limit in bytes of a tokenizer's file; the large ones have some 40 MB."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it. Raises OSError, also if it is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def content_of(path: Path, limit: int | None = SETTINGS) -> bytes:
    """Return the content of a regular file of at most `limit` bytes (None: of any size). Raises OSError."""
    with open_regular(path) as file:
        content = file.read(-1 if limit is None else limit + 1)
    if limit is not None and len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit >> 10} KiB", os.fspath(path))
    return content
