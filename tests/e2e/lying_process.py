"""A daemon that lies: `lying_process.py KIND …` is `thinwire …`, and lies from the moment it is ready (thinwire.sims.liars)."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

from thinwire.node.cli import main
from thinwire.node.life import Life
from thinwire.node.peer import Peer
from thinwire.sims import liars
from thinwire.sims.machine import Process


class Lying:
    """What a lie needs of a process."""

    alive = True

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.others: list[asyncio.Task[None]] = []

    def _end(self, reason: str, failure: BaseException | None) -> None:
        """A real one ends by itself."""


def lie(kind: str) -> None:
    """Let whoever lives in this process lie."""
    honest = Life._take_up

    async def take_up(self: Life, *arguments: Any) -> None:
        await honest(self, *arguments)
        liars.corrupt(cast(Process, Lying(self.peer)), kind)

    Life._take_up = take_up  # type: ignore[method-assign]


if __name__ == "__main__":
    lie(sys.argv.pop(1))
    sys.exit(main())
