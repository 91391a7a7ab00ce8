"""Recovery of a lost stage by the joiner that is to hold it, from the source that `rescue` chooses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial

import numpy as np
from thinwire.compression.core.types import Floats
from thinwire.node.methods.fragments.fragment_sessions import FragmentSessions
from thinwire.node.methods.fragments.standby_copy import StandbyCopy
from thinwire.node.outer.round_session import RoundSession
from thinwire.node.peer.peer import Peer
from thinwire.node.pipeline.recovery.checkfree import between
from thinwire.node.pipeline.recovery.holders import holders
from thinwire.node.pipeline.recovery.recovery_arbiter import RecoveryArbiter
from thinwire.node.pipeline.recovery.stage_source import StageSource, rescue
from thinwire.node.runtime.asyncio_extra import Work
from thinwire.swarm.manifest.tables import Pipeline
from thinwire.swarm.messages.registry import RecoveryPermit

NEIGHBOUR_TRIES = 3
"""Failed fetches (plus one for each stage before ours) after which a neighbour counts as lost.

Of two lost neighbours the first one restarts, and the second is made from it.
"""


class StageRecovery:
    """Recovery by one joiner; a call returns True when the stage's state is in the replica again.

    `recovered`: called with the source of the state, and whether it was reconstructed. `make`: creates an empty copy of
    another stage.
    """

    def __init__(
        self,
        peer: Peer,
        pipeline: Pipeline,
        arbiter: RecoveryArbiter,
        make: Callable[[int], StandbyCopy],
        work: Work,
        recovered: Callable[[str, bool], None],
    ) -> None:
        self._peer, self._pipeline, self._arbiter, self._make, self._work = peer, pipeline, arbiter, make, work
        self._recovered, self._tried = recovered, 0

    async def __call__(self, stage: int) -> bool:
        fragments = self._peer.fragments
        session = fragments.sessions[stage]
        me = self._peer.identity.peer_id
        if not holders(self._peer, stage) - {me} <= set(session.catch_up.fetcher.without):
            return False  # A possible holder has not yet answered that it has no state.
        permit = await self._arbiter.ask(stage, session.patience)
        if permit is None or not set(permit.others) - {me} <= set(session.catch_up.fetcher.without):
            return False
        own = session.replica.round
        fetched = await session.catch_up.copy(self._work, below=permit.round)
        copied = fetched.offer.round if fetched is not None else None
        newest = max(permit.round - 1, own)
        choice = rescue(
            stage,
            self._pipeline.stages,
            lost=self._lost(stage),
            copy=None if copied is None else newest - copied,
            checkpoint=newest - own if own else None,
            recent=self._pipeline.backup_max_age,
        )
        theta = None
        if choice.source == "average":
            theta = await self._between(fragments, session, choice, permit)
            if theta is None:
                self._tried += 1
                return False

        def change() -> None:
            replica = session.replica
            if fetched is not None and choice.source in ("copy", "old copy"):
                replica.install(fetched)
            elif theta is not None:
                replica.state[:] = 0
                replica.theta[:] = theta
            replica.round = newest + 1
            replica.seal()
            replica.reset()

        await session.continue_alone(self._work, change)
        detail = self._describe(choice, copied, own)
        self._peer.emit(
            "stage_restored", {"stage": stage, "round": newest + 1, "source": choice.source, "detail": detail}
        )
        self._recovered(detail, choice.reconstructed)
        return True

    def _lost(self, stage: int) -> Collection[int]:
        """Return the stages without a holder: ours, and neighbours that cannot be fetched."""
        me = {self._peer.identity.peer_id}
        lost = {one for one in range(self._pipeline.stages) if not holders(self._peer, one) - me} | {stage}
        return lost | ({stage - 1, stage + 1} if self._tried >= NEIGHBOUR_TRIES + stage else set())

    async def _between(
        self, fragments: FragmentSessions, session: RoundSession, choice: StageSource, permit: RecoveryPermit
    ) -> Floats | None:
        """Return the mean of the stage's neighbours; None if they cannot be fetched now, or have no mean."""
        found = []
        for stage in choice.stages:
            own_copy = fragments.copies.get(stage)
            fragments.copies[stage] = copy = await self._work(partial(self._make, stage))
            try:
                if not await copy.fetch(session.live, self._work, session.patience):
                    return None
            finally:
                del fragments.copies[stage]
                if own_copy is not None:
                    fragments.copies[stage] = own_copy
            found.append((copy.fragment.layout, copy.fragment.replica.theta))
        before, after = found
        norms = {stage: norm for stage, norm in enumerate(permit.norms) if 0 <= norm < np.inf}
        one, two = (norms.get(stage, 0.0) for stage in choice.stages)
        layout = fragments.replica.fragments[session.fragment].layout
        with suppress(ValueError):  # a neighbour has no layers, or those of another form
            theta: Floats = await self._work(lambda: between(layout, before, after, one, two))
            return theta
        return None

    def _describe(self, choice: StageSource, copied: int | None, own: int) -> str:
        """Describe the source of the stage, for people."""
        texts: Mapping[str, str] = {
            "copy": f"a copy of round {copied}",
            "old copy": f"an old copy of round {copied}",
            "checkpoint": f"our checkpoint of round {own}",
            "old checkpoint": f"our old checkpoint of round {own}",
            "average": f"the mean of stages {' and '.join(map(str, choice.stages))}",
            "nothing": "nothing: it restarts from its first values",
        }
        return texts[choice.source]
