"""Streaming DiLoCo (arXiv 2501.18512): the model is exchanged part by part, and inner steps go on while a part is under way.

A round is the exchange of one part, round n of part (n − 1) mod P, so that agreement, state, checkpoints and digests are those
of any other round. Between two rounds are H / P inner steps. With τ of them made while the round is under way:

    Δ = θ̄ₚ − θₚ is announced;  τ inner steps;  the verdict:  θ̄ₚ ← Outer(θ̄ₚ, mean Δ);  θₚ ← α θₚ + (1 − α) θ̄ₚ

See `overlap` for what happens when no verdict has come by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, cast

from thinwire.collectives.outcome import Outcome
from thinwire.collectives.shards import Grid, grid
from thinwire.collectives.statesync import Fetched
from thinwire.compression.codec import Floats
from thinwire.node.overlap import OverlappedRounds
from thinwire.node.session import Session
from thinwire.node.waiting import Work
from thinwire.swarm.manifest import Manifest
from thinwire.swarm.protocol import CHUNK_BYTES, PeerId

from .fragments import Layout
from .outer import Read, Replica, Write
from .parts import Part, parts_of


class StreamingReplica(Replica):
    """Outer parameters and momentum of the whole model; the next round is about one part of them. Made by `begin`."""

    parts: tuple[Part, ...]
    cuts: tuple[Grid, ...]

    @classmethod
    def begin(cls, manifest: Manifest, layout: Layout, codec: Any, theta: Floats, members: Sequence[PeerId]) -> Self:
        """See Replica. Raises ManifestError for a model that cannot be cut into so many parts."""
        parts = parts_of(layout, manifest.outer.fragments)
        replica = cls(layout.digest, theta, members)
        replica.parts, replica.cuts = parts, tuple(grid(part.size, codec) for part in parts)
        return replica

    @property
    def turn(self) -> int:
        """Which part is next."""
        return self.round % len(self.parts)

    def cut(self, usual: Grid) -> Grid:
        """See Replica."""
        return self.cuts[self.turn]

    def spans(self, start: int, stop: int) -> Iterable[tuple[int, int]]:
        """See Replica."""
        return self.parts[self.turn].within(start, stop)

    def touched(self) -> Iterable[int]:
        """See Replica."""
        found: set[int] = set()
        for start, stop in self.parts[self.turn].spans:
            for first, last in ((start, stop - 1), (self.size + start, self.size + stop - 1)):
                found.update(range(4 * first // CHUNK_BYTES, 4 * last // CHUNK_BYTES + 1))
        return sorted(found)


class StreamingRounds(OverlappedRounds):
    """What `Rounds` is where a round is about the whole model."""

    def __init__(self, session: Session, manifest: Manifest, *, read: Read, write: Write, work: Work) -> None:
        super().__init__(session, manifest, read=read, write=write, work=work)
        self._alpha, self._last, self._most = manifest.outer.alpha, manifest.run.rounds, manifest.max_weight
        # Tokens that went into each part since it was sent, but for those that the caller still counts.
        self._owed = [0] * len(self._replica.parts)

    @property
    def _replica(self) -> StreamingReplica:
        return cast(StreamingReplica, self._session.replica)

    async def sync(self, *, weight: int, loss: float, speed: float) -> Outcome:
        """See Rounds.sync. `weight`: the tokens since the last round's contribution, of whatever part."""
        outcome = await super().sync(weight=weight, loss=loss, speed=speed)
        if outcome.commit is not None:
            gone, turn = weight - outcome.kept, (self._replica.round - 1) % len(self._owed)
            self._owed = [0 if part == turn else owed + gone for part, owed in enumerate(self._owed)]
        return outcome

    def _weight(self, weight: int) -> int:
        return min(self._most, self._owed[self._replica.turn] + weight)

    async def _take_over(self, fetched: Fetched) -> None:
        await super()._take_over(fetched)
        self._owed = [0] * len(self._owed)

    async def _follow(self) -> None:
        """Mix the part that has just made its step into the model; after the run's last round the model is θ̄."""
        replica = self._replica
        if replica.round == self._last:
            await self._work(lambda: self._write(replica.theta))
        else:
            part = replica.parts[(replica.round - 1) % len(replica.parts)]
            await self._work(lambda: _mix(part, replica.theta, self._write, self._alpha))


def _mix(part: Part, theta: Floats, write: Callable[..., None], alpha: float) -> None:
    for start, stop in part.spans:
        write(theta[start:stop], start, alpha)
