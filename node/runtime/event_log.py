"""Event log: one JSON object per line, append-only, with enough data to draw every graph later.

A line has "at" (monotonic seconds, for durations), "wall" (seconds since 1970, for people), "kind", and the event's own
fields. A number that is not finite is null.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

Fields: TypeAlias = Mapping[str, Any]
"""JSON values by name; not "at", "wall" or "kind"."""

Emit: TypeAlias = Callable[[str, Mapping[str, object]], None]
"""Function that writes one event, given its kind and its fields."""

_OWN = {"at", "wall", "kind"}
_BLOCK = 1 << 16


def event_text(kind: str, fields: Mapping[str, object]) -> str:
    """Return an event as a line for people."""
    return f"{kind} " + " · ".join(
        str(value)[:8] if key in ("peer", "run") else str(value)
        for key, value in fields.items()
        if value not in ("", None) and key not in ("digest", *_OWN)
    )


class EventLog:
    """Writer of an event log.

    A line is handed to the system when `append` returns, so it survives a kill (not a power cut).
    """

    def __init__(self, path: Path) -> None:
        """Open or create; truncate a line torn by a kill, so that every line is whole. Raises OSError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = _whole_lines(self._descriptor)
        self._torn = True
        self.lost = 0

    def append(self, kind: str, fields: Fields, *, at: float, wall: float) -> bool:
        """Write one event; return False if the disk does not take it.

        A failure increments `lost` and stops nothing.

        Raises ValueError if a field has a reserved name, and TypeError for values that JSON cannot represent.
        """
        if clash := _OWN & fields.keys():
            raise ValueError(f"an event field must not be named {', '.join(sorted(clash))}")
        line = msgspec.json.encode({"at": at, "wall": wall, "kind": kind, **fields}) + b"\n"
        try:
            if self._torn:
                os.ftruncate(self._descriptor, self._size)
                self._torn = False
            written = os.write(self._descriptor, line)
        except OSError:
            self.lost += 1
            self._torn = True
            return False
        if written < len(line):
            self.lost += 1
            self._torn = True
            return False
        self._size += written
        return True

    def close(self) -> None:
        """Close the file; nothing is waiting to be written."""
        os.close(self._descriptor)


def _whole_lines(descriptor: int) -> int:
    """Return the length of the file up to and including its last line end."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - _BLOCK)
        block = os.pread(descriptor, end - start, start)
        if (found := block.rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


@dataclass(frozen=True, slots=True)
class EventLogReader:
    """Events read, the offset of the next read, and the number of invalid lines."""

    events: list[dict[str, Any]]
    offset: int
    damaged: int


def read_events(path: Path, offset: int = 0) -> EventLogReader:
    """Read whole lines from `offset` (bytes) on. A partly written line is left for the next call.

    An absent file has no events; a file that became shorter than `offset` is read from its start. Raises OSError.
    """
    try:
        with open(path, "rb") as file:
            if offset > os.fstat(file.fileno()).st_size:
                offset = 0
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return EventLogReader([], 0, 0)
    data = data[: data.rfind(b"\n") + 1]
    events: list[dict[str, Any]] = []
    damaged = 0
    for line in data.splitlines():
        try:
            event = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            damaged += 1
            continue
        if _OWN <= event.keys():
            events.append(event)
        else:
            damaged += 1
    return EventLogReader(events, offset + len(data), damaged)
