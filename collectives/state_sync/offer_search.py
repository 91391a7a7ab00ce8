"""Search for the best offer of a state among the answers of many peers.

Peers offer the hashes of their state's chunks, with the chain that proves round and members of the state
(collectives/consensus/chain.py). Offers without a valid chain count as no answer. Of the others the prevailing lineage
counts, of its states the newest, and of several digests of one round the one that most members of this round offer: the
chain does not prove the content (`state_offers.best`). The same offer of more than half of the reachable members suffices;
otherwise all peers are waited for, because a peer that applies a round answers only when it has finished.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass

from thinwire.collectives.blocking_work import JobPart, in_turns
from thinwire.collectives.state_sync.state_offers import Offered, Offers
from thinwire.swarm.frame import Frame
from thinwire.swarm.messages.registry import PeerId, StateOffer

MOST_PATIENCES = 5
"""Patiences for which too few offers are waited for, and after which a source without a chunk is late."""

LAST_ROUND = 2**32 - 2
"""First round whose offers are not accepted, because the next number would not fit a message."""

StateMessage = tuple[PeerId, Offered | Frame | None]
"""A peer's offer, or another message about its state, or None if the link to the peer is lost."""

Accept = Callable[[Offered], Generator[JobPart, None, bool]]
"""Check in parts whether this peer can use a state, and its chain proves it."""

Choose = Callable[[Offers], tuple[tuple[PeerId, ...], bool]]
"""Choice of the peers with the best offer, and True if it is not necessary to wait for others."""


def accept_all(offered: Offered) -> Generator[JobPart, None, bool]:
    """Accept every offer."""
    yield from ()
    return True


@dataclass(slots=True, eq=False)
class Search:
    """Progress of a search.

    asked, answered: numbers of peers. limit: seconds after which it ends at the latest. over: no offer counts; then the
    limit is that of the wait for the next try.
    """

    limit: float
    asked: int = 0
    answered: int = 0
    over: bool = False


class OfferSearch:
    """Search among `peers`, a collection that may change meanwhile.

    receive_queue: their answers, among other messages. offers: the accepted ones. away: peers whose link was lost after they
    were asked. Their offers count, but they are not waited for, and chunks cannot be fetched from them.
    """

    def __init__(
        self,
        peers: Collection[PeerId],
        ask: Callable[[PeerId], None],
        receive_queue: asyncio.Queue[StateMessage],
        patience: float,
        accept: Accept,
        choose: Choose,
    ) -> None:
        self.offers: Offers = {}
        self.away: set[PeerId] = set()
        self.progress = Search(MOST_PATIENCES * patience)
        self._peers, self._ask, self._receive_queue, self._patience = peers, ask, receive_queue, patience
        self._accept, self._choose = accept, choose
        self._asked: set[PeerId] = set()
        self._answered: set[PeerId] = set()

    async def run(self) -> StateOffer | None:
        """Return the best offer; None if no offer counts."""
        waited = hurried = 0
        while True:
            self._ask_all()
            try:
                async with asyncio.timeout(self._patience) as timeout:
                    await self._listen(timeout)
                hurried += 1
            except TimeoutError:
                waited += 1
            chosen, sure = self._choose(self.offers)
            most = waited and 2 * len(chosen) > self._possible
            if sure or most or not self._answered or MOST_PATIENCES in (waited, hurried):
                break
            if self._answered.issuperset(self._peers):
                if len({one.offer.round for one in self.offers.values()}) <= 1:
                    break
                self.offers.clear()  # some peers had already made a step that the others were about to make
                self._answered.clear()
        return self.offers[chosen[0]].offer if chosen else None

    @property
    def _possible(self) -> int:
        """Number of peers with a state, as far as known; a few of them may never answer."""
        return len(set(self._peers).difference(self._answered.difference(self.offers)))

    def _ask_all(self) -> None:
        """Ask all peers, also again: the question may be lost with a link, and rounds continue."""
        for peer in sorted(self._peers):
            self._asked.add(peer)
            self.away.discard(peer)
            self._ask(peer)
        self._count()

    def _count(self) -> None:
        self.progress.asked, self.progress.answered = len(self._asked), len(self._answered)

    async def _listen(self, timeout: asyncio.Timeout) -> None:
        """Wait until all asked and reachable peers have answered, or until those that have are enough."""
        while not self._answered.issuperset(self._asked.intersection(self._peers) - self.away):
            if self._choose(self.offers)[1]:
                return
            peer, answer = await self._receive_queue.get()
            if answer is None:
                self.away.add(peer)
            elif peer in self._asked and (isinstance(answer, Offered) or isinstance(answer.message, StateOffer)):
                self._answered.add(peer)
                self.away.discard(peer)
                self._count()
                if isinstance(answer, Offered) and answer.offer.round < LAST_ROUND:
                    await self._check(peer, answer, timeout)

    async def _check(self, peer: PeerId, offered: Offered, timeout: asyncio.Timeout) -> None:
        """Keep an offer if it is accepted.

        The time of the check does not count in the `timeout`: it may be long, and other answers wait meanwhile.
        """
        now = asyncio.get_running_loop().time
        until, began = timeout.when() or math.inf, now()
        if await in_turns(self._accept(offered), lambda: timeout.reschedule(None)):
            self.offers[peer] = offered
        if timeout.when() != (until := until + (now() - began)):
            timeout.reschedule(until)
