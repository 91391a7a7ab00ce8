"""Request of `thinwire recover` to a running daemon: a file in the run folder.

The daemon looks for the file and removes it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

RECENT = 30.0
"""Seconds for which a request is valid, so that one of yesterday has no effect."""

_LIMIT = 4096


class RecoverRequest(msgspec.Struct, frozen=True):
    """Request to one process, see Status, at `wall` (seconds since 1970)."""

    process: int
    process_started: float
    wall: float


def write_request(path: Path, request: RecoverRequest) -> None:
    """Write the request in one step. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(request))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def take_request(path: Path, process: tuple[int, float], wall: float) -> bool:
    """Remove a request; return True if there was one to this process, made in the last seconds."""
    try:
        with open(path, "rb") as file:
            request = msgspec.json.decode(file.read(_LIMIT), type=RecoverRequest)
    except OSError:
        return False
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        request = None
    if not withdraw(path) or request is None:
        return False  # A request that cannot be removed would be taken again and again.
    return (request.process, request.process_started) == process and abs(wall - request.wall) < RECENT


def withdraw(path: Path) -> bool:
    """Remove the request; return True if it was still there."""
    with suppress(OSError):
        path.unlink()
        return True
    return False
