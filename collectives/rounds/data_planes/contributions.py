"""Contributions to the chunks that we own, and the summary of a contribution in its announcement."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import blake3
from thinwire.collectives.aggregation.norm_bounds import NormBound
from thinwire.collectives.aggregation.screening import lower_median, outliers
from thinwire.collectives.topology.shards import Grid
from thinwire.compression.core.codec import SMALLEST, CodecError
from thinwire.compression.core.norm_clip import limits
from thinwire.compression.core.types import Buffer
from thinwire.swarm.messages.registry import Contribution, ContributionKey, Digest, PeerId, Ready

NORM = struct.Struct("<f")
"""Norm of a chunk in an announcement."""


@dataclass(frozen=True, slots=True)
class ContributionSummary:
    """Summary of a contribution for its announcement: the contributor can send nothing else afterwards.

    hashes: blake3 of each encoded chunk. norms: L2 norm of each chunk (NORM), or empty; see `Ready`.
    """

    hashes: bytes
    norms: bytes = b""


def summarize(source: Sequence[Buffer], codec: Screen | None = None, grid: Grid | None = None) -> ContributionSummary:
    """Return the hashes of the chunks, and their norms if codec and grid are given.

    An invalid chunk has the norm 0.
    """
    hashes, norms = bytearray(), bytearray()
    for index, chunk in enumerate(source):
        hashes += blake3.blake3(chunk).digest()
        if codec is not None and grid is not None:
            norms += _encoded_norm(_norm(codec, chunk, grid.size(index)))  # at once, while the chunk is in the cache
    return ContributionSummary(bytes(hashes), bytes(norms))


def _norm(codec: Screen, chunk: Buffer, size: int) -> float:
    try:
        return math.sqrt(codec.check(chunk, size))
    except CodecError:
        return 0.0


def _encoded_norm(norm: float) -> bytes:
    try:
        return NORM.pack(norm)
    except OverflowError:
        return NORM.pack(math.inf)


def norm_bytes(norms: bytes, index: int) -> bytes:
    """Return the announced norm of a chunk as it was sent, for a comparison to the last bit."""
    return norms[NORM.size * index : NORM.size * (index + 1)]


def announced_norm(norms: bytes, index: int) -> float:
    """Return the announced norm of a chunk, infinite if there is no finite one.

    An honest owner computes with no such contribution, because it compares the norms.
    """
    norm: float = NORM.unpack_from(norms, NORM.size * index)[0] if len(norms) >= NORM.size * (index + 1) else math.inf
    return norm if 0.0 <= norm < math.inf else math.inf


class Screen(Protocol):
    """Validator of payloads: a Codec of chunks, or a codec of whole payloads."""

    def check(self, payload: Buffer, n: int) -> float:
        """Return the squared L2 norm of a payload of n elements (or of at most n bytes).

        Raises CodecError for payloads that no honest encoder writes.
        """
        ...


@dataclass(frozen=True, slots=True)
class OwnerChecks:
    """Checks of the owners of chunks by the other peers of a round.

    - `audited`: other peers may compute a result again after the round. So an owner signs only for results that it has
      computed itself.
    - `bound`: largest norm of a result by the norms of the contributions, which announcements then contain; None: a
      result only has to be valid.
    - `growth`: see Codec.
    """

    audited: bool = False
    bound: NormBound | None = None
    growth: float = 1.0


UNCHECKED = OwnerChecks()
"""Checks of a round that needs valid results only."""


class ResultScreen:
    """Check of results by the norms that the contributors have announced.

    announced: returns the announcement that an entry of a proposal names, if it is here.
    """

    def __init__(
        self, codec: Screen, grid: Grid, checks: OwnerChecks, announced: Callable[[Contribution], Ready | None]
    ) -> None:
        self._codec, self._grid, self._checks, self._announced = codec, grid, checks, announced
        self.over_bound = ""
        """Reason why the result that was checked last is above the bound; "" if it is not."""

    @property
    def bounded(self) -> bool:
        """True if the contributors announce norms."""
        return self._checks.bound is not None

    def summarize(self, source: Sequence[Buffer]) -> ContributionSummary:
        """Return hashes and, if they count, norms of our encoded chunks."""
        return summarize(source, self._codec, self._grid) if self.bounded else summarize(source)

    def check(self, chunk: Buffer, index: int, contributors: Sequence[Contribution] | None) -> None:
        """Raise CodecError for a result that no honest owner makes of the announced contributions.

        contributors: None: its norm does not matter.
        """
        self.over_bound, size = "", self._grid.size(index)
        norm, limit = math.sqrt(self._codec.check(chunk, size)), self._limit(index, contributors)
        if limit < math.inf and norm > limit * self._checks.growth + SMALLEST * size**0.5:
            self.over_bound = f"its result of chunk {index} has the norm {norm:.3g}; at most {limit:.3g} is possible"
            raise CodecError(self.over_bound, "bound")

    def _limit(self, index: int, contributors: Sequence[Contribution] | None) -> float:
        """Return the largest norm of the result of a chunk before it is encoded.

        The norm of an announcement that is not here counts as infinite: a contributor can replace its announcement by a
        later one.
        """
        if self._checks.bound is None or contributors is None:
            return math.inf
        found = [self._announced(entry) for entry in contributors]
        norms = [math.inf if ready is None else announced_norm(ready.norms, index) for ready in found]
        return self._checks.bound(norms, [float(entry.weight) for entry in contributors])


class Contributions:
    """Contributions of one round.

    `usual` holds the running norm of each chunk and changes only when the round commits (`finish`). `middle` computes
    the usual norm from the norms of one round.
    """

    def __init__(
        self,
        codec: Screen,
        grid: Grid,
        usual: dict[int, float],
        middle: Callable[[Iterable[float]], float] = lower_median,
    ) -> None:
        self._codec, self._grid, self._usual, self._middle = codec, grid, usual, middle
        self._held: dict[ContributionKey, dict[int, Buffer]] = {}
        self._norms: dict[ContributionKey, dict[int, float]] = {}
        self._after: dict[bytes, dict[int, float]] = {}
        """New values of `_usual` by chunk if these contributors commit."""
        self._raised: dict[int, tuple[bytes, float, float]] = {}
        """For chunks whose contributions were all outliers: contributors, usual norm for them and for others."""

    def __len__(self) -> int:
        """Return the number of stored chunks."""
        return sum(len(chunks) for chunks in self._held.values())

    @property
    def nbytes(self) -> int:
        """Bytes of stored chunks."""
        return sum(memoryview(chunk).nbytes for chunks in self._held.values() for chunk in chunks.values())

    def has(self, key: ContributionKey, index: int) -> bool:
        """Return True if this chunk is stored."""
        return index in self._held.get(key, ())

    def store(self, peer: PeerId, attempt: int, index: int, chunk: Buffer) -> None:
        """Store a chunk without a check."""
        self._held.setdefault((peer, attempt), {})[index] = chunk

    def lend(self, key: ContributionKey, index: int, to: Contributions, name: ContributionKey) -> None:
        """Share a chunk and its norm with another Contributions, under the key `name` there."""
        to.store(*name, index, self._held[key][index])
        if index in (norms := self._norms.get(key, {})):
            to._norms.setdefault(name, {})[index] = norms[index]

    def take(
        self,
        key: ContributionKey,
        index: int,
        payload: Buffer,
        *,
        found: Digest,
        announced: Digest,
        norm: bytes | None = None,
    ) -> str:
        """Store a chunk whose hash is `found`. `norm`: the announced one, if that counts.

        Return the reason if the chunk differs from its announcement or is invalid, else "".
        """
        if found != announced:
            return "hash"
        if reason := self.screen(key, index, payload):
            return reason
        if norm is not None and norm != _encoded_norm(self.norm(key, index)):
            self._norms[key].pop(index)
            return "hash"
        self._held.setdefault(key, {})[index] = payload
        return ""

    def screen(self, key: ContributionKey, index: int, payload: Buffer) -> str:
        """Note the norm of a chunk without storing it; return the reason if it is invalid, else ""."""
        try:
            square = self._codec.check(payload, self._grid.size(index))
        except CodecError as error:
            return error.reason
        self._norms.setdefault(key, {})[index] = square**0.5
        return ""

    def of(self, contributors: Sequence[Contribution], index: int) -> list[Buffer] | None:
        """Return one chunk of all contributors, in their order; None if one is missing."""
        found = [self._held.get(entry.key, {}).get(index) for entry in contributors]
        whole = [payload for payload in found if payload is not None]
        return whole if len(whole) == len(found) else None

    def outliers(self, contributors: Sequence[Contribution], name: bytes, index: int) -> tuple[PeerId, ...]:
        """Return the contributors whose norm of this chunk is an outlier, see `outliers`.

        `name` identifies the contributors together.
        """
        keys = [entry.key for entry in contributors]
        norms = {key[0]: self._norms[key][index] for key in keys if index in self._norms.get(key, ())}
        usual = self._usual.get(index, 0.0)
        if index in self._raised:
            known, before, raised = self._raised[index]
            usual = before if known == name else raised
        far, after = outliers(norms, usual, self._middle)
        if far and all(peer in far for peer, norm in norms.items() if norm):
            self._raised[index] = (name, usual, after)
        else:
            self._after.setdefault(name, {})[index] = after
        return far

    def norm(self, key: ContributionKey, index: int) -> float:
        """Return the norm of a screened chunk, 0 if it was not screened."""
        return self._norms.get(key, {}).get(index, 0.0)

    def ratios(self, contributors: Sequence[Contribution]) -> dict[PeerId, float]:
        """Return each contributor's norm in units of the norm to which it would be clipped.

        It is the lower median of these ratios over the chunks. Only chunks count for which enough non-zero norms are known to
        clip them.
        """
        weights = {entry.key: float(entry.weight) for entry in contributors}
        keys = list(weights)
        found: dict[PeerId, list[float]] = {}
        for index in sorted({index for key in keys for index in self._norms.get(key, ())}):
            known = [key for key in keys if index in self._norms.get(key, ())]
            norms = [self._norms[key][index] for key in known]
            for key, norm, limit in zip(known, norms, limits(norms, [weights[key] for key in known]), strict=True):
                if math.isfinite(limit):
                    found.setdefault(key[0], []).append(norm / limit)
        return {peer: lower_median(each) for peer, each in found.items()}

    def drop(self, key: ContributionKey, index: int) -> None:
        """Free a useless chunk; another may replace it."""
        self._held.get(key, {}).pop(index, None)
        self._norms.get(key, {}).pop(index, None)

    def forget(self, peer: PeerId, attempts: Collection[int]) -> None:
        """Free the chunks of a peer for other announcements than `attempts`."""
        for key in [key for key in {*self._held, *self._norms} if key[0] == peer and key[1] not in attempts]:
            self._held.pop(key, None)
            self._norms.pop(key, None)

    def finish(self, name: bytes, *, learns: bool = True) -> None:
        """End the round with the contributors called `name`; if it `learns`, update the usual norms."""
        if learns:
            self._usual.update(self._after.get(name, {}))
        self._held, self._norms = {}, {}
