"""The outer state of a fragment that is not trained here: a copy for the day when all who hold it are gone, or to look at."""

from __future__ import annotations

from collections.abc import Callable, Collection

from thinwire.collectives.state_sync import FetchedState
from thinwire.collectives.transport.send_queue import SendQueue
from thinwire.node.methods.concurrent.fragment_replicas import FragmentReplica
from thinwire.node.outer.state_server import StateServer
from thinwire.node.runtime.asyncio_extra import Work
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import PeerId


class StandbyCopy:
    """A state that moves only when it is fetched anew. Who asks for a copy gets it as any state. Who asks for the state does
    not: what is older than what holders have must not speak beside them.
    """

    def __init__(self, chain: FragmentReplica, send_queue: SendQueue, now: Callable[[], float]) -> None:
        self.chain = chain
        self._server = StateServer(chain.replica, send_queue, now, entered=False, fragment=chain.number)

    @property
    def held(self) -> bool:
        """Whether there is one."""
        return self._server.entered

    @property
    def round(self) -> int:
        """The last one in it."""
        return self.chain.replica.round

    async def fetch(self, peers: Collection[PeerId], work: Work, patience: float) -> bool:
        """Take over the state of these peers where they agree on one that is newer; whether they did."""
        older = self.round if self.held else -1
        fetched = await self._server.fetch(peers, work, patience=patience, newer_than=older)
        if not isinstance(fetched, FetchedState):
            return False
        await self._server.install(work, fetched)
        self._server.resume()
        return True

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        """A frame about the state."""
        self._server.on_frame(peer, frame)

    def on_link_down(self, peer: PeerId) -> None:
        """The link to a peer broke."""
        self._server.on_link_down(peer)

    def on_tick(self) -> None:
        """Time passes."""
        self._server.on_tick()
