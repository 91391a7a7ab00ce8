"""The plane of sparse rounds in which chunks have owners: so that what a peer receives does not grow with their number.

A contributor sends each owner the payloads of its chunks. The owner takes the mean of what has come, adds what it has kept of
that chunk from rounds before, sends the largest values of this to all and keeps the rest: error feedback at the owner, too, as
in CocktailSGD (Wang et al., ICML 2023); compare Ok-Topk (Li and Hoefler, arXiv 2201.07598). With gather every payload goes to
everybody.

What is kept changes with the parameters, when a round is applied, and only where what was committed is what the owner has made
of it. It belongs to who owns the chunk: so owners hardly change from round to round, whoever comes and goes (`steady`), and the
next owner begins with nothing.

Who owns what a leader says, and nobody can tell whether it had a reason to leave an owner out. So who does not own a chunk any
more holds what it has kept for another `HOLD` rounds, and goes on with it when the chunk comes back: a liar that leads now and
then makes nobody forget what was kept before. What its round has not sent of chunks that it has dealt out anew may be lost; as
an owner it could lose as much. Only who is kept from a chunk for longer loses what it has kept of it, as where owners really
change. `Kept` counts it. Whoever leads, all that is held is no larger than the parameters.

A checkpoint has what is kept, and an owner that comes back goes on with it while the state is the same. Where rounds have
passed it has to drop it, as it does its residual: what was kept may have gone into sums of these rounds that its earlier life
has made. Nobody knows afterwards, and part of it would be sent twice. For the same reason it drops it of chunks whose results
its earlier life may have made in the first round that it applies. With β = `exchange.keep` the next sum would have got β kept:
what is lost is at most β / (1 − β) times as long as the longest mean of these chunks was. With β = 0.5 that is one mean, of the
one part in N that is the owner's, once (tests/compression/test_portions.py).

Since results depend on who owns what, another ballot has others (`Settled`). They are made `aside`, because the largest of many
values take long to find; who owns chunks may be in the middle of its inner steps, so not where these are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol, cast

import blake3
import numpy as np
from numpy.typing import NDArray
from thinwire.collectives.aggregate import RULES
from thinwire.collectives.agreement import Agreement
from thinwire.collectives.aside import Work, at_once
from thinwire.collectives.outbox import Outbox
from thinwire.collectives.results import Results
from thinwire.collectives.settled import Settled
from thinwire.collectives.shards import Grid
from thinwire.compression.codec import Buffer, Codec, Floats
from thinwire.swarm.protocol import CHUNK_BYTES, MAX_CHUNKS, Digest, Open, PeerId
from thinwire.swarm.rendezvous import rank

HOLD = 8
"""Rounds that an owner waits for a chunk that others own: as long as it rests after three failures in a row (`Standing`)."""

PARTS = 128
"""Chunks that a fragment is cut into, if it is large enough: so many peers can share the work."""


class Sifts(Protocol):
    """A sparse codec of chunks, and what an owner makes of several: see compression.portions."""

    def nbytes(self, n: int) -> int:
        """Bytes of the largest payload of n elements."""
        ...

    def check(self, payload: Buffer, n: int) -> float:
        """See contributions.Screen."""
        ...

    def check_sum(self, payload: Buffer, n: int) -> float:
        """The same for a result."""
        ...

    def thin(
        self, payloads: Sequence[Buffer], weights: Sequence[float], kept: Floats | None, n: int
    ) -> tuple[bytes, Floats]:
        """The result of checked contributions to n elements and of what was kept, and what is kept now."""
        ...


def parts(total: int, codec: Sifts, step: int) -> Grid:
    """The cut of a fragment: multiples of `step` elements, payloads of at most CHUNK_BYTES. Raises ValueError for too many."""
    run = -(-total // (PARTS * step)) * step
    while run > step and codec.nbytes(run) > CHUNK_BYTES:
        run = -(-run // (2 * step)) * step
    cut = Grid(total, run)
    if len(cut) > MAX_CHUNKS:
        raise ValueError(f"a fragment of {total} elements needs {len(cut)} chunks, the limit is {MAX_CHUNKS}")
    return cut


@lru_cache(maxsize=16)
def steady(count: int, peers: tuple[PeerId, ...], seed: bytes, fragment: int = 0) -> tuple[PeerId, ...]:
    """Owner of each of `count` chunks: equally many each but for one, and few others when somebody comes or goes.

    Each chunk goes to the first peer of its rendezvous ranking that has room (bounded loads: Mirrokni, Thorup and
    Zadimoghaddam, arXiv 1608.01350).
    """
    least, larger = divmod(count, len(peers))
    loads = dict.fromkeys(peers, 0)
    found = []
    for chunk in range(count):
        for peer in rank(seed, "keeper", peers, fragment * MAX_CHUNKS + chunk):
            if loads[peer] < least or (loads[peer] == least and larger > 0):
                larger -= loads[peer] == least
                loads[peer] += 1
                found.append(peer)
                break
    return tuple(found)


class Kept:
    """What an owner has not sent of its chunks, from round to round; arrays are replaced and never changed. `lost`: how many of
    them were given up, and the sum of the squares of all that.
    """

    def __init__(self) -> None:
        self._rests: dict[int, tuple[int, Floats]] = {}
        self._left: tuple[int, dict[int, Floats], Collection[int]] = (0, {}, ())
        self._earlier = False
        """Whether an earlier life has kept this, and may have made sums of the next round with it."""
        self.lost: tuple[int, float] = (0, 0.0)

    def of(self, index: int) -> Floats | None:
        """What is kept of a chunk, None where nothing is."""
        found = self._rests.get(index)  # once: another thread may commit meanwhile
        return None if found is None else found[1]

    def all(self) -> dict[int, Floats]:
        """What is kept, by chunk."""
        return {index: rest for index, (_, rest) in self._rests.items()}

    def leave(self, round: int, rests: Mapping[int, Floats], others: Collection[int] = ()) -> None:
        """A round has a verdict, which has left this of chunks whose results we have made: it counts from `commit` on.

        `others`: chunks whose results others have made.
        """
        self._left = round, dict(rests), others

    def commit(self, round: int) -> None:
        """A round is applied. What has belonged to others for too long is given up, and what may have been sent already."""
        left, self._left = self._left, (0, {}, ())
        _, rests, others = left if left[0] == round else (round, {}, ())
        self._rests |= {index: (round, rest) for index, rest in rests.items()}
        earlier, self._earlier = self._earlier, False
        for index, (since, _) in list(self._rests.items()):
            spent = earlier and since < round and index not in others
            if spent or since + HOLD < round:
                self._drop(index)

    def clear(self) -> None:
        """The parameters are others than those that all this was left of."""
        self._left, self._earlier = (0, {}, ()), False
        for index in list(self._rests):
            self._drop(index)

    def load(self, rests: Mapping[int, NDArray[Any]], grid: Grid, round: int) -> int:
        """Take up what `all` gave an earlier life after `round`, where it fits the chunks of `grid`; how many do not and are
        passed over.
        """
        fit = {
            index: (round, rest.copy())
            for index, rest in rests.items()
            if 0 <= index < len(grid)
            and rest.shape == (grid.size(index),)
            and rest.dtype == np.float32
            and np.isfinite(rest).all()
        }
        self._rests, self._left, self._earlier = fit, (0, {}, ()), True
        return len(rests) - len(fit)

    def _drop(self, index: int) -> None:
        _, rest = self._rests.pop(index)
        self.lost = self.lost[0] + 1, self.lost[1] + float(np.dot(rest, rest))


class Sieve(Settled):
    """See the module. `keeps` seeds who owns what, and is the same in all rounds; the caller keeps `kept`. `aside` computes."""

    def __init__(
        self,
        agreement: Agreement,
        *,
        codec: Sifts,
        grid: Grid,
        kept: Kept,
        keeps: bytes,
        outbox: Outbox,
        now: Callable[[], float],
        usual: dict[int, float],
        phase: Callable[[int, str], None] = lambda round, name: None,
        aside: Work = at_once,
    ) -> None:
        super().__init__(
            agreement,
            codec=cast(Codec, codec),  # of which it only needs nbytes and check
            grid=grid,
            rule=RULES["mean"],
            seed=keeps,
            outbox=outbox,
            now=now,
            usual=usual,
            phase=phase,
        )
        self.results = Results(lambda chunk, index: codec.check_sum(chunk, grid.size(index)), len(grid))
        self._sifts, self._kept, self._aside = codec, kept, aside
        self._rests: dict[int, dict[Digest, Floats]] = {}
        self._due: dict[int, Callable[[], tuple[bytes, Floats]]] = {}
        """What makes the results that are ours to make in the ballot in progress, and complete but for that."""
        self._task: asyncio.Task[None] | None = None
        self.stirred: Callable[[], None] = _nothing
        """Called when a result has been made, which no frame and no tick has brought."""

    def _basis(self, opened: Open) -> object:
        """See Plane."""
        if opened.adopted is None:
            return opened.contributors, opened.alive, opened.idle
        return super()._basis(opened)

    def _shared(self, opened: Open, working: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """See Exchange."""
        return steady(len(self.grid), tuple(working), self._seed, self.fragment)

    def _renew(self, opened: Open) -> None:
        """See Exchange."""
        self._due.clear()
        super()._renew(opened)

    def _reduce(self, index: int) -> None:
        """See Exchange; what has a verdict is not made again."""
        if self.agreement.commit is None and index not in self._due:
            super()._reduce(index)

    def _make(self, opened: Open, index: int, payloads: Sequence[Buffer], weights: Sequence[float]) -> None:
        """See Exchange."""
        size = self.grid.size(index)
        self._due[index] = partial(self._sifts.thin, payloads, weights, self._kept.of(index), size)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        """Make what is due, one after the other: another ballot makes the rest superfluous."""
        try:
            while self._due:
                index, make = next(iter(self._due.items()))
                result, rest = await self._aside(make)
                if self._due.get(index) is make:
                    self._has_made(index, result, rest)
        except Exception as error:  # ours: what came was checked
            self._outbox.fail(error)
        finally:
            self._task = None

    def _has_made(self, index: int, result: bytes, rest: Floats) -> None:
        del self._due[index]
        if self.opened is None or self.agreement.commit is not None:
            return
        self._rests.setdefault(index, {})[blake3.blake3(result).digest()] = rest
        self._publish(self.opened, index, result)
        self._record()
        self.stirred()

    def settle(self) -> None:
        """See Plane. What is kept changes when the round is applied."""
        super().settle()
        self.halt()
        found = ((index, made.get(self.results.hashes((index,)))) for index, made in self._rests.items())
        self._kept.leave(self.round, {index: rest for index, rest in found if rest is not None}, self._others())
        self._rests = {}

    def _others(self) -> Collection[int]:
        """Chunks whose results were made by others for sure: who made those of a ballot before is not known."""
        commit = self.agreement.commit
        if commit is None or commit.opened.adopted is not None:
            return ()
        working = [peer for peer in commit.opened.alive if peer not in commit.opened.idle]
        return {index for index, owner in enumerate(self._shared(commit.opened, working)) if owner != self.me}

    def halt(self) -> None:
        """Nothing more comes of this round here: what is being made is for nobody."""
        self._due.clear()
        self.stirred = _nothing


def _nothing() -> None:
    pass
