"""Exchanges of a user's training loop: one round each, and its report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.node.runtime.asyncio_extra import cancelled


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Report of an exchange.

    - round: number of the last round committed here. committed: whether this exchange committed one.
    - adopted: whether the model now has the swarm's parameters. contributors: number of peers whose work is in them.
    - seconds: time for which the loop waited. missing: ids (hexadecimal) of peers that were left out, with reasons.
    - members: ids (hexadecimal) of the contributors. loss: mean loss of the steps here, finite; None: unknown.
    - bytes_up, bytes_down: bytes sent and received on this peer's links since the last report.
    - steps, weight: inner steps of this exchange, and their samples or tokens. kept: part of the weight that is not in the
      round, but still in the model and due with the next one. taken: the weight is accounted for, with or without a commit,
      and must not be given again.
    """

    round: int
    committed: bool
    adopted: bool
    contributors: int
    seconds: float
    missing: Mapping[str, str] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    loss: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    steps: int = 0
    weight: int = 0
    kept: int = 0
    taken: bool = False


class ExchangeTask:
    """Exchange that continues while the training loop trains; belongs to the thread of the peer's loop.

    `begin` starts it and `finish` waits for its end; between the two it calls `until_due` to wait for the training loop.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[RoundReport] | None = None
        self._may_train, self._due = asyncio.Event(), asyncio.Event()

    async def begin(self, exchange: Callable[[], Coroutine[Any, Any, RoundReport]]) -> RoundReport | None:
        """Return when the contribution has been read; return the report if the exchange is over already."""
        self._may_train.clear()
        self._due.clear()
        self._task = task = asyncio.create_task(exchange())
        may_train = asyncio.create_task(self._may_train.wait())
        try:
            await asyncio.wait((task, may_train), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await cancelled(task)
            raise
        finally:
            may_train.cancel()
        return await self.finish() if task.done() else None

    async def finish(self) -> RoundReport:
        """Let the exchange end, and return its report."""
        task, self._task = self._task, None
        assert task is not None, "no exchange has begun"
        self._due.set()
        return await task  # if this is cancelled, so is the exchange

    async def cancel(self) -> None:
        """Cancel the exchange, if one is in progress."""
        if self._task is not None:
            await cancelled(self._task)
            self._task = None

    def let_end(self) -> None:
        """Let an exchange end without a wait for `finish`: training does not continue meanwhile."""
        self._due.set()

    async def until_due(self) -> None:
        """Let training continue, and wait until `finish` is called."""
        self._may_train.set()
        await self._due.wait()
