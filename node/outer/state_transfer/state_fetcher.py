"""Client that fetches the state of other peers when this peer is behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

import numpy as np
from thinwire.collectives.state_sync.chunk_transfer import PartialState
from thinwire.collectives.state_sync.offer_search import MOST_PATIENCES, Accept, StateMessage
from thinwire.collectives.state_sync.state_offers import LocalState, ReceivedChains, Replay, vouched
from thinwire.collectives.state_sync.state_sync import FetchedState, OtherModelState, fetch_state
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.node.outer.state_transfer.state_progress import StateProgress
from thinwire.node.outer.state_transfer.state_server import StateServer
from thinwire.node.runtime.asyncio_extra import Work
from thinwire.node.runtime.event_log import Emit
from thinwire.node.state.replica import Replica
from thinwire.swarm.frame import Frame
from thinwire.swarm.identity.identity import short
from thinwire.swarm.messages.registry import Message, PeerId, StateAsk, StateChunk, StateOffer

ANSWERS = (StateOffer, StateChunk)
"""Types of messages to a peer that looks for a state."""


class StateFetcher:
    """Fetches a state for a replica, one attempt after the other, and installs it.

    `states` serves the state of the replica, and lets it change. A failed attempt leaves the chunks that are here to the next
    one, until `reset`.
    """

    def __init__(
        self,
        replica: Replica,
        states: StateServer,
        send_queue: SendQueue,
        now: Callable[[], float],
        *,
        fragment: int = 0,
        emit: Emit = lambda name, fields: None,
        report: Callable[[str, str], None] = lambda name, detail: None,
        chains: ReceivedChains,
    ) -> None:
        self._replica, self._states, self._send_queue, self._fragment = replica, states, send_queue, fragment
        self._emit, self._report, self._chains = emit, report, chains
        self._partial = PartialState()
        self.progress = StateProgress(now, emit)
        """Transfers of a state to this peer."""
        self._receive_queue: asyncio.Queue[StateMessage] | None = None
        self._questions: Counter[PeerId] = Counter()
        """Number of times that each peer was asked for its state and has not answered, at most MOST_PATIENCES."""
        self.offers: dict[PeerId, StateOffer] = {}
        """States that peers have offered since the last `fetch` began, proved or not."""
        self.without: set[PeerId] = set()
        """Peers that look for a state, or made an invalid offer, since the last `fetch` or round began."""

    def reset(self) -> None:
        """Drop the chunks of an unfinished transfer: the replica has changed."""
        self._partial = PartialState()

    def forget(self, *peers: PeerId) -> None:
        """Drop earlier messages of these peers that they have no state."""
        self.without.difference_update(peers)

    def on_link_down(self, peer: PeerId) -> None:
        """Ask others for the chunks that the peer owes."""
        if self._receive_queue is not None:
            self._receive_queue.put_nowait((peer, None))

    def on_frame(self, peer: PeerId, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, StateOffer):
            if not self._questions[peer]:
                return  # A check takes time, so a peer gets no more of it than we have asked for.
            self._questions[peer] -= 1
        if self._receive_queue is None:
            return
        if not isinstance(message, StateOffer):
            self._receive_queue.put_nowait((peer, frame))
            return
        offered = vouched(message, frame.payload, self._chains)
        if offered is None:
            self.without.add(peer)
        else:
            self.forget(peer)
            self.offers[peer] = message
        self._receive_queue.put_nowait((peer, offered or frame))

    def on_tick(self) -> None:
        """Report a transfer in progress."""
        self.progress.look(self._partial)

    async def fetch(
        self,
        peers: Collection[PeerId],
        work: Work,
        *,
        patience: float,
        accept: Accept,
        turn: asyncio.Semaphore | None = None,
        copy_below: int | None = None,
        reached: Callable[[StateOffer], int | None] = lambda offer: None,
    ) -> FetchedState | OtherModelState | Replay | None:
        """Fetch the state of the last round of these peers, see `fetch_state`; NaN and infinity are rejected."""
        self._receive_queue, self.offers = asyncio.Queue(), {}
        self._questions = Counter({peer: count for peer, count in self._questions.items() if peer in peers})
        self.forget(*self.without)
        try:
            fetched = await fetch_state(
                peers,
                self._send,
                self._receive_queue,
                LocalState(self._replica.layout, self._replica.state.nbytes, self._replica.hashes),
                patience=patience,
                accept=accept,
                partial=self._partial,
                fragment=self._fragment,
                turn=turn,
                copy_below=copy_below,
                reached=reached,
            )
        finally:
            self._receive_queue = None
            self.progress.look(self._partial)
        if isinstance(fetched, Replay):
            self._emit("replay", {"round": self._replica.round, "rounds": fetched.rounds, "bytes": fetched.nbytes})
        if not isinstance(fetched, FetchedState) or await work(lambda: _finite(fetched)):
            return fetched
        names = ", ".join(map(short, fetched.sources))
        self._report("alarm", f"the state of round {fetched.offer.round} that {names} offered is not finite")
        return None

    def _send(self, peer: PeerId, message: Message) -> None:
        if isinstance(message, StateAsk):
            self._questions[peer] = min(MOST_PATIENCES, self._questions[peer] + 1)
        self._send_queue.control(peer, message)

    async def install(self, work: Work, fetched: FetchedState) -> None:
        """Install a fetched state in the replica; `StateServer.resume` follows."""
        self.reset()  # it has the same chunks, whose memory is free once they are installed
        changed = await self._states.change(work, lambda: self._replica.install(fetched))
        self._emit(
            "synced",
            {
                "round": fetched.offer.round,
                "bytes": changed,
                "sources": [short(peer) for peer in fetched.sources],
                "digest": fetched.offer.digest.hex(),
            },
        )


def _finite(fetched: FetchedState) -> bool:
    return all(np.isfinite(np.frombuffer(chunk, np.float32)).all() for chunk in fetched.chunks.values())
