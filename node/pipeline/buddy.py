"""A copy of the stage after one's own, kept for the day when all who hold that one are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from thinwire.node.chainsession import ChainedSession

from ..copies import Copy
from ..peer import Peer
from ..waiting import Work
from .holders import holders

LOOK_SECONDS = 1.0
"""How often it is looked whether a copy is due."""

FEW = 2
"""A stage that more peers hold needs no copy."""


class Buddy:
    """One peer's. `stage`: its own; `every`: rounds of that after which a new copy is fetched; `make`: an empty copy."""

    def __init__(
        self, peer: Peer, stage: int, stages: int, every: int, make: Callable[[int], Copy], work: Work
    ) -> None:
        self.stage = (stage + 1) % stages
        self.copy: Copy | None = None
        self._peer, self._own, self._every, self._make, self._work = peer, stage, every, make, work

    @property
    def held(self) -> bool:
        """Whether there is a copy."""
        return self.copy is not None and self.copy.held

    async def run(self) -> None:
        """For as long as this peer is there."""
        peer, session = self._peer, self._peer.session
        assert isinstance(session, ChainedSession)
        link, last = session.links[self._own], -self._every
        self.copy = session.copies[self.stage] = await self._work(lambda: self._make(self.stage))
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            round = link.replica.round
            if round < last + self._every:
                continue
            found = holders(peer, self.stage) - {peer.identity.peer_id}
            reach = found & link.live
            if reach and len(found) <= FEW and await self.copy.fetch(reach, self._work, link.patience):
                last = round
