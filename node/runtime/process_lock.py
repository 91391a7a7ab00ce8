"""Lock that allows one peer per set of directories.

Two peers with one key would look like one liar to the swarm.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from thinwire.swarm.identity.errors import HintedError


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


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold the lock file while the block runs; the system releases it however the process ends.

    Raises InUseError.
    """
    import fcntl

    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unwritable(path, error) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise unwritable(path, error) from None
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
            holder = holder if holder.isdecimal() else "unknown"  # its write may be incomplete
            raise InUseError(
                f"another peer already runs in this directory (process {holder})",
                "stop it first, or choose another directory for the key and files: --home DIR (Python: home=DIR)",
            ) from None
        try:
            ours = f"{os.getpid()}\n".encode()
            os.pwrite(descriptor, ours, 0)
            os.ftruncate(descriptor, len(ours))
        except OSError as error:
            raise unwritable(path, error) from None
        yield
    finally:
        os.close(descriptor)
