"""Votes and promises of an acceptor on disk, in one small file per fragment.

The file has `SIZE` bytes, which are allocated when it is created, so that a full disk does not prevent a vote and a save
changes no metadata:

    offset  bytes  content
    0       8      MAGIC, which ends with the version of this format
    8       16     life
    24      4      highest number that an announcement of this life may have, little-endian
    28      4      length n of the record, little-endian
    32      n      record: a `VoteRecord` or nil in MessagePack
    32 + n  16     blake3 (128 bits) of everything before it
                   unused; it may hold the end of an earlier, longer record

A save overwrites the beginning of the file and syncs it. A file that is absent, torn, damaged or has another version
means that the votes are lost; then a new life is drawn, and the acceptor has no vote until a commit makes it a member.
This is safe:

- A torn write was never sent, because `save` had not returned. The record before it may have been sent, and is lost
  too; but no message depends on the memory of a life that has ended.
- Bit rot changes a record that may have been sent. The acceptor must not vote from an older or a different record.

There is only one slot. With two, a reader that finds one slot damaged would take the older one. This would be right
after a torn write, but it would forget a vote after bit rot, and a reader cannot distinguish the two.

The limits are those of the medium: a restored backup, and a disk that loses a synced write, make an acceptor forget.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import blake3
import msgspec
from thinwire.collectives.consensus.members.vote_store import VoteRecord, VoteStore, new_life
from thinwire.node.runtime.disk import Disk
from thinwire.swarm.messages.registry import LIFE

MAGIC = b"twvotes\x04"

SIZE = 1 << 19
"""Bytes of the file. The largest record is a proposal of 314 kB and less than 1 kB."""

AHEAD = 1024
"""Numbers of announcements that one save allows. After a restart the numbers continue above them."""

ABSENT = "absent"
"""Value of `VoteFile.lost` if there is no file: in a new run folder, or after the loss of the file."""

_CHECK = 16
_HEADER = len(MAGIC) + LIFE + 8


class _Damaged(Exception):
    """Content from which nothing may be loaded. The message is the reason."""


class VoteFile(VoteStore):
    """VoteStore in a file. rng, wall: make lives. report: called with the reason whenever votes are lost.

    If a life cannot be stored, its votes remain in memory. This is as safe: no later process knows such a life, so none
    votes in its name. lost: reason why the file had no usable content when it was opened; empty if it was loaded.
    """

    def __init__(
        self,
        path: Path,
        disk: Disk,
        rng: random.Random,
        wall: Callable[[], float],
        report: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.lost = ""
        self._life = b""
        self._record: VoteRecord | None = None
        self._numbers = 0
        self._path, self._disk, self._report = path, disk, report
        self._rng, self._wall = rng, wall
        self._allocated, self._durable = False, True
        try:
            self._load()
        except FileNotFoundError:
            self.lost = ABSENT
        except OSError as error:
            self.lost = error.strerror or str(error)
        except _Damaged as error:
            self.lost = str(error)
        if self.lost:
            if self.lost != ABSENT:
                report(self.lost)
            self.renew()

    @property
    def life(self) -> bytes:
        return self._life

    @property
    def record(self) -> VoteRecord | None:
        return self._record

    @property
    def numbers(self) -> int:
        return self._numbers

    def use_number(self, number: int) -> None:
        """Store that this number is used, with the next AHEAD.

        If that fails, begin a life in memory, and raise OSError.
        """
        if number > self._numbers:
            self._keep(number + AHEAD, self._record)

    def save(self, record: VoteRecord) -> None:
        """Store a record. If it cannot be stored, begin a life in memory, and raise OSError."""
        if record != self._record:
            self._keep(self._numbers, record)

    def _keep(self, numbers: int, record: VoteRecord | None) -> None:
        if self._durable:
            try:
                self._store(_encoded(self._life, numbers, record))
            except OSError as error:
                self._forget(error)
                raise
        self._numbers, self._record = numbers, record

    def renew(self) -> None:
        self._life, self._record, self._durable = new_life(self._rng, self._wall()), None, True
        self._numbers = 0
        try:
            self._store(_encoded(self._life, 0, None))
        except OSError as error:
            self._forget(error)

    def _forget(self, error: OSError) -> None:
        """Begin a life in memory, other than that in the file, which may have been written in part."""
        self._life, self._record, self._durable = new_life(self._rng, self._wall()), None, False
        self._numbers = 0
        self._report(f"cannot be written: {error.strerror or error}")

    def _load(self) -> None:
        """Read life and record. Raises OSError and _Damaged."""
        data = self._disk.read(self._path, SIZE + 1)
        self._life, self._numbers, self._record, used = _decoded(data)
        self._allocated = True
        # The content may come from the cache: the process that wrote it ended before its sync, or the sync failed.
        self._store(data[:used])

    def _store(self, data: bytes) -> None:
        if self._allocated:
            self._disk.overwrite(self._path, data)
        else:
            self._create(data)
            self._allocated = True

    def _create(self, data: bytes) -> None:
        """Create the file instead of one that has no usable content."""
        self._disk.make_directory(self._path.parent)
        if self._path.name in self._disk.names(self._path.parent):
            self._disk.remove(self._path)
        file = self._disk.create(self._path)
        try:
            file.write(data.ljust(SIZE, b"\0"))
            file.sync()
        finally:
            file.close()
        self._disk.sync_directory(self._path.parent)


def _encoded(life: bytes, numbers: int, record: VoteRecord | None) -> bytes:
    body = msgspec.msgpack.encode(record)
    data = MAGIC + life + numbers.to_bytes(4, "little") + len(body).to_bytes(4, "little") + body
    if len(data) + _CHECK > SIZE:
        raise OSError(errno.EFBIG, "a record of votes is too long")
    return data + blake3.blake3(data).digest(_CHECK)


def _decoded(data: bytes) -> tuple[bytes, int, VoteRecord | None, int]:
    """Return life, numbers, record, and the number of used bytes. Raises _Damaged."""
    if len(data) != SIZE:
        raise _Damaged("wrong size")
    if data[: len(MAGIC)] != MAGIC:
        raise _Damaged("unknown format")
    end = _HEADER + int.from_bytes(data[_HEADER - 4 : _HEADER], "little")
    if end + _CHECK > SIZE or data[end : end + _CHECK] != blake3.blake3(data[:end]).digest(_CHECK):
        raise _Damaged("wrong checksum")
    life, body = data[len(MAGIC) : len(MAGIC) + LIFE], data[_HEADER:end]
    try:
        record = msgspec.msgpack.decode(body, type=VoteRecord | None)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _Damaged(str(error)) from None
    # Zeros stand for any life, see `Proposal.lives`.
    if not any(life) or msgspec.msgpack.encode(record) != body:
        raise _Damaged("not written by this program")
    numbers = int.from_bytes(data[_HEADER - 8 : _HEADER - 4], "little")
    return life, numbers, record, end + _CHECK
