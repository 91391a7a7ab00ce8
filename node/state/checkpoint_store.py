"""Store of checkpoints that survive a kill at any operation; bad ones are reported with the reason.

A checkpoint is a directory: one safetensors file per fragment (slow weights and outer momentum, equal on all peers),
one for this peer's private state, and a signed manifest with the hash of each. It is written under another name,
synced, and renamed; nothing is changed in place. Its files are described by fragments, so it loads into any division
of the model.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from blake3 import blake3
from msgspec import UNSET
from thinwire.collectives.consensus.chain import decode, encode
from thinwire.node.runtime.disk import Disk
from thinwire.node.state.checkpoint_manifest import (
    CHUNK_BYTES,
    CheckpointContents,
    CheckpointManifestError,
    FileEntry,
    Hasher,
    OtherFormat,
    StandingEntry,
    seal,
    unseal,
)
from thinwire.node.state.snapshot import (
    PRIVATE,
    FragmentState,
    PrivateState,
    Snapshot,
    files,
    fragment_index,
    fragment_state,
)
from thinwire.node.state.tensor_file import TensorFileError, Tensors, parse, pieces
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.messages.registry import Chain

MANIFEST = "manifest.json"
LATEST = "LATEST"
KEEP = 3
"""Number of newest checkpoints to retain, besides the last one of each day (UTC)."""

_MANIFEST_LIMIT = 64 << 20
_DRAFT = ".tmp-"
_STEP = re.compile(r"step-\d{8,10}(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is on the medium."""

    path: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """No new checkpoint was written; old ones are unchanged. Raise the alarm, but continue training."""

    reason: str


SaveOutcome: TypeAlias = Saved | SaveFailed


@dataclass(frozen=True, slots=True)
class Loaded:
    """The newest trusted checkpoint, if any; `remarks` names the ones skipped and why.

    damaged: the remarks about checkpoints that are newer than it, or that may be: an unreadable manifest has no serial number,
    so only the round in the name of its directory is known.
    """

    snapshot: Snapshot | None
    path: Path | None
    remarks: tuple[str, ...]
    damaged: tuple[str, ...] = ()
    saved: bool = True
    """True if a checkpoint was completed here, readable or not."""
    other_format: Path | None = None
    """The newest checkpoint of a version with another format, if no checkpoint is good."""

    def advice(self, directory: Path) -> str:
        """Return what the user can do if none of the checkpoints in this directory is good."""
        if self.other_format is None:
            return f"restore {directory} from a copy"
        weights = f"begin another run with the weights: --from {self.other_format}"
        return f"install the version of thinwire that wrote them, or {weights}"


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    body: CheckpointContents
    manifest: bytes


class SnapshotLost(ValueError):
    """The arrays of a snapshot have changed before they were on the medium."""


