"""Whether the swarm has gone on without this peer, by whose word, and the state that it then takes over."""

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


class CatchUp:
    """A peer takes over another state than its own by the word of those who were in its last round, as long as one of them is
    here; and follows no stranger where its last round is its own to continue.

    `current` gives the round in progress, `series` is what all rounds share, and `fragment` what they are about.
    """

    def __init__(
        self,
        replica: Replica,
        states: StateServer,
        *,
        presence: Presence,
        series: RoundFactory,
        current: Callable[[], Round],
        now: Callable[[], float],
        fragment: int,
        turn: asyncio.Semaphore | None = None,
    ) -> None:
        self.behind = series.behind
        """Set when the swarm is so far ahead that the state must be fetched."""
        self.foreign: OtherModelState | None = None
        """Set when those who were asked for their state train another model."""
        self.gone: dict[PeerId, int] = {}
        """Whose processes are no more, and the round in which that was found."""
        self.progress_claims = ProgressClaims(now)
        self._replica, self._states, self._round_factory, self._current = replica, states, series, current
        self._roster, self._live, self._send_queue = presence.roster, presence.live, presence.send_queue
        self._me, self._fragment = presence.roster.record.peer_id, fragment
        self._turn = turn
        """Held while chunks of a state are fetched; sessions of other fragments share it."""
        self._committed = False
        """Whether a round was committed here in this life."""
        self._outdated = False
        """Whether others have brought our state back while we were away."""

    @property
    def alone(self) -> bool:
        """Whether nobody offered a state when one was looked for: those that are here, if any, are no swarm."""
        return not self._states.offered

    @property
    def lone(self) -> bool:
        """Whether nobody else takes part in the round in progress, or could: nothing comes of it without our contribution."""
        fly = self._current()
        over = fly.agreement.commit is not None or self.behind.is_set()
        return not over and not self._voices() and not (self._live & {*fly.agreement.ready})

    def begin(self, round: int, lost: Collection[PeerId], *, committed: bool) -> None:
        """A round begins after `round`, in which these were lost, and which was `committed` here or else is not ours."""
        self._committed |= committed
        self.gone = {peer: number for peer, number in self.gone.items() if peer in lost and number == round}
        self.behind.clear()
        self._states.forget(*self._states.without)
        self._outdated = False

    def look(self) -> None:
        """Fetch the state when the swarm has gone on without us so far that nobody helps us to follow."""
        if self.behind.is_set() or self.progress_claims.silent:
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
            # Only its results are lacking: they are not waited for for ever, and hardly where nobody has them any more.
            patience = self._round_factory.floor if fly.forsaken else 2 * patience

        def able(past: Collection[PeerId]) -> bool:
            return fly.agreement.able_without({*past, *empty})

        # Who has lost its state cannot go on from it, though it is here.
        others = [peer for peer in others if peer not in empty]
        if self.progress_claims.beyond_reach(self._replica.round, others, fly.moved, patience, able):
            self._give_way(fly)

    def outdated(self) -> bool:
        """While we were away the state was brought back by others, says who may: theirs is to be fetched. False, and nothing
        happens, where other members of our last round are here: their word is the better one.
        """
        fly = self._current()
        known = self._outdated and self.behind.is_set()
        if known or self._voices() or fly.agreement.commit is not None:
            return False
        self._outdated = True
        self._give_way(fly)
        return True

    def brought_back(self) -> None:
        """The state that comes next was made here, after all who had one were gone."""
        self._outdated = False

    async def copy(self, work: Work, below: int) -> FetchedState | None:
        """Fetch the newest copy of a state of a round before `below` that anybody keeps."""
        patience = self._round_factory.patience
        fetched = await self._states.fetch(self._live, work, patience=patience, newer_than=-1, copy_below=below)
        return fetched if isinstance(fetched, FetchedState) else None

    async def newer(self, work: Work) -> FetchedState | None:
        """Fetch the state of the last committed round from those who have it; None when nobody offers what we need.

        When somebody said that we are behind, only a later round will do.
        """
        behind, able = self.behind.is_set(), self._current().agreement.able_without
        self.behind.clear()

        def heard() -> set[PeerId]:
            """Who has lost its state has no say in which is the right one. Who only looks for it keeps its say."""
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

        voices = self._voices()
        if self._sovereign and not voices:
            return None
        fetched = await fetch(believed if voices else None)
        if fetched is None and voices and not heard() and self._me not in self._replica.members:
            fetched = await fetch(None)  # nobody is left who could say that what we have is right: we are as a newcomer
        if isinstance(fetched, OtherModelState):
            self.foreign = fetched
            return None
        return fetched

    def _voices(self) -> list[PeerId]:
        """Who is still here of the last round that we know of, ours or the one whose verdict we have: what they say counts."""
        commit = self._current().agreement.commit
        members = self._replica.members if commit is None else commit.opened.members
        return [p for p in members if p != self._me and p not in self.gone and self._roster.alive(p)]

    @property
    def _sovereign(self) -> bool:
        """Whether our last round is ours to continue: when no other member of it is left, no stranger's word replaces it.

        Not so what a checkpoint brought: the swarm may have gone on without us, and all who were there then may be gone.
        """
        return self._committed and self._me in self._replica.members and not self._outdated

    def _give_way(self, fly: Round) -> None:
        self.behind.set()
        if fly.agreement.commit is None:
            fly.agreement.overtaken()
            fly.pump()
