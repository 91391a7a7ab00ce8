"""Who says how a stage goes on that all its holders are gone of: a peer of a group, asked by who is to hold it.

The rule: the word is that of the first origin in the order of ids, or of the first host where no origin is left. It names one
peer at a time that brings the stage back, and the number of the round whose state that is: one that the old holders cannot
have reached, so that who of them returns finds itself behind. The others wait until that peer offers the state, or is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from thinwire.node.chainsession import ChainedSession
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import MAX_HOPS, Bequest, Bereft, Outdated, PeerId
from thinwire.swarm.seat import Seating

from ..chains import rounds_of
from ..peer import Peer
from ..presence import Handler
from .holders import holders

HEIR_SECONDS = 60.0
"""How long nobody else may bring a stage back, after the one who may has asked for the last time."""


class Steward:
    """A Handler of Presence in front of `inner`, which drives a group or works in one. `norms`: by stage, of its last gradient.

    `outdated` is called when our origin says that another has brought back what we hold: with the stage.
    """

    def __init__(self, peer: Peer, inner: Handler, norms: Callable[[], Mapping[int, float]] = dict) -> None:
        self.outdated: Callable[[PeerId, int], None] = lambda origin, stage: None
        self._peer, self._inner, self._norms = peer, inner, norms
        self._heirs: dict[int, tuple[PeerId, float]] = {}
        self._rounds: dict[int, int] = {}
        self._asked: dict[PeerId, asyncio.Future[Bequest]] = {}

    # --- as in Handler

    def routed(self, peer: PeerId, frame: Frame) -> None:
        """See Handler."""
        message = frame.message
        if isinstance(message, Bereft):
            found = self.decide(peer, message.stage)
            if found is not None:
                self._peer.presence.outbox.control(peer, found)
        elif isinstance(message, Bequest):
            waits = self._asked.get(peer)
            if waits is not None and not waits.done():
                waits.set_result(message)
        elif isinstance(message, Outdated):
            self.outdated(peer, message.stage)
        else:
            self._inner.routed(peer, frame)

    def lost(self, peer: PeerId, *, gone: bool) -> None:
        """See Handler."""
        self._inner.lost(peer, gone=gone)

    def reached(self, peer: PeerId) -> None:
        """See Handler."""
        self._inner.reached(peer)

    def ticked(self) -> None:
        """See Handler."""
        self._inner.ticked()

    # --- stages that are lost

    def decide(self, heir: PeerId, stage: int) -> Bequest | None:
        """Whether `heir` may bring back a stage, and as which round. Not where another is at it, or we are no judge."""
        peer, session = self._peer, self._peer.session if self._peer.ready else None
        if not isinstance(session, ChainedSession) or not 0 <= stage < session.replica.count:
            return None
        if stage in session.links or not all(link.states.entered for link in session.links.values()):
            return None
        if heir not in holders(peer, stage):
            return None
        now, count = peer.doors.now(), session.replica.count
        before, since = self._heirs.get(stage, (heir, now))
        if before != heir and before in holders(peer, stage) and now < since + HEIR_SECONDS:
            return None
        self._heirs[stage] = heir, now
        # Nobody has more rounds of a fragment behind it than there have been turns of that; some may be a little ahead of us.
        rounds = rounds_of(stage, peer.rounds.turn + count, count) + 1
        self._rounds[stage] = max(rounds, self._rounds.get(stage, 0) + (before != heir))
        norms = self._norms()
        others = sorted(holders(peer, stage) - {heir})[:MAX_HOPS]
        told = tuple(norms.get(one, 0.0) for one in range(count))
        return Bequest(stage, self._rounds[stage], told, tuple(others))

    async def ask(self, stage: int, patience: float) -> Bequest | None:
        """The word on a stage that is lost, of whoever has it; None where nobody gives it in time, or it is for another."""
        judge = judge_of(self._peer.seats(), stage, self._peer.identity.peer_id)
        if judge is None:
            return None
        self._asked[judge] = answer = asyncio.get_running_loop().create_future()
        self._peer.presence.outbox.control(judge, Bereft(stage))
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    found = await answer
                    return found if found.stage == stage else None
            return None
        finally:
            del self._asked[judge]


def judge_of(seats: Seating, stage: int, me: PeerId) -> PeerId | None:
    """Whose word counts on a stage that is lost: the first origin's, or the first host's of another stage."""
    origins = [origin for origin in seats.groups if origin != me] if stage else []
    hosts = [
        peer
        for held in (*seats.groups.values(), seats.orphans)
        for number, peers in held.items()
        for peer in peers
        if number != stage
    ]
    return min(origins or hosts, default=None)
