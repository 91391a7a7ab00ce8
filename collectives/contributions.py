"""What contributors have sent us of the chunks that we own, each checked against what it had announced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from thinwire.collectives.aggregate import lower_median, outliers
from thinwire.collectives.shards import Grid
from thinwire.compression.codec import Buffer, CodecError
from thinwire.swarm.protocol import Contribution, Digest, PeerId

Key = tuple[PeerId, int]
"""A contributor, and which of its announcements."""


class Screen(Protocol):
    """What says whether a payload is one: a Codec of chunks, or a codec of whole payloads."""

    def check(self, payload: Buffer, n: int) -> float:
        """The squared L2 norm of what a payload of n elements (or of at most n bytes) says. Raises CodecError for what no
        honest encoder writes.
        """
        ...


class Contributions:
    """One round's. `usual` is the running norm of each chunk; it changes when the round commits (`settle`), not before.

    `middle`: which of a round's norms is the usual one.
    """

    def __init__(
        self,
        codec: Screen,
        grid: Grid,
        usual: dict[int, float],
        middle: Callable[[Iterable[float]], float] = lower_median,
    ) -> None:
        self._codec, self._grid, self._usual, self._middle = codec, grid, usual, middle
        self._held: dict[Key, dict[int, Buffer]] = {}
        self._norms: dict[Key, dict[int, float]] = {}
        # What the usual norms become when these contributors commit; and, where all were beyond them, (these contributors,
        # what was usual for them, what is for the next).
        self._news: dict[bytes, dict[int, float]] = {}
        self._raised: dict[int, tuple[bytes, float, float]] = {}

    def __len__(self) -> int:
        """Chunks that are held."""
        return sum(len(chunks) for chunks in self._held.values())

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(memoryview(chunk).nbytes for chunks in self._held.values() for chunk in chunks.values())

    def has(self, key: Key, index: int) -> bool:
        """Whether this chunk is here."""
        return index in self._held.get(key, ())

    def own(self, peer: PeerId, attempt: int, index: int, chunk: Buffer) -> None:
        """Keep a chunk of ours."""
        self._held.setdefault((peer, attempt), {})[index] = chunk

    def lend(self, key: Key, index: int, to: Contributions, name: Key) -> None:
        """Let another have a chunk as well, called `name` there, with what is known of its length."""
        to.own(*name, index, self._held[key][index])
        if index in (norms := self._norms.get(key, {})):
            to._norms.setdefault(name, {})[index] = norms[index]

    def take(self, key: Key, index: int, payload: Buffer, *, found: Digest, announced: Digest) -> str:
        """Keep a chunk whose hash is `found`; when it is not what was announced or cannot be used, the reason."""
        if found != announced:
            return "hash"
        if reason := self.screen(key, index, payload):
            return reason
        self._held.setdefault(key, {})[index] = payload
        return ""

    def screen(self, key: Key, index: int, payload: Buffer) -> str:
        """Note how long a chunk is, without keeping it; when it cannot be used, the reason."""
        try:
            square = self._codec.check(payload, self._grid.size(index))
        except CodecError as error:
            return error.reason
        self._norms.setdefault(key, {})[index] = square**0.5
        return ""

    def of(self, contributors: Sequence[Contribution], index: int) -> list[Buffer] | None:
        """A chunk of all of these, in their order; None as long as one is missing."""
        found = [self._held.get((entry.peer, entry.attempt), {}).get(index) for entry in contributors]
        whole = [payload for payload in found if payload is not None]
        return whole if len(whole) == len(found) else None

    def beyond(self, contributors: Sequence[Contribution], name: bytes, index: int) -> tuple[PeerId, ...]:
        """Who of these, together called `name`, is beyond all measure in this chunk: see `outliers`."""
        keys = [(entry.peer, entry.attempt) for entry in contributors]
        norms = {key[0]: self._norms[key][index] for key in keys if index in self._norms.get(key, ())}
        known, before, raised = self._raised.get(index, (b"", 0.0, self._usual.get(index, 0.0)))
        usual = before if known == name else raised
        far, after = outliers(norms, usual, self._middle)
        if far and all(peer in far for peer, norm in norms.items() if norm > 0.0):
            self._raised[index] = (name, usual, after)
        else:
            self._news.setdefault(name, {})[index] = after
        return far

    def drop(self, key: Key, index: int) -> None:
        """Free a chunk that is of no use: another may come in its place."""
        self._held.get(key, {}).pop(index, None)
        self._norms.get(key, {}).pop(index, None)

    def forget(self, peer: PeerId, attempts: Collection[int]) -> None:
        """Free what a peer sent for other announcements than these."""
        for key in [key for key in {*self._held, *self._norms} if key[0] == peer and key[1] not in attempts]:
            self._held.pop(key, None)
            self._norms.pop(key, None)

    def settle(self, name: bytes, *, learns: bool = True) -> None:
        """The contributors called `name` are committed: what is needed on is what it says about norms, if it `learns`."""
        if learns:
            self._usual.update(self._news.get(name, {}))
        self._held, self._norms = {}, {}
