"""Lying daemon: `lying_process.py KIND …` runs `thinwire …` and lies once it is ready (sims/peers/lies.py)."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

from thinwire.node.cli.main import main
from thinwire.node.peer.lifecycle import PeerLifecycle
from thinwire.node.peer.peer import Peer
from thinwire.sims.peers import lies
from thinwire.sims.peers.machine import Process


class Lying:
    """Access of a lie to the process of a peer."""

    alive = True

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.others: list[asyncio.Task[None]] = []

    def _end(self, reason: str, failure: BaseException | None) -> None: ...


def lie(kind: str) -> None:
    """Let the peer of this process lie."""
    honest = PeerLifecycle._take_up

    async def take_up(self: PeerLifecycle, *arguments: Any) -> None:
        await honest(self, *arguments)
        lies.make_liar(cast(Process, Lying(self.peer)), kind)

    PeerLifecycle._take_up = take_up  # type: ignore[method-assign]


if __name__ == "__main__":
    lie(sys.argv.pop(1))
    sys.exit(main())
