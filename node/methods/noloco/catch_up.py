"""Catch-up where replicas differ: the state of one peer, since no majority exists."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from thinwire.collectives.blocking_work import JobPart
from thinwire.collectives.state_sync.state_offers import Offered
from thinwire.collectives.state_sync.state_sync import FetchedState, OtherModelState
from thinwire.node.methods.noloco.progress_poll import far_ahead
from thinwire.node.outer.state_transfer.state_fetcher import StateFetcher
from thinwire.node.runtime.asyncio_extra import Work
from thinwire.node.state.replica import Replica
from thinwire.swarm.messages.registry import PeerId


class GossipCatchUp:
    """Fetch the state of one of the peers that `draw` returns. `patience`: seconds to wait for an answer."""

    newest = replays = False  # See CatchUp.

    def __init__(
        self,
        replica: Replica,
        fetcher: StateFetcher,
        *,
        draw: Callable[[], Sequence[PeerId]],
        patience: Callable[[], float],
    ) -> None:
        self.reached: int | None = None
        """Round of most peers, if it is so far ahead or behind that a state must be fetched."""
        self.foreign: OtherModelState | None = None
        """The mismatch, if the asked peers train another model."""
        self.fetcher = fetcher
        self._replica, self._draw, self._patience = replica, draw, patience
        self._offered = False

    @property
    def alone(self) -> bool:
        """True if no peer offered a state at the last attempt: the reachable peers, if any, are no swarm."""
        return not self._offered

    async def newer(self, work: Work) -> FetchedState | None:
        """Fetch the state of one peer; return None if no peer offers a suitable state.

        The signed offer of that peer vouches for every chunk. If we have a state, or most peers are ahead of us, only a later
        round will do: the state of another peer after the same round is no better than ours, and would cost our residual. If
        most peers are far behind, only such a state will do.
        """
        ours, reached, self.reached = self._replica.round, self.reached, None
        self._offered = False
        foreign: OtherModelState | None = None

        def accept(offered: Offered) -> Generator[JobPart, None, bool]:
            yield from ()
            if reached is not None and reached < ours:
                return far_ahead(ours, offered.offer.round)
            return offered.offer.round >= ours + (ours > 0 or reached is not None)

        for peer in self._draw():
            fetched = await self.fetcher.fetch([peer], work, patience=self._patience(), accept=accept)
            self._offered |= bool(self.fetcher.offers)
            if isinstance(fetched, OtherModelState):
                foreign = fetched
            elif isinstance(fetched, FetchedState):
                return fetched
        self.foreign = foreign
        return None
