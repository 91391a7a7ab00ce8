"""Creates the rounds of one peer, one after the other, and adapts the patience to their durations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import blake3
import numpy as np
from thinwire.collectives.consensus.certificates import certificate
from thinwire.collectives.consensus.members.peer_standing import PeerStanding
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.members.vote_store import VoteStore
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.data_plane_factory import DataPlaneFactory
from thinwire.collectives.rounds.data_planes.data_plane import DataPlane, ignore
from thinwire.collectives.rounds.data_planes.ring import Ring
from thinwire.collectives.rounds.round import UNKNOWN_LINKS, LinkReport, Round
from thinwire.collectives.timing import TICK, Patience
from thinwire.collectives.topology.peer_backoff import Backoff, PeerBackoff
from thinwire.collectives.topology.placement import Rate, Trip
from thinwire.collectives.topology.ring_order import best
from thinwire.collectives.topology.shards import Grid
from thinwire.collectives.transport.pending_frames import PendingFrames
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.messages.registry import Digest, Message, PeerId
from thinwire.swarm.rendezvous_hash import leader_order, rank

MAX_PENDING = 1024
"""Control frames stored for the next round."""

MAX_PENDING_EACH = 16
"""Of these, most per peer: as many as a peer sends in a bad round."""


def round_of(message: Message) -> int:
    """Return the number of the round that a message is about, 0 if none."""
    number: int = getattr(message, "round", 0)
    return number


def fragment_of(message: Message) -> int:
    """Return the number of the fragment that a message is about, -1 if none."""
    number: int = getattr(message, "fragment", -1)
    return number


class RoundFactory:
    """Creates rounds with common settings, whose data planes `planes` makes.

    - `live`: peers with a link, maintained by the caller.
    - `patience`: seconds without progress before a peer acts. It adapts to the duration of rounds, but never falls below
      the given value.
    - `on_phase`: see Round.
    - `pending_frames`: frames for next rounds, if other factories of this peer share them.
    - `peer_backoff`: pauses of peers, if an audit of owners adds to them.
    """

    def __init__(
        self,
        keyring: Keyring,
        planes: DataPlaneFactory,
        *,
        live: Collection[PeerId],
        patience: float,
        links: LinkReport = UNKNOWN_LINKS,
        standing: PeerStanding | None = None,
        on_phase: Callable[[int, str], object] = ignore,
        pending_frames: PendingFrames | None = None,
        peer_backoff: PeerBackoff | None = None,
    ) -> None:
        self.floor, self._patience = patience, Patience(patience)
        self.behind = asyncio.Event()
        """Set when the others are so far ahead that we cannot follow."""
        self.pending_frames = PendingFrames(MAX_PENDING, MAX_PENDING_EACH) if pending_frames is None else pending_frames
        """Frames of the next round."""
        self.keyring, self.planes, self.links, self.standing = keyring, planes, links, standing or PeerStanding()
        self._live, self._on_phase = live, on_phase
        self._last: Callable[[], DataPlane | None] = lambda: None  # others decide how long its results stay in memory
        self.peer_backoff = PeerBackoff() if peer_backoff is None else peer_backoff
        self._ring_backoff = Backoff()

    def begin(
        self,
        terms: RoundTerms,
        grid: Grid,
        *,
        store: VoteStore | None = None,
        attempt: int = 0,
        turn: int = 0,
    ) -> Round:
        """Create a round; this fills in the order of the members and the patience of `terms`.

        `terms.members` come by seniority. `store`: memory of our votes. `turn`: see DataPlaneFactory.make.
        """
        number = (terms.fragment << 48) + terms.round  # so that fragments do not all have the same backups
        seed = blake3.blake3(self.keyring.run_id + number.to_bytes(8, "big")).digest()
        spec = self.planes.spec
        order = leader_order(seed, terms.members, terms.round, terms.fragment)
        self.keyring.forget()
        agreement = Agreement(
            self.keyring,
            replace(
                terms,
                members=order,
                seniors=terms.members,
                patience=self.patience,
                chunks=len(grid) if spec.sized else 0,
                relays=spec.relays,
                sited=spec.topology == "hierarchy",
                ring=partial(self._ring, seed, terms.round) if spec.topology == "ring" else None,
            ),
            live=self._live,
            idle={*self.peer_backoff.resting(terms.round), *self.standing.slow_peers()},
            barred=self.peer_backoff.barred(terms.round),
            hasty=self.peer_backoff.hasty(terms.round),
            store=store,
            standing=self.standing,
        )
        data_plane = self.planes.make(agreement, grid, seed=seed, turn=turn)
        current = Round(
            data_plane,
            self.keyring,
            attempt=attempt,
            links=self.links,
            standing=self.standing,
            on_phase=self._on_phase,
        )
        if (last := self._last()) is not None:
            last.halt()  # an abandoned round must not vote any more
        self._last = ref(data_plane)
        return current

    @property
    def patience(self) -> float:
        """Seconds without progress before this peer acts."""
        return self._patience.seconds

    async def outcome(self, current: Round, *, give_up: float | None = None) -> Outcome:
        """Return the Outcome of a round; without a commit if it is given up, or if we are behind.

        `give_up`: seconds after which it is, unless its data is arriving; at once if the round is `fruitless`.
        """
        began = self.planes.now()
        behind = asyncio.ensure_future(self.behind.wait())
        wait = asyncio.ensure_future(current.wait())
        try:
            await self.until_given_up(current, (wait, behind), give_up)
            outcome = wait.result() if wait.done() else Outcome(diverged=behind.done())
        finally:
            wait.cancel()
            behind.cancel()
        if outcome.commit is not None:
            proof = certificate(outcome.commit, current.agreement.terms, self.keyring.key_of, self.keyring.verify)
            outcome = replace(outcome, certificate=proof)
        if outcome.commit is not None and not current.booked:
            current.booked = True  # callers that follow rounds ask again for the outcome of the next one
            withheld = current.data_plane.withheld & set(self._live)  # a broken link shows nothing
            led = current.agreement.acceptor.heeded
            self.peer_backoff.record(outcome.commit.proposal, current.data_plane.failed, withheld, led)
            self._record_ring(current)
            if current.opened_at is not None:
                took = self.planes.now() - max(began, current.opened_at)
                self._patience.observe(current.data_plane.progress.duration_without_late_peers(took))
        return outcome

    async def until_given_up(
        self, current: Round, futures: Collection[asyncio.Future[Any]], give_up: float | None
    ) -> None:
        """Wait for the first of the futures, or until a peer gives the round up, see `outcome`."""
        began, left = self.planes.now(), give_up
        while left is None or left > 0:
            # Others may announce that they contribute nothing, too, and nothing else ends the wait then.
            looks = current.gives_nothing and give_up is not None
            seconds = TICK if looks else None if left is None else max(TICK, left)
            done, _ = await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if done or give_up is None or self.fruitless(current):
                return
            left = current.given_up_at(began, give_up) - self.planes.now()

    def fruitless(self, current: Round) -> bool:
        """Return True if the round has no contribution, and none is expected.

        This peer has announced no data, and all other peers here that they contribute nothing.
        """
        ready = current.agreement.ready
        return current.gives_nothing and all(peer in ready and not ready[peer].weight for peer in self._live)

    def _ring(self, seed: Digest, round: int, peers: Sequence[PeerId], rate: Rate, trip: Trip) -> tuple[PeerId, ...]:
        """Return the order of a ring for a ballot that we open; empty while rings are suspended."""
        if round <= self._ring_backoff.until:
            return ()
        ranked = rank(seed, "ring", peers)
        rates = np.array([[rate(sender, receiver) for receiver in ranked] for sender in ranked])
        trips = np.array([[trip(sender, receiver) for receiver in ranked] for sender in ranked])
        return tuple(ranked[at] for at in best(rates, trips))

    def _record_ring(self, current: Round) -> None:
        """Suspend rings for 2 rounds after a failed one, then for 4, 8 and so on.

        A ring that succeeds undoes one of these steps.
        """
        data_plane = current.data_plane
        if isinstance(data_plane, Ring) and data_plane.broken:
            self._ring_backoff.fail(current.round)
        elif data_plane.proposal is not None and data_plane.proposal.order:
            self._ring_backoff.succeed()
