"""Copy of a fragment's outer state on a peer that does not train it; for recovery and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator

from thinwire.collectives.blocking_work import JobPart
from thinwire.collectives.state_sync.state_offers import Offered, ReceivedChains, matches
from thinwire.collectives.state_sync.state_sync import FetchedState
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.node.methods.fragments.fragment_replicas import FragmentReplica
from thinwire.node.outer.state_transfer.state_fetcher import ANSWERS, StateFetcher
from thinwire.node.outer.state_transfer.state_server import QUESTIONS, StateServer
from thinwire.node.runtime.asyncio_extra import Work
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import Message, PeerId, StateAsk


class StandbyCopy:
    """State that changes only when it is fetched. chains: see StateFetcher.

    It may be older than that of the holders, so it is offered only to peers that ask for copies.
    """

    def __init__(
        self, fragment: FragmentReplica, send_queue: SendQueue, now: Callable[[], float], chains: ReceivedChains
    ) -> None:
        self.fragment = fragment
        replica, number = fragment.replica, fragment.number
        self._server = StateServer(replica, send_queue, now, entered=False, fragment=number, paced=False)
        self._fetcher = StateFetcher(replica, self._server, send_queue, now, fragment=number, chains=chains)

    @property
    def held(self) -> bool:
        """True after a successful fetch."""
        return self._server.entered

    @property
    def round(self) -> int:
        """Last round in the copy."""
        return self.fragment.replica.round

    async def fetch(self, peers: Collection[PeerId], work: Work, patience: float) -> bool:
        """Fetch the state that these peers agree on; return True if it is newer than the copy."""
        older = self.round if self.held else -1

        def accept(offered: Offered) -> Generator[JobPart, None, bool]:
            if offered.offer.round <= older:
                return False
            return matches(offered.offer, (yield from offered.received.prove(lambda fork: True)))

        fetched = await self._fetcher.fetch(peers, work, patience=patience, accept=accept)
        if not isinstance(fetched, FetchedState):
            return False
        await self._fetcher.install(work, fetched)
        self._server.resume()
        return True

    @staticmethod
    def takes(message: Message) -> bool:
        """Return True if a message is for the copy: only peers that ask for copies get it."""
        return message.copy if isinstance(message, StateAsk) else isinstance(message, (*QUESTIONS, *ANSWERS))

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        if isinstance(frame.message, ANSWERS):
            self._fetcher.on_frame(peer, frame)
        else:
            self._server.on_frame(peer, frame)

    def on_link_down(self, peer: PeerId) -> None:
        self._server.on_link_down(peer)
        self._fetcher.on_link_down(peer)

    def on_tick(self) -> None:
        self._fetcher.on_tick()
        self._server.on_tick()
