"""What a newcomer does for the stage that it is to hold, when nobody here has its state: it brings it back, see `rescue`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np
from thinwire.compression.codec import Floats
from thinwire.node.chainsession import ChainedSession, ChainSession
from thinwire.swarm.protocol import Bequest
from thinwire.swarm.settings import Pipeline

from ..copies import Copy
from ..peer import Peer
from ..waiting import Work
from .holders import holders
from .rescue import Rescue, between, rescue
from .steward import Steward

NEIGHBOUR_TRIES = 3
"""Times that a neighbour's state cannot be had, and one more for each stage before ours, after which it counts as lost: of
two lost neighbours the first one begins anew, and the second can be made from it."""


class Salvage:
    """One newcomer's. Call it with a stage: True when its state is in the replica again.

    `brought` is told where it came from, and whether it was made up. `make`: an empty copy of another stage.
    """

    def __init__(
        self,
        peer: Peer,
        pipeline: Pipeline,
        steward: Steward,
        make: Callable[[int], Copy],
        work: Work,
        brought: Callable[[str, bool], None],
    ) -> None:
        self._peer, self._pipeline, self._steward, self._make, self._work = peer, pipeline, steward, make, work
        self._brought, self._tried = brought, 0

    async def __call__(self, stage: int) -> bool:
        session = self._peer.session
        assert isinstance(session, ChainedSession)
        link = session.links[stage]
        me = self._peer.identity.peer_id
        if not holders(self._peer, stage) - {me} <= set(link.states.without):
            return False  # who may have it has not said that it does not
        will = await self._steward.ask(stage, link.patience)
        if will is None or not set(will.others) - {me} <= set(link.states.without):
            return False
        own = link.replica.round
        fetched = await link.following.copy(self._work, below=will.round)
        copied = fetched.offer.round if fetched is not None else None
        newest = max(will.round - 1, own)
        choice = rescue(
            stage,
            self._pipeline.stages,
            lost=self._lost(stage),
            copy=None if copied is None else newest - copied,
            checkpoint=newest - own if own else None,
            recent=self._pipeline.recent,
        )
        theta = None
        if choice.source == "average":
            theta = await self._between(session, link, choice, will)
            if theta is None:
                self._tried += 1
                return False

        def change() -> None:
            replica = link.replica
            if fetched is not None and choice.source in ("copy", "old copy"):
                replica.install(fetched)
            elif theta is not None:
                replica.state[:] = 0
                replica.theta[:] = theta
            replica.round, replica.members = newest + 1, (me,)
            replica.seal()
            replica.reset()

        await link.change(self._work, change)
        link.brought_back()
        said = self._said(choice, copied, own)
        self._peer.emit("brought back", {"stage": stage, "round": newest + 1, "source": choice.source, "detail": said})
        self._brought(said, choice.anew)
        return True

    def _lost(self, stage: int) -> Collection[int]:
        """Stages that nobody holds, ours, and neighbours that cannot be had."""
        me = {self._peer.identity.peer_id}
        lost = {one for one in range(self._pipeline.stages) if not holders(self._peer, one) - me} | {stage}
        return lost | ({stage - 1, stage + 1} if self._tried >= NEIGHBOUR_TRIES + stage else set())

    async def _between(
        self, session: ChainedSession, link: ChainSession, choice: Rescue, will: Bequest
    ) -> Floats | None:
        """The mean of the stage's neighbours; None when they cannot be had now."""
        found = []
        for stage in choice.stages:
            kept = session.copies.get(stage)
            session.copies[stage] = copy = await self._work(partial(self._make, stage))
            try:
                if not await copy.fetch(link.live, self._work, link.patience):
                    return None
            finally:
                del session.copies[stage]
                if kept is not None:
                    session.copies[stage] = kept
            found.append((copy.chain.layout, copy.chain.replica.theta))
        before, after = found
        norms = {stage: norm for stage, norm in enumerate(will.norms) if 0 <= norm < np.inf}
        one, two = (norms.get(stage, 0.0) for stage in choice.stages)
        layout = session.replica.chains[link.fragment].layout
        theta: Floats = await self._work(lambda: between(layout, before, after, one, two))
        return theta

    def _said(self, choice: Rescue, copied: int | None, own: int) -> str:
        """Where the stage was taken from, for people."""
        told: Mapping[str, str] = {
            "copy": f"a copy of round {copied}",
            "old copy": f"an old copy of round {copied}",
            "checkpoint": f"our checkpoint of round {own}",
            "old checkpoint": f"our old checkpoint of round {own}",
            "average": f"the mean of stages {' and '.join(map(str, choice.stages))}",
            "nothing": "nothing, it begins anew",
        }
        return told[choice.source]
