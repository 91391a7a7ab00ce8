"""Event log: one JSON object per line, append-only, with enough data to draw every graph later.

A line has "at" (monotonic seconds, for durations), "wall" (seconds since 1970, for people), "kind", and the event's own
fields. A number that is not finite is null.

A large log is divided: when the file has SEGMENT bytes, it is moved to the folder of the same name without its suffix and
compressed, as BEGIN-END.jsonl.gz, and a new file begins. BEGIN and END are offsets in the log as if it were one file.
Readers use such offsets, so that a division changes nothing for them. The oldest segments are removed when all files
together exceed a limit. Compression and removal may run in another thread, and a process may end at any moment of them:
the next one finishes the work.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
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

Aside: TypeAlias = Callable[[Callable[[], None]], bool]
"""Function that runs another one, at once or in another thread; it returns False if it does not."""

SEGMENT = 4 << 20
"""Bytes after which a file is moved and compressed, which takes about a tenth of a second of one core."""

_PIECE = 1 << 20
"""Bytes that are compressed between two looks at whether the log is closed."""

_SEGMENT_NAME = re.compile(r"(\d{15})-(\d{15})\.jsonl(\.gz)?")
_DRAFT_NAME = re.compile(rf"\.{_SEGMENT_NAME.pattern}")
_LEVEL = 3  # of compression: twice as fast as the usual 6, and little larger


def event_text(kind: str, fields: Mapping[str, object]) -> str:
    """Return an event as a line for people: the words of its kind, then its fields by name.

    Texts for people have no name.
    """
    return f"{kind.replace('_', ' ')} " + " · ".join(
        f"{'' if key in ('detail', 'reason', kind) else f'{key} '}{_value(key, value)}"
        for key, value in fields.items()
        if value not in ("", None) and key not in ("digest", *_OWN)
    )


def _value(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    return str(value)[:8] if key in ("peer", "relay", "run") else str(value)


class EventLog:
    """Writer of an event log.

    A line is handed to the system when `append` returns, so it survives a kill (not a power cut).
    """

    def __init__(self, path: Path, limit: int = 0, aside: Aside | None = None) -> None:
        """Open or create; truncate a line torn by a kill, so that every line is whole. Raises OSError.

        limit: most bytes of all files, which those that wait for `aside` may exceed for a moment; 0: no limit. aside: runs
        compression and removal, one at a time; None: at once.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self._limit, self._segment = path, limit, min(SEGMENT, limit // 4 or SEGMENT)
        self._aside, self._tidying, self._closed = aside or _at_once, False, False
        self._open()
        self.lost = 0
        self._tidy()

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = _whole_lines(self._descriptor)
        self._full, self._torn = self._segment, True

    def append(self, kind: str, fields: Fields, *, at: float, wall: float) -> bool:
        """Write one event; return False if the disk does not take it.

        A failure increments `lost` and stops nothing. If the file was removed, a new one begins.

        Raises ValueError if a field has a reserved name, and TypeError for values that JSON cannot represent.
        """
        if clash := _OWN & fields.keys():
            raise ValueError(f"an event field must not be named {', '.join(sorted(clash))}")
        line = msgspec.json.encode({"at": at, "wall": wall, "kind": kind, **fields}) + b"\n"
        self._replace_removed()
        if self._size >= self._full and not self._torn:
            self._divide()
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

    def _replace_removed(self) -> None:
        before = self._descriptor
        with suppress(OSError):
            if not os.fstat(before).st_nlink:
                self._open()
                os.close(before)

    def _divide(self) -> None:
        """Move the file away and begin a new one. If the disk refuses, continue, and try again later."""
        folder, begin = _folder(self._path), _end(_segments(self._path))
        before, target = self._descriptor, folder / f"{begin:015d}-{begin + self._size:015d}.jsonl"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            os.rename(self._path, target)
        except OSError:
            self._full = self._size + self._segment
            return
        try:
            self._open()
        except OSError:
            with suppress(OSError):
                os.rename(target, self._path)
            self._full = self._size + self._segment
            return
        os.close(before)
        self._tidy()

    def _tidy(self) -> None:
        """Compress and remove segments, unless that is in progress: then the next division does it for both."""

        def work() -> None:
            try:
                with suppress(OSError):
                    self._compress()
            finally:
                self._tidying = False

        if not self._tidying:
            self._tidying = True
            if not self._aside(work):
                self._tidying = False

    def _compress(self) -> None:
        """Remove the oldest segments above the limit, then compress those that are not. Raises OSError.

        Another thread may append and divide meanwhile. After `close` it ends soon, with InterruptedError.
        """
        for draft in _folder(self._path).glob(".*"):  # left by a kill
            if _DRAFT_NAME.fullmatch(draft.name):
                draft.unlink(missing_ok=True)
        segments = _segments(self._path)
        sizes = [file.stat().st_size for _, _, file in segments]
        most = self._limit - self._segment if self._limit else sum(sizes)
        while segments and sum(sizes) > most:
            segments.pop(0)[2].unlink()
            sizes.pop(0)
        for _, _, file in segments:
            if file.suffix == ".gz":
                file.with_suffix("").unlink(missing_ok=True)  # left by a kill
            else:
                self._compress_file(file)

    def close(self) -> None:
        """Close the file; nothing is waiting to be written. Compression in another thread ends soon."""
        self._closed = True
        os.close(self._descriptor)

    def _compress_file(self, file: Path) -> None:
        """Replace a segment by its compressed form, which is on the disk before. Raises OSError."""
        draft = file.with_name(f".{file.name}.gz")
        try:
            with open(file, "rb") as source, open(draft, "wb") as target:
                with gzip.GzipFile("", "wb", _LEVEL, target) as compressed:
                    while piece := source.read(_PIECE):
                        if self._closed:
                            raise InterruptedError
                        compressed.write(piece)
                target.flush()
                os.fsync(target.fileno())
            os.replace(draft, file.with_name(f"{file.name}.gz"))
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        file.unlink()


def _at_once(function: Callable[[], None]) -> bool:
    function()
    return True


def _folder(path: Path) -> Path:
    """Return the folder of the segments of a log."""
    return path.with_suffix("")


def _segments(path: Path) -> list[tuple[int, int, Path]]:
    """Return (begin, end, file) of the segments of a log, in their order."""
    try:
        names = sorted(os.listdir(_folder(path)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    # The compressed file follows the other one in the order of names, and replaces it.
    found = {
        match[1]: (int(match[1]), int(match[2]), name) for name in names if (match := _SEGMENT_NAME.fullmatch(name))
    }
    return [(begin, end, _folder(path) / name) for begin, end, name in found.values()]


def _end(segments: list[tuple[int, int, Path]]) -> int:
    return segments[-1][1] if segments else 0


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
class EventBatch:
    """Events read, the offset of the next read, and the number of invalid lines."""

    events: list[dict[str, Any]]
    offset: int
    damaged: int


def end_of_events(path: Path) -> int:
    """Return the offset behind the last event."""
    return _end(_segments(path)) + (path.stat().st_size if path.exists() else 0)


def read_events(path: Path, offset: int = 0) -> EventBatch:
    """Read whole lines from `offset` (bytes) on, also from compressed segments.

    A partly written line is left for the next call. An absent file has no events; a log that became shorter than `offset`
    is read from the start of its file. Raises OSError.
    """
    offset, data = _read(path, offset)
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
    return EventBatch(events, offset + len(data), damaged)


def _content(segment: Path, start: int, size: int) -> bytes:
    """Return `size` bytes of a segment; a damaged one is one invalid line of this size. Raises OSError."""
    try:
        with gzip.open(segment) if segment.suffix == ".gz" else open(segment, "rb") as file:
            file.seek(start)
            found = file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile):
        found = b""
    return found if len(found) == size else b" " * (size - 1) + b"\n"


def _read(path: Path, offset: int) -> tuple[int, bytes]:
    """Return the content of a log from `offset` on, and the offset at which it begins."""
    while True:
        try:
            with open(path, "rb") as file:
                segments, begin = (found := _segments(path)), _end(found)
                opened, size = os.fstat(file.fileno()), os.fstat(file.fileno()).st_size
                try:
                    present = os.stat(path)
                except FileNotFoundError:
                    continue
                if (opened.st_ino, opened.st_dev) != (present.st_ino, present.st_dev):
                    continue  # the log was divided between the two looks
                if offset > begin + size:
                    offset = begin
                file.seek(max(0, offset - begin))
                newest = file.read()
        except FileNotFoundError:
            segments = _segments(path)
            if not segments:
                return 0, b""
            newest = b""
        parts: list[bytes] = []
        at = offset
        try:
            for begin, end, segment in segments:
                if end > offset:
                    at = begin if not parts and begin > offset else at  # older ones were removed
                    parts.append(_content(segment, max(0, offset - begin), end - max(offset, begin)))
        except FileNotFoundError:
            continue  # compressed or removed meanwhile
        return at, b"".join((*parts, newest))
