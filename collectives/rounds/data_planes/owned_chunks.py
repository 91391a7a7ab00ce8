"""Chunks that a peer owns in a round: their contributions, and the computation of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from thinwire.collectives.blocking_work import WORTH, LatestWork, Work, at_once
from thinwire.collectives.rounds.data_planes.contributions import Contributions
from thinwire.collectives.rounds.data_planes.result_store import Results
from thinwire.compression.core.types import Buffer
from thinwire.swarm.frame import nbytes
from thinwire.swarm.messages.registry import Contribution, ContributionKey, Digest, PeerId, Proposal

Made = TypeVar("Made")


class OwnedChunks:
    """Chunks that we own in the ballot in progress.

    aside: computes large results, one after the other; at_once: when the last contribution arrives. failed: receives the
    exceptions of computations.
    """

    # As in Results, there is no reference to the data plane.
    def __init__(
        self, results: Results, contributions: Contributions, aside: Work, failed: Callable[[Exception], None]
    ) -> None:
        self.indices: Sequence[int] = ()
        self._results, self._contributions, self._aside = results, contributions, aside
        self._computing = LatestWork[int](aside, failed)
        """Computations of the ballot in progress whose inputs are complete, by chunk."""
        self._sources: dict[ContributionKey, Digest] = {}
        """Announcement with which we have checked the data of each contributor."""

    @property
    def computing(self) -> tuple[int, ...]:
        """Return the chunks whose results are being computed, in the order of the computation."""
        return tuple(self._computing)

    @property
    def complete(self) -> bool:
        """True if we own chunks and all their results are here."""
        return bool(self.indices) and not self._unfinished()

    def note_check(self, key: ContributionKey, announcement: Digest) -> None:
        """Note the announcement with which we check the data of a contributor."""
        self._sources[key] = announcement

    def inputs(self, proposal: Proposal, index: int) -> list[Buffer] | None:
        """Return all contributions to a chunk, None if one is missing or the result is here or being computed."""
        if self._results.chunks[index] is not None or index in self._computing:
            return None
        payloads = self._contributions.of(proposal.contributors, index)
        if payloads is None:
            return None
        named = [one for one in proposal.contributors if one.announced]
        # Our data of each contributor has to be that of the announcement in the proposal.
        right = all(self._sources.get(one.key, one.announced) == one.announced for one in named)
        return payloads if right else None

    def at_once(self, payloads: Sequence[Buffer]) -> bool:
        """Return True if the result of these contributions is to be computed at once, and not aside."""
        return self._aside is at_once or sum(map(nbytes, payloads)) < WORTH

    def compute(self, index: int, make: Callable[[], Made], done: Callable[[int, Made], None]) -> None:
        """Compute the result of a chunk aside; `done` takes it unless another peer owns the chunk by then."""

        def finish(index: int, made: Made) -> None:
            if index in self.indices and self._results.chunks[index] is None:
                done(index, made)

        self._computing.run(index, make, finish)

    def clear(self) -> None:
        """Drop the computations: they do not belong to the ballot in progress, or the round is over."""
        self._computing.clear()

    # --- contributors

    def delivered(self, proposal: Proposal) -> list[PeerId]:
        """Return the contributors whose chunks are all here."""
        if not self.indices:
            return []
        return [one.peer for one in proposal.contributors if all(self._has(one, index) for index in self.indices)]

    def awaited(self, proposal: Proposal) -> list[Contribution]:
        """Return the contributions of which chunks are missing here, and their results too."""
        return [one for one in proposal.contributors if not all(self._has(one, index) for index in self._unfinished())]

    def _unfinished(self) -> list[int]:
        return [index for index in self.indices if self._results.chunks[index] is None]

    def _has(self, entry: Contribution, index: int) -> bool:
        return self._contributions.has(entry.key, index)
