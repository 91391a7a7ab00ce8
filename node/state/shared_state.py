"""State of a replica with its digest; joiners and checkpoints read it while the replica continues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self
from weakref import WeakSet

import blake3
import numpy as np
from thinwire.collectives.state_sync.state_offers import state_digest
from thinwire.compression.core.types import Buffer
from thinwire.node.runtime.disk import ScratchFile
from thinwire.node.runtime.environment import Environment
from thinwire.node.state.data_ledger import DataLedger
from thinwire.node.state.replica_buffers import BufferState
from thinwire.node.state.state_file import write_state
from thinwire.swarm.lineage import lineage_of
from thinwire.swarm.messages.registry import CHUNK_BYTES, Chain, Digest, PeerId

_SHARED = ("layout", "size", "_place", "state", "round", "members", "lives", "chain", "_named", "_unsealed")
"""Attributes of a replica that its twins have, besides the hashes."""


class SharedState(BufferState):
    """Base of replicas: the place of the state in the run, the hashes of its chunks, and its twins.

    A twin reads the array of the state, for a joiner or for a checkpoint. The array is not copied unless the state changes
    before the twin is released or forgotten. Where memory is short, the copy is a file, if no checkpoint needs it. Without
    memory for the copy the state changes in place, and the twin is lost.
    """

    lost = False
    """True for a twin whose arrays have changed or may change at any moment.

    Check it after each use of them.
    """

    torn = False
    """True while the state changes, and if a change has failed half-way: then it is no state of a round."""

    _file: ScratchFile | None = None
    """In a twin: the file that has the state instead of the array."""

    _by_chunk = False
    """True for a twin that is read by `lent_chunk` only."""

    layout: Digest
    round: int
    members: tuple[PeerId, ...]
    lives: bytes
    chain: Chain
    ledger: DataLedger | None

    def __init__(self) -> None:
        self._hashes: list[Digest] = []
        self._named: tuple[int, Digest] = (0, bytes(32))
        self._unsealed: tuple[int, ...] = ()
        self._files: tuple[Environment, Path] | None = None
        """Disk and directory for states that peers read, see `use_files`."""
        self._twins = WeakSet[SharedState]()
        """Readers of the state; those that were forgotten are not in it."""

    @property
    def lineage(self) -> bytes:
        """Name of the lineage."""
        return lineage_of(self.chain)

    @property
    def newest(self) -> tuple[int, Digest]:
        """Latest round whose state has its digest, and the digest."""
        return self._named

    def twin(self, *, private: bool = False) -> Self:
        """Return a replica of the same round that has our state array, for as long as a reader needs it.

        It is valid for the state, round, members, lives, chain and digest. Before the array changes this replica moves to a
        copy of it, see `move_from_twins`. Call it while nothing but `compute_digest` changes this replica. `private`: the
        reader needs arrays, also those of `private_state`; else chunks of the state only.
        """
        # A copy in one step: a thread that computes the digest changes two of the attributes.
        twin, values = object.__new__(type(self)), self.__dict__.copy()
        twin.__dict__ |= {name: values[name] for name in _SHARED}
        twin._hashes, twin._by_chunk = list(self._hashes), not private
        self._twins.add(twin)
        return twin

    def release(self) -> None:
        """End the use of the state's array by this twin; it has none from now on."""
        self.state = np.empty(0, np.float32)

    def release_private(self) -> None:
        """End the use of what `private_state` returns by this twin."""

    def use_files(self, environment: Environment, directory: Path) -> None:
        """Leave states that peers read to them in files of a directory, where memory for copies is short."""
        self._files = environment, directory

    def move_from_twins(self) -> None:
        """Leave the arrays to the twins that need them, and continue with copies.

        Without memory for the copies, the twins are lost. Call it before each change.
        """
        readers = [twin for twin in list(self._twins) if not twin.lost and twin._reads(self)]
        try:
            self._leave_arrays(readers)
        except MemoryError:
            for twin in readers:
                twin.lost = True

    def _reads(self, replica: SharedState) -> bool:
        """Return True if this twin needs an array that the replica still has."""
        return self.state is replica.state

    def _leave_arrays(self, readers: Sequence[SharedState]) -> None:
        """Continue with copies of the arrays that these twins need. Raises MemoryError."""
        readers = [twin for twin in readers if twin.state is self.state]
        if not readers:
            return
        if self._files is not None and all(twin._by_chunk for twin in readers):
            file = write_state(*self._files, self.state)
            if file is not None:
                for twin in readers:
                    twin._file = file
                    twin.release()
                return
        self.state = self.state.copy()
        if self.ledger is not None:
            self.ledger.move(self.state)

    def lent_chunk(self, index: int, owner: SharedState) -> Buffer:
        """Chunk `index` of this twin of `owner`, in memory that stays as it is; empty if the twin is lost.

        `owner` may move from its twins at the same time, in another thread.
        """
        state, start = self.state, index * CHUNK_BYTES
        chunk = state.view(np.uint8).data[start : start + CHUNK_BYTES].toreadonly()
        if state is owner.state:
            chunk = memoryview(bytes(chunk))
            if self.lost:
                return b""
        if self._file is None:
            return chunk
        try:
            return self._file.read(start, CHUNK_BYTES)
        except OSError:
            return b""

    def chunk(self, index: int) -> memoryview:
        """Chunk `index` (CHUNK_BYTES, the last one shorter) of the state's bytes: parameters, then momentum."""
        return self.state.view(np.uint8).data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]

    def __len__(self) -> int:
        """Chunks of the state."""
        return (self.state.nbytes + CHUNK_BYTES - 1) // CHUNK_BYTES

    @property
    def digest(self) -> Digest:
        """Digest of round, members and state. Computes the hashes first if a commit has not done so."""
        self.compute_digest()
        return self._named[1]

    @property
    def hashes(self) -> list[Digest]:
        """Hashes of the chunks."""
        self.compute_digest()
        return self._hashes

    def seal(self, chunks: Iterable[int] | None = None) -> None:
        """Recompute the hashes and the digest after a change of the state, or of these chunks of it."""
        self._seal(range(len(self)) if chunks is None else (*self._unsealed, *chunks))

    def compute_digest(self) -> None:
        """Compute hashes and digest after a commit, if they are out of date; it takes a while.

        May run in any thread while nothing changes the state: two threads that compute them at once find the same.
        """
        if unsealed := self._unsealed:
            self._seal(unsealed)

    def _seal(self, chunks: Iterable[int]) -> None:
        self._hashes = self._hashes or [bytes(32)] * len(self)
        for index in chunks:
            self._hashes[index] = blake3.blake3(self.chunk(index)).digest()
        self._name()
        self._unsealed = ()

    def _name(self) -> None:
        """Compute the digest of the state, given the hashes of its chunks."""
        digest = state_digest(self.round, self.layout, self.members, self._hashes, self.lives, self.lineage)
        self._named = self.round, digest
