"""Small thread pool for kernels that release the GIL. Results must not depend on its size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class Team:
    """Pool of `threads` threads for the duration of a `with` block; one thread means the caller itself."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"at least one thread, not {threads}")
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def each(self, function: Callable[..., T], jobs: Iterable[tuple[object, ...]]) -> list[T]:
        """Return function(*job) for each job, in order.

        The first exception of a job is raised when its turn in the results comes. Must not be called from within a job,
        which would deadlock.
        """
        jobs = list(jobs)
        if self._pool is None or len(jobs) < 2:
            return [function(*job) for job in jobs]
        return list(self._pool.map(lambda job: function(*job), jobs))

    def spread(
        self, work: Callable[..., T], jobs: Sequence[tuple[object, ...]], sizes: Sequence[int], big: int
    ) -> list[T]:
        """Return work(*job, team) for each job, in the order of the jobs.

        A job of size `big` or more that is also a large part of the total uses this whole team. Every other job runs on
        one thread with a team of one, the largest jobs first.
        """
        alone, bound = Team(1), max(big, sum(sizes) // (2 * self.threads))
        shared = [i for i, size in enumerate(sizes) if size >= bound and self.threads > 1]
        done = {i: work(*jobs[i], self) for i in shared}
        rest = sorted((i for i in range(len(jobs)) if i not in done), key=lambda i: -sizes[i])
        done |= zip(rest, self.each(work, [(*jobs[i], alone) for i in rest]), strict=True)
        return [done[i] for i in range(len(jobs))]

    def ranges(self, count: int, least: int, align: int = 1) -> list[tuple[int, int]]:
        """Split [0, count) into ranges [start, stop) for the threads.

        A range has `least` or more elements; cuts are at multiples of `align`.
        """
        pieces = max(1, min(self.threads, count // least))
        cuts = [count * i // pieces // align * align for i in range(pieces)] + [count]
        return list(zip(cuts, cuts[1:], strict=False))

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()