class CheckpointStore:
    """The checkpoints of one run in one directory. The caller ensures a single writer (process_lock.py)."""

    def __init__(self, directory: Path, disk: Disk, identity: Identity) -> None:
        self._directory = directory
        self._disk = disk
        self._identity = identity

    def save(self, snapshot: Snapshot, *, now: float, suffix: str) -> SaveOutcome:
        """Write a checkpoint; return once it is on the medium.

        Blocks for the disk: call it from a worker thread.

        `now` is wall time in seconds since 1970, `suffix` a random string for the draft's name. A full, broken or
        read-only disk, a tensor that is not finite and a lost snapshot give a SaveFailed, not an exception. The arrays must
        not change meanwhile, or the snapshot is lost.
        """
        try:
            self._disk.make_directory(self._directory)
            names = self._disk.names(self._directory)
            for name in names:
                if _DRAFT in name:
                    self._discard(self._directory / name)
            entries, _ = self._entries(names)
        except OSError as error:
            return SaveFailed(_reason(error))
        name = step_name(snapshot.round)
        if name in names:
            name = next(free for k in range(1, len(names) + 1) if (free := f"{name}.{k}") not in names)
        draft = self._directory / f"{name}{_DRAFT}{suffix}"
        try:
            body = self._write(snapshot, draft, now, entries[0] if entries else None)
            self._disk.rename(draft, self._directory / name)
            self._disk.sync_directory(self._directory)
            self._point(name, suffix)
        except (OSError, CheckpointManifestError, TensorFileError, SnapshotLost) as error:
            self._discard(draft)
            return SaveFailed(_reason(error))
        self._prune([_Entry(name, body, b""), *entries], suffix)
        return Saved(self._directory / name, sum(file.nbytes for file in body.files))

    def load(self, run_id: bytes | None = None) -> Loaded:
        """Read the newest checkpoint (of `run_id`, if given) with valid signature, hashes and values.

        Never raises for the disk's content. A damaged private file loses the private state only.
        """
        try:
            names = self._disk.names(self._directory)
            entries, faults = self._entries(names)
        except OSError as error:
            return Loaded(None, None, (_reason(error),), saved=False)
        remarks = [f"{name}: {_reason(fault)}" for name, fault in faults.items()]
        unreadable, damaged = list(remarks), list[str]()
        for entry in entries:
            if run_id is not None and entry.body.run_id != run_id.hex():
                remarks.append(f"{entry.name}: belongs to run {entry.body.run_id[:8]}")
                continue
            try:
                snapshot = self._read(entry, remarks)
            except (OSError, CheckpointManifestError, TensorFileError) as error:
                damaged.append(f"{entry.name}: {_reason(error)}")
                remarks.append(damaged[-1])
                continue
            damaged = [remark for remark in unreadable if remark >= step_name(snapshot.round)] + damaged
            remarks += self._pointer_remarks(entry.name)
            return Loaded(snapshot, self._directory / entry.name, tuple(remarks), tuple(damaged))
        others = [self._directory / name for name, fault in faults.items() if isinstance(fault, OtherFormat)]
        return Loaded(None, None, tuple(remarks), saved=LATEST in names, other_format=max(others, default=None))

    # --- writing

    def _write(self, snapshot: Snapshot, draft: Path, now: float, previous: _Entry | None) -> CheckpointContents:
        self._disk.make_directory(draft)
        entries = [self._write_tensors(draft, name, tensors) for name, tensors in files(snapshot)]
        if snapshot.lost():
            raise SnapshotLost(
                "a round has changed the state before it was written, and there was no memory for a copy"
            )
        values = dict(snapshot.private.values) if snapshot.private else {}
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise CheckpointManifestError(f"{name} is {value}")
        body = CheckpointContents(
            serial=previous.body.serial + 1 if previous else 1,
            run_id=snapshot.run_id.hex(),
            round=snapshot.round,
            digest=snapshot.digest.hex(),
            members=tuple(member.hex() for member in snapshot.members),
            written=now,
            previous=blake3(previous.manifest).hexdigest() if previous else "",
            files=tuple(entries),
            values=values,
            standings=UNSET
            if snapshot.standings is None
            else {
                number: StandingEntry(
                    round, tuple(member.hex() for member in members), lives.hex(), encode(chain).hex()
                )
                for number, (round, members, lives, chain) in snapshot.standings.items()
            },
            lives=snapshot.lives.hex(),
            chain=encode(snapshot.chain).hex(),
        )
        file = self._disk.create(draft / MANIFEST)
        try:
            file.write(seal(body, self._identity))
            file.sync()
        finally:
            file.close()
        self._disk.sync_directory(draft)
        return body

    def _write_tensors(self, draft: Path, name: str, tensors: Tensors) -> FileEntry:
        hasher = Hasher()
        file = self._disk.create(draft / name)
        try:
            for piece in pieces(tensors, CHUNK_BYTES):
                hasher.update(piece)
                file.write(piece)
            file.sync()
        finally:
            file.close()
        return hasher.entry(name)

    def _point(self, name: str, suffix: str) -> None:
        draft = self._directory / f"{LATEST}{_DRAFT}{suffix}"
        file = self._disk.create(draft)
        try:
            file.write(f"{name}\n".encode())
            file.sync()
        finally:
            file.close()
        self._disk.rename(draft, self._directory / LATEST)
        self._disk.sync_directory(self._directory)

    def _prune(self, entries: list[_Entry], suffix: str) -> None:
        """Remove all but the newest KEEP and the last of each day. A failure is retried next time."""
        days: set[int] = set()
        for place, entry in enumerate(entries):
            day = int(entry.body.written // 86_400)
            if place >= KEEP and day in days:
                gone = self._directory / f"{entry.name}{_DRAFT}{suffix}"
                with suppress(OSError):
                    self._disk.rename(self._directory / entry.name, gone)
                    self._discard(gone)
            days.add(day)

    def _discard(self, path: Path) -> None:
        with suppress(OSError):
            if _STEP.match(path.name):
                for name in self._disk.names(path):
                    self._disk.remove(path / name)
                self._disk.remove_directory(path)
            else:
                self._disk.remove(path)

    # --- reading

    def _entries(self, names: list[str]) -> tuple[list[_Entry], dict[str, OSError | CheckpointManifestError]]:
        """Return checkpoints with our signature, newest first, and the faults of the others by name."""
        entries: list[_Entry] = []
        faults: dict[str, OSError | CheckpointManifestError] = {}
        for name in names:
            if not _STEP.fullmatch(name):
                continue
            try:
                path = self._directory / name / MANIFEST
                size = self._disk.size(path)
                if size > _MANIFEST_LIMIT:
                    raise CheckpointManifestError(f"{MANIFEST} has {size} bytes")
                data = self._disk.read(path, size)
                entries.append(_Entry(name, unseal(data, self._identity), data))
            except (OSError, CheckpointManifestError) as error:
                faults[name] = error
        entries.sort(key=lambda entry: entry.body.serial, reverse=True)
        return entries, faults

    def _read(self, entry: _Entry, remarks: list[str]) -> Snapshot:
        body = entry.body
        fragments: dict[int, FragmentState] = {}
        private: PrivateState | None = None
        for file in body.files:
            index = fragment_index(file.name)
            if index is not None:
                fragments[index] = fragment_state(self._tensors(entry.name, file))
            elif file.name == PRIVATE:
                try:
                    private = PrivateState(self._tensors(entry.name, file), dict(body.values))
                except (OSError, CheckpointManifestError, TensorFileError) as error:
                    remarks.append(f"{entry.name}: private state is lost: {_reason(error)}")
        members = tuple(bytes.fromhex(member) for member in body.members)
        run_id, digest = bytes.fromhex(body.run_id), bytes.fromhex(body.digest)
        standings = None
        if isinstance(body.standings, dict):
            standings = {
                number: (
                    one.round,
                    tuple(bytes.fromhex(member) for member in one.members),
                    bytes.fromhex(one.lives),
                    _chain(one.chain),
                )
                for number, one in body.standings.items()
            }
        lives, chain = bytes.fromhex(body.lives), _chain(body.chain)
        return Snapshot(run_id, body.round, digest, members, fragments, private, standings, lives, chain)

    def _tensors(self, directory: str, file: FileEntry) -> Tensors:
        path = self._directory / directory / file.name
        size = self._disk.size(path)
        if size != file.nbytes:
            raise CheckpointManifestError(f"{file.name} has {size} bytes instead of {file.nbytes}")
        data = self._disk.read(path, file.nbytes)
        file.check(data)
        try:
            return parse(data)
        except TensorFileError as error:
            raise TensorFileError(f"{file.name}: {error}") from None

    def _pointer_remarks(self, name: str) -> list[str]:
        try:
            pointed = self._disk.read(self._directory / LATEST, 64).decode("utf-8", "replace").strip()
        except OSError:
            return [f"{LATEST}: cannot be read; found {name} by its manifest"]
        return [] if pointed == name else [f"{LATEST}: names {pointed!r}; the newest good one is {name}"]


def step_name(round: int) -> str:
    """Return the name of the first checkpoint after a round."""
    return f"step-{round:08d}"


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _chain(text: str) -> Chain:
    """Return the chain of a manifest. Raises CheckpointManifestError."""
    try:
        return decode(bytes.fromhex(text))
    except ValueError as error:
        raise CheckpointManifestError(str(error)) from None
