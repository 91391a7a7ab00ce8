"""Arbiter of lost stages: decides how to recover a stage after all of its holders have died.

Runs on one peer of each group; the peer that takes the stage over asks it. The arbiter of the swarm is the first origin
in the order of ids, or the first host if no origin is left. It permits one peer at a time to recover the stage, and
names the round of the recovered state: a round that the old holders cannot have reached, so that a returning holder
finds that it is behind. The others wait until that peer offers the state or departs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from thinwire.node.membership.handler import Handler
from thinwire.node.methods.fragments.fragment_replicas import rounds_of
from thinwire.node.peer.peer import Peer
from thinwire.node.pipeline.recovery.holders import holders
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.stage_claim import Seating
from thinwire.swarm.messages.registry import MAX_HOPS, Outdated, PeerId, RecoveryPermit, RecoveryRequest

PERMIT_SECONDS = 60.0
"""Seconds after the last question of the permitted peer before another peer may recover the stage."""


class RecoveryArbiter(Handler):
    """Handler of messages about lost stages.

    `norms`: returns the norm of the last gradient by stage. `outdated`: called with origin and stage when the origin reports
    that another peer has recovered the stage that we hold.
    """

    def __init__(
        self,
        peer: Peer,
        norms: Callable[[], Mapping[int, float]] = dict,
        outdated: Callable[[PeerId, int], None] = lambda origin, stage: None,
    ) -> None:
        self._peer, self._norms, self._outdated = peer, norms, outdated
        self._permitted: dict[int, tuple[PeerId, float]] = {}
        self._rounds: dict[int, int] = {}
        self._asked: dict[PeerId, asyncio.Future[RecoveryPermit]] = {}

    # Handler

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        """Handle questions and answers about lost stages."""
        message = frame.message
        if isinstance(message, RecoveryRequest):
            found = self.decide(peer, message.stage)
            if found is not None:
                self._peer.presence.send_queue.control(peer, found)
        elif isinstance(message, RecoveryPermit):
            waits = self._asked.get(peer)
            if waits is not None and not waits.done():
                waits.set_result(message)
        elif isinstance(message, Outdated):
            self._outdated(peer, message.stage)

    # Lost stages

    def decide(self, candidate: PeerId, stage: int) -> RecoveryPermit | None:
        """Return permission for `candidate` to recover a stage, with the round; else None.

        None means that another peer is recovering it, or that this peer is not the arbiter.
        """
        peer, fragments = self._peer, self._peer.fragments if self._peer.ready else None
        if fragments is None or not 0 <= stage < fragments.replica.count:
            return None
        if stage in fragments.sessions or not all(session.states.entered for session in fragments.sessions.values()):
            return None
        if candidate not in holders(peer, stage):
            return None
        now, count = peer.environment.now(), fragments.replica.count
        before, since = self._permitted.get(stage, (candidate, now))
        if before != candidate and before in holders(peer, stage) and now < since + PERMIT_SECONDS:
            return None
        self._permitted[stage] = candidate, now
        # No peer has completed more rounds of a fragment than the fragment had turns; some peers may be slightly ahead
        # of us.
        rounds = rounds_of(stage, peer.rounds.turn + count, count) + 1
        self._rounds[stage] = max(rounds, self._rounds.get(stage, 0) + (before != candidate))
        norms = self._norms()
        others = sorted(holders(peer, stage) - {candidate})[:MAX_HOPS]
        known = tuple(norms.get(one, 0.0) for one in range(count))
        return RecoveryPermit(stage, self._rounds[stage], known, tuple(others))

    async def ask(self, stage: int, patience: float) -> RecoveryPermit | None:
        """Ask the arbiter for permission to recover a lost stage; None without an answer in time.

        None, too, if another peer has permission.
        """
        arbiter = arbiter_of(self._peer.seats(), stage, self._peer.identity.peer_id)
        if arbiter is None:
            return None
        self._asked[arbiter] = answer = asyncio.get_running_loop().create_future()
        self._peer.presence.send_queue.control(arbiter, RecoveryRequest(stage))
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    found = await answer
                    return found if found.stage == stage else None
            return None
        finally:
            del self._asked[arbiter]


def arbiter_of(seats: Seating, stage: int, me: PeerId) -> PeerId | None:
    """Return the arbiter of a lost stage: the first origin, or else the first host of another stage."""
    origins = [origin for origin in seats.groups if origin != me] if stage else []
    hosts = [
        peer
        for held in (*seats.groups.values(), seats.orphans)
        for number, peers in held.items()
        for peer in peers
        if number != stage
    ]
    return min(origins or hosts, default=None)
