"""Planning problem of a pipeline: peers, their stages, delays between them, speed and memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from thinwire.swarm.identity.errors import HintedError

MOST_BYTES = 1 << 24
"""Largest size of a file in bytes."""

MOST_PEERS = 1024

MOST_SECONDS = 1e6
"""Largest delay, forward and gap."""

MOST_BEHIND = 2
"""Largest number of visits behind the frontier in a path, each by one stage (CC3)."""


class ProblemError(HintedError):
    """File or figures from which no pipeline can be planned."""

    exit_code: ClassVar[int] = 2


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Planning problem. Peers and stages count from 0; stage 0 has the origins, where paths start and end.

    `delays` (peers, peers): seconds of a micro-batch's activations from row to column; `work` (peers,): seconds of one
    forward; `memory` (peers,): micro-batches that a peer holds at once; `length`: stages that each micro-batch visits;
    `per_start`: paths of each origin, each used `rounds` times in a step; `gap`: seconds lost after each operation;
    `swaps`: allowed visits behind the frontier of a path (CC3).
    """

    name: str
    delays: NDArray[np.float64]
    stages: tuple[tuple[int, ...], ...]
    work: NDArray[np.float64]
    memory: NDArray[np.int64]
    length: int
    per_start: int
    rounds: int = 2
    gap: float = 0.11
    places: tuple[str, ...] = ()
    swaps: int = MOST_BEHIND
    stage: NDArray[np.int64] = field(init=False)
    """(peers,): stage of each peer, -1 for none."""

    def __post_init__(self) -> None:
        _check(self)
        stage = np.full(len(self.delays), -1, np.int64)
        for number, members in enumerate(self.stages):
            for peer in members:
                stage[peer] = number
        object.__setattr__(self, "stage", stage)

    @property
    def peers(self) -> int:
        return len(self.delays)

    @property
    def microbatches(self) -> int:
        """Micro-batches of a step if every origin has all its paths."""
        return len(self.stages[0]) * self.per_start * self.rounds

    def label(self, peer: int) -> str:
        """Return a peer's number, and its location if known."""
        return f"{peer} {self.places[peer]}" if self.places else str(peer)

    def capacity(self, stage: int) -> int:
        """Return the micro-batches that a stage holds at once."""
        return sum(int(self.memory[peer]) for peer in self.stages[stage])


def _check(instance: Problem) -> None:
    """Raise ProblemError for an invalid problem."""
    count = len(instance.delays)
    _need(0 < count <= MOST_PEERS, f"there are {count} peers", f"from 1 to {MOST_PEERS} can be planned for")
    shapes = (instance.delays.shape, instance.work.shape, instance.memory.shape)
    _need(shapes == ((count, count), (count,), (count,)), "delays, work and memory do not fit", "one row per peer")
    sound = np.isfinite(instance.delays).all() and (instance.delays >= 0).all()
    _need(bool(sound), "a delay is negative or no number", "delays are seconds")
    sound = np.isfinite(instance.work).all() and (instance.work > 0).all()
    _need(bool(sound), "a forward takes no time, or its time is no number", "work is seconds of one forward")
    _need(bool((instance.memory >= 1).all()), "a peer has no memory", "a peer holds one micro-batch at least")
    members = [peer for stage in instance.stages for peer in stage]
    _need(all(0 <= peer < count for peer in members), "a stage has a peer that is not there", f"there are {count}")
    _need(len(set(members)) == len(members), "a peer is in two stages", "name every peer once")
    _need(bool(instance.stages) and bool(instance.stages[0]), "stage 0 has no peers", "micro-batches begin there")
    most = len(instance.stages)
    _need(most >= 2, "there is only one stage", "a pipeline has two stages at least")
    _need(2 <= instance.length <= most, f"paths visit {instance.length} of {most} stages", f"from 2 to {most} can be")
    _need(1 <= instance.per_start <= 1024, "an origin has no path, or too many", "per_start is from 1 to 1024")
    _need(1 <= instance.rounds <= 1024, "paths are never used, or too often", "rounds is from 1 to 1024")
    _need(0 <= instance.gap < MOST_SECONDS, "the gap is negative or too long", "gap is seconds")
    swaps = instance.swaps
    _need(0 <= swaps <= MOST_BEHIND, f"a path may not have {swaps} visits behind", f"swaps is from 0 to {MOST_BEHIND}")
    _need(len(instance.places) in (0, count), "places do not fit", "one for each peer, or none")


def _need(sound: bool, message: str, hint: str) -> None:
    if not sound:
        raise ProblemError(message, hint)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """File format, with the names of the published instances; sizes, sync, rounds and gap are ours."""

    delays: list[list[float]]
    wm: float | list[float]
    memory: int | list[int]
    path_len: int
    per_start: int
    name: str = ""
    partitions: list[list[int]] = []
    sizes: list[int] = []
    sync: float = 1.0
    rounds: int = 2
    gap: float = 0.11
    locations: list[str] = []
    gcma_score: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class UnarrangedProblem:
    """Peers without stages; `sizes` of the stages; `sync`: exchange time of a fragment in boundary delays."""

    instance: Problem
    sizes: tuple[int, ...]
    sync: float


def load(data: bytes) -> Problem | UnarrangedProblem:
    """Read a problem from JSON. Raises ProblemError.

    Keys: delays, wm (seconds of a forward, one value or one for each peer), memory (likewise), path_len, per_start, and
    either partitions (peers of each stage) or sizes.
    """
    _need(len(data) <= MOST_BYTES, f"the file has {len(data)} bytes", f"{MOST_BYTES} are enough for {MOST_PEERS} peers")
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProblemError(
            f"no instance of a pipeline: {error}", "docs/guides/pipelines.md describes the file"
        ) from None
    count = len(file.delays)
    _need(all(len(row) == count for row in file.delays), "delays are not square", "one row and one column per peer")
    work = file.wm if isinstance(file.wm, list) else [file.wm] * count
    memory = file.memory if isinstance(file.memory, list) else [file.memory] * count
    _need(all(abs(slots) < 1 << 31 for slots in memory), "memory is out of range", "it is a number of micro-batches")
    longest = max([*work, *(delay for row in file.delays for delay in row)], default=0.0)
    _need(longest < MOST_SECONDS, f"{longest:g} s are too long for a delay or a forward", "delays and wm are seconds")
    _need(bool(file.partitions) != bool(file.sizes), "partitions and sizes exclude each other", "give one of them")
    _need(all(size > 0 for size in file.sizes), "a stage has no peer", "sizes are from 1 on")
    _need(sum(file.sizes) <= count, f"the stages have {sum(file.sizes)} peers", f"there are {count}")
    _need(0 <= file.sync < 1e9, "sync is no factor", "it is a number of boundary delays")
    _need(all(file.partitions), "a stage has no peer", "name one at least")
    ends = np.cumsum([0, *file.sizes]).tolist()
    stages = file.partitions or [list(range(a, b)) for a, b in zip(ends, ends[1:], strict=False)]
    instance = Problem(
        name=file.name,
        delays=np.array(file.delays, np.float64).reshape(count, count),
        stages=tuple(tuple(stage) for stage in stages),
        work=np.array(work, np.float64),
        memory=np.array(memory, np.int64),
        length=file.path_len,
        per_start=file.per_start,
        rounds=file.rounds,
        gap=file.gap,
        places=tuple(file.locations),
    )
    return UnarrangedProblem(instance, tuple(file.sizes), file.sync) if file.sizes else instance
