"""A few threads for kernels that release the GIL. What they compute must not depend on their number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class Team:
    """`threads` threads for as long as the `with` block lasts; of one thread, the caller itself."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"at least one thread, not {threads}")
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def each(self, function: Callable[..., T], jobs: Iterable[tuple[object, ...]]) -> list[T]:
        """function(*job) for each job, in order. The first exception of a job is raised when it is its turn. Not to be called
        from within a job, which would wait for itself.
        """
        jobs = list(jobs)
        if self._pool is None or len(jobs) < 2:
            return [function(*job) for job in jobs]
        return list(self._pool.map(lambda job: function(*job), jobs))

    def spread(
        self, work: Callable[..., T], jobs: Sequence[tuple[object, ...]], sizes: Sequence[int], big: int
    ) -> list[T]:
        """work(*job, team) for each job, results in order of the jobs. A job of size `big` or more that is a large part of the
        whole has this team to share it; all others are done by one thread each, with a team of one, large ones first.
        """
        alone, bound = Team(1), max(big, sum(sizes) // (2 * self.threads))
        shared = [i for i, size in enumerate(sizes) if size >= bound and self.threads > 1]
        done = {i: work(*jobs[i], self) for i in shared}
        rest = sorted((i for i in range(len(jobs)) if i not in done), key=lambda i: -sizes[i])
        done |= zip(rest, self.each(work, [(*jobs[i], alone) for i in rest]), strict=True)
        return [done[i] for i in range(len(jobs))]

    def ranges(self, count: int, least: int, align: int = 1) -> list[tuple[int, int]]:
        """[0, count) in ranges [start, stop) for the threads, of `least` or more each, cut at multiples of `align`."""
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
