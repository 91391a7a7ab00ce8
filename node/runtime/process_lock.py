"""Lock that allows one peer per set of directories.

Two peers with one key would look like one liar to the swarm.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from thinwire.swarm.identity.errors import HintedError

ATTEMPTS, PAUSE = 5, 0.05
"""Attempts to take the lock, and the seconds between two: `holder` takes it for a moment."""

HELD = (errno.EWOULDBLOCK, errno.EACCES)
"""Errors of a lock that another process holds."""

Process = tuple[int, float]
"""Number of a process, and its start in seconds since 1970, as that process knows them."""


class InUseError(HintedError):
    """Another peer uses these directories, or they cannot be written."""

    exit_code: ClassVar[int] = 3


def unwritable(path: Path, error: OSError) -> InUseError:
    """Return the error for one of our files that cannot be written.

    The hint warns of another directory: with its key there, this machine would be another peer.
    """
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "make room on that disk" if full else "make the directory writable"
    return InUseError(
        f"cannot write {path}: {error.strerror}",
        f"{remedy}; or choose another directory with --home DIR, with a new key unless you copy all files there",
    )


def this_process() -> Process:
    """Return the number and the start of the caller's process."""
    import psutil

    return os.getpid(), psutil.Process().create_time()


def holder(path: Path) -> Process | None:
    """Return the process that holds the lock file, None if there is none.

    This also finds a process of another container, whose number has no meaning here: the lock is that of the file, and the
    holder has written its number. A dead process holds no lock. Raises PermissionError for the file of another user.
    """
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        raise
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return _written(descriptor) if error.errno in HELD else None
    else:
        return None
    finally:
        os.close(descriptor)


def _written(descriptor: int) -> Process:
    """Return the process in a lock file; (0, 0.0) if its write is incomplete."""
    try:
        number, started = os.pread(descriptor, 64, 0).decode("ascii").split()
        return int(number), float(started)
    except (OSError, ValueError):
        return 0, 0.0


def _lock(descriptor: int) -> bool:
    """Take the lock; return False if another process holds it. Raises OSError."""
    import fcntl

    for _ in range(ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in HELD:
                raise
            time.sleep(PAUSE)
        else:
            return True
    return False


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold the lock file while the block runs; the system releases it however the process ends.

    Raises InUseError.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unwritable(path, error) from None
    try:
        try:
            if not _lock(descriptor):
                raise InUseError(
                    f"another peer already runs in this directory (process {_written(descriptor)[0] or 'unknown'})",
                    "stop it first, or choose another directory for the key and files: --home DIR (Python: home=DIR)",
                )
            ours = "{} {!r}\n".format(*this_process()).encode()
            os.pwrite(descriptor, ours, 0)
            os.ftruncate(descriptor, len(ours))
        except OSError as error:
            raise unwritable(path, error) from None
        yield
    finally:
        os.close(descriptor)
