"""Backup of the next stage on a neighbour, in case all of the stage's holders die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from thinwire.node.methods.fragments.standby_copy import StandbyCopy
from thinwire.node.peer.peer import Peer
from thinwire.node.pipeline.recovery.holders import holders
from thinwire.node.runtime.asyncio_extra import Work

LOOK_SECONDS = 1.0
"""Interval in seconds between two checks whether a copy is due."""

FEW = 2
"""Largest number of holders with which a stage needs a backup."""


class NeighbourBackup:
    """Backup that a peer of stage `stage` stores every `every` rounds; `make` creates an empty copy."""

    def __init__(
        self, peer: Peer, stage: int, stages: int, every: int, make: Callable[[int], StandbyCopy], work: Work
    ) -> None:
        self.stage = (stage + 1) % stages
        self.copy: StandbyCopy | None = None
        self._peer, self._own, self._every, self._make, self._work = peer, stage, every, make, work

    @property
    def held(self) -> bool:
        """True if there is a copy."""
        return self.copy is not None and self.copy.held

    async def run(self) -> None:
        """Fetch copies until cancelled."""
        peer, fragments = self._peer, self._peer.fragments
        session, last = fragments.sessions[self._own], -self._every
        self.copy = fragments.copies[self.stage] = await self._work(lambda: self._make(self.stage))
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            round = session.replica.round
            if round < last + self._every:
                continue
            found = holders(peer, self.stage) - {peer.identity.peer_id}
            reach = found & session.live
            if reach and len(found) <= FEW and await self.copy.fetch(reach, self._work, session.patience):
                last = round
