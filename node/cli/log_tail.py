"""Last lines of a log file, and the lines that are added to it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

TAIL_BYTES = 4 << 20
"""Most bytes that are read for the last lines."""

POLL_SECONDS = 0.5


def tail(path: Path, lines: int, *, follow: bool) -> Iterator[str]:
    """Yield the last `lines` lines; with `follow` all later ones too, also after a rotation of the file.

    Raises OSError if the file cannot be read.
    """
    file = open(path, encoding="utf-8", errors="replace")
    try:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - TAIL_BYTES))
        yield from file.readlines()[-lines:] if lines else ()
        rest = ""
        while follow:
            # Look before reading: the lines written until the rotation are then read from the old file, up to its end.
            replaced = _replaced(path, file.fileno(), file.tell())
            while part := file.readline():
                rest += part
                if rest.endswith("\n"):
                    yield rest
                    rest = ""
            if replaced:
                file.close()
                file = open(path, encoding="utf-8", errors="replace")
            else:
                time.sleep(POLL_SECONDS)
    finally:
        file.close()


def _replaced(path: Path, descriptor: int, position: int) -> bool:
    """Return True if the path names another file than the open one, or if that was emptied."""
    ours = os.fstat(descriptor)
    try:
        now = path.stat()
    except FileNotFoundError:
        return False  # in the midst of a rotation
    return (
        (now.st_ino, now.st_dev) != (ours.st_ino, ours.st_dev) or now.st_size < ours.st_size or ours.st_size < position
    )
