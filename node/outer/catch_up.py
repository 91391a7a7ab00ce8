"""Catch-up: finds out whether the swarm has left this peer behind, and fetches the newer state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from thinwire.collectives.rounds.round import Round
from thinwire.collectives.rounds.round_factory import RoundFactory
from thinwire.collectives.state_sync import Believed, FetchedState, OtherModelState
from thinwire.node.membership.presence import Presence
from thinwire.node.outer.progress_claims import ProgressClaims
from thinwire.node.outer.state_server import StateServer
from thinwire.node.runtime.asyncio_extra import Work
from thinwire.node.state.replica import Replica
from thinwire.swarm.messages.registry import Ask, PeerId, StateAsk

TRIES = 3
"""Failed fetches after which the peers of a prevailing lineage count as serving no state."""


class CatchUp:
    """Decision of a peer to replace its state by a fetched one.

    It believes the members of its last round, as long as one of them is here. If it may continue its last round itself,
    it follows no other peer. `current` returns the round in progress; `series` makes the rounds of `fragment`.
    `prevailing` returns the peers of a lineage that prevails over ours, if there is one; `drop` forgets their lineage.
    """

    def __init__(
        self,
        replica: Replica,
        states: StateServer,
        *,
        presence: Presence,
        series: RoundFactory,
        current: Callable[[], Round],
        prevailing: Callable[[], Collection[PeerId]] = tuple,
        drop: Callable[[Collection[PeerId]], None] = lambda peers: None,
        now: Callable[[], float],
        fragment: int,
        turn: asyncio.Semaphore | None = None,
    ) -> None:
        self.behind = series.behind
        """Set when the swarm is so far ahead that the state must be fetched."""
        self.foreign: OtherModelState | None = None
        """The mismatch, if the asked peers train another model."""
        self.gone: set[PeerId] = set()
        """Peers that have left, or refuse connections; they are not waited for."""
        self.progress_claims = ProgressClaims(now)
        self._replica, self._states, self._round_factory, self._current = replica, states, series, current
        self._roster, self._live, self._send_queue = presence.roster, presence.live, presence.send_queue
        self._me, self._fragment = presence.roster.record.peer_id, fragment
        self._prevailing, self._drop, self._failed = prevailing, drop, 0
        self._turn = turn
        """Held while chunks of a state are fetched; sessions of other fragments share it."""
        self._committed = False
        """True if this process has committed a round."""
        self._outdated = False
        """True if other peers have recovered the state while this peer was away."""

    @property
    def alone(self) -> bool:
        """True if no peer offered a state at the last attempt: the reachable peers, if any, are no swarm."""
        return not self._states.offered

    @property
    def lone(self) -> bool:
        """True if no other peer takes part in the round in progress: it needs our contribution."""
        fly = self._current()
        over = fly.agreement.commit is not None or self.behind.is_set()
        return not over and not self._voices() and not (self._live & {*fly.agreement.ready})

    def begin(self, *, committed: bool) -> None:
        """Begin a round. `committed`: the one before it was committed here."""
        self._committed |= committed
        self.behind.clear()
        self._states.forget(*self._states.without)
        self._outdated = False

    def look(self) -> None:
        """Give up the round and set `behind` when the swarm is so far ahead that no peer helps us to follow."""
        if self.behind.is_set():
            return
        if self._prevailing():
            self._give_way(self._current())
        if self.progress_claims.silent:
            return
        fly, others = self._current(), self._voices()
        if not others and self._sovereign:
            return
        others = others or sorted(self._live)
        patience, further = self._round_factory.patience, self.progress_claims.further(self._replica.round)
        empty = self._states.empty - further
        if self.progress_claims.inquire(self._replica.round, others, fly.moved, patience):
            for peer in others:
                self._send_queue.control(peer, Ask(fly.round, self._fragment))
                if peer not in further | empty:
                    self._send_queue.control(peer, StateAsk(self._fragment))
        if fly.agreement.commit is not None:
            # Only its results are missing. The wait for them is limited, and short if no peer has them any more.
            patience = self._round_factory.floor if fly.forsaken else 2 * patience

        def able(past: Collection[PeerId]) -> bool:
            return fly.agreement.able_without({*past, *empty})

        # A peer that has lost its state cannot continue, although it is here.
        others = [peer for peer in others if peer not in empty]
        if self.progress_claims.beyond_reach(self._replica.round, others, fly.moved, patience, able):
            self._give_way(fly)

    def outdated(self) -> bool:
        """Note that other peers have recovered the state, which is to be fetched; return True.

        Return False, without effect, if members of our last round are here: these decide.
        """
        fly = self._current()
        known = self._outdated and self.behind.is_set()
        if known or self._voices() or fly.agreement.commit is not None:
            return False
        self._outdated = True
        self._give_way(fly)
        return True

    def brought_back(self) -> None:
        """Note that the next state is made here, after all of its holders were gone."""
        self._outdated = False

    async def copy(self, work: Work, below: int) -> FetchedState | None:
        """Fetch the newest available copy of a state of a round before `below`."""
        patience = self._round_factory.patience
        fetched = await self._states.fetch(self._live, work, patience=patience, newer_than=-1, copy_below=below)
        return fetched if isinstance(fetched, FetchedState) else None

    async def newer(self, work: Work) -> FetchedState | None:
        """Fetch the state of the last committed round; return None if no peer offers a suitable one.

        If a peer has claimed that we are behind, only a later round will do.
        """
        behind, able = self.behind.is_set(), self._current().agreement.able_without
        self.behind.clear()

        def heard() -> set[PeerId]:
            """Members with a say: those that have lost their state have none."""
            return set(self._voices()) - self._states.empty

        def believed(those: Collection[PeerId]) -> bool:
            return 2 * len(heard().intersection(those)) > len(heard()) or (behind and not able(those))

        async def fetch(believed: Believed | None) -> FetchedState | OtherModelState | None:
            return await self._states.fetch(
                self._live,
                work,
                patience=self._round_factory.patience,
                newer_than=self._replica.round - (not behind),
                believed=believed,
                turn=self._turn,
            )

        if prevailing := self._live.intersection(self._prevailing()):
            fetched = await self._states.fetch(
                prevailing,
                work,
                patience=self._round_factory.patience,
                newer_than=-1,
                # Their rounds continue meanwhile, so not all offer the same state.
                believed=lambda those: len(prevailing.intersection(those)) >= min(2, len(prevailing)),
                turn=self._turn,
            )
            self._failed = 0 if isinstance(fetched, FetchedState) else self._failed + 1
            if self._failed >= TRIES:
                self._failed = 0
                self._drop(prevailing)
            return fetched if isinstance(fetched, FetchedState) else None
        voices = self._voices()
        if self._sovereign and not voices:
            return None
        fetched = await fetch(believed if voices else None)
        if fetched is None and voices and not heard() and self._me not in self._replica.members:
            fetched = await fetch(None)  # no peer is left to confirm our state: enter as a newcomer
        if isinstance(fetched, OtherModelState):
            self.foreign = fetched
            return None
        return fetched

    def _voices(self) -> list[PeerId]:
        """Live members of the last round that we know, ours or the one whose commit we have."""
        commit = self._current().agreement.commit
        members = self._replica.members if commit is None else commit.opened.members
        return [p for p in members if p != self._me and p not in self.gone and self._roster.alive(p)]

    @property
    def _sovereign(self) -> bool:
        """True if this peer may continue its last round without the other members.

        This does not hold for a state from a checkpoint: the swarm may have continued without us.
        """
        return self._committed and self._me in self._replica.members and not self._outdated

    def _give_way(self, fly: Round) -> None:
        self.behind.set()
        if fly.agreement.commit is None:
            fly.agreement.overtaken()
            fly.pump()
