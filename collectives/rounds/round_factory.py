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
from thinwire.collectives.consensus.paxos import Agreement
from thinwire.collectives.consensus.proposal import RoundTerms
from thinwire.collectives.consensus.vote_store import VoteStore
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.rounds.data_plane_factory import DataPlaneFactory
from thinwire.collectives.rounds.data_planes.data_plane import DataPlane
from thinwire.collectives.rounds.data_planes.ring import Ring
from thinwire.collectives.rounds.repair import Paced
from thinwire.collectives.rounds.round import Opinions, Round
from thinwire.collectives.timing import TICK, Patience
from thinwire.collectives.topology.peer_backoff import Backoff, PeerBackoff
from thinwire.collectives.topology.placement import Rate, Trip
from thinwire.collectives.topology.ring_order import best
from thinwire.collectives.topology.shards import Grid
from thinwire.collectives.transport.pending_frames import PendingFrames
from thinwire.collectives.transport.sending.send_queue import SendQueue
from thinwire.swarm.evidence import ReportEquivocation
from thinwire.swarm.frame import sign_message, verify_message
from thinwire.swarm.identity.identity import Identity, peer_id_of
from thinwire.swarm.lineage import Verify
from thinwire.swarm.messages.registry import Digest, Message, PeerId, Span
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

    - `live`: peers with a link, maintained by the caller. `key_of`: Ed25519 public key of another peer, None if unknown.
    - `patience`: seconds without progress before a peer acts; never below the given value, adapts to the duration of rounds.
    - `site`: the network that we share with others. `pending_frames`: frames for next rounds, if other factories of this
      peer share them. `peer_backoff`: pauses of peers, if an audit of owners adds to them.
    - `report_equivocation`, `banned`, `trial`: see Agreement. `opinions`, `paced`: see Round.
    """

    def __init__(
        self,
        identity: Identity,
        run_id: Digest,
        planes: DataPlaneFactory,
        *,
        send_queue: SendQueue,
        now: Callable[[], float],
        live: Collection[PeerId],
        key_of: Callable[[PeerId], bytes | None],
        patience: float,
        phase: Callable[[int, str], None] = lambda round, name: None,
        site: str = "",
        pending_frames: PendingFrames | None = None,
        peer_backoff: PeerBackoff | None = None,
        slow_peers: Callable[[], Collection[PeerId]] = tuple,
        spans: Callable[[], tuple[Span, ...]] = tuple,
        report_equivocation: ReportEquivocation = lambda peer, first, second: None,
        banned: Callable[[], Collection[PeerId]] = tuple,
        trial: Callable[[PeerId], bool] = lambda peer: False,
        opinions: Opinions = lambda: ((), ()),
        paced: Paced = lambda peer, round: False,
    ) -> None:
        self.floor, self._patience = patience, Patience(patience)
        self.behind = asyncio.Event()
        """Set when the others are so far ahead that we cannot follow."""
        self.pending_frames = PendingFrames(MAX_PENDING, MAX_PENDING_EACH) if pending_frames is None else pending_frames
        """Frames of the next round."""
        self.slow_peers = slow_peers
        """Returns peers that must not own chunks in rounds that we lead."""
        self.spans = spans
        """Returns our measurements of links to other peers."""
        self.planes = planes
        self._identity, self._run_id, self._send_queue, self._now = identity, run_id, send_queue, now
        self._live, self._key_of, self._phase, self._site = live, key_of, phase, site
        self._last: Callable[[], DataPlane | None] = lambda: None  # others decide how long its results stay in memory
        self.peer_backoff = PeerBackoff() if peer_backoff is None else peer_backoff
        self._met: dict[PeerId, bytes] = {}  # keys of members that proposals of the round in progress carry
        self._report_equivocation, self._banned, self._trial, self._opinions = (
            report_equivocation,
            banned,
            trial,
            opinions,
        )
        self._paced = paced
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
        seed = blake3.blake3(self._run_id + number.to_bytes(8, "big")).digest()
        spec = self.planes.spec
        order = leader_order(seed, terms.members, terms.round, terms.fragment)
        self._met = {}
        agreement = Agreement(
            self._identity.peer_id,
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
            sign=lambda message: sign_message(message, b"", self._identity, self._run_id),
            verify=self.verify,
            live=self._live,
            idle={*self.peer_backoff.resting(terms.round), *self.slow_peers()},
            barred=self.peer_backoff.barred(terms.round),
            hasty=self.peer_backoff.hasty(terms.round),
            store=store,
            report_equivocation=self._report_equivocation,
            banned=self._banned,
            trial=self._trial,
        )
        data_plane = self.planes.make(agreement, grid, seed=seed, turn=turn, on_result=lambda: current.pump())
        current = Round(
            agreement,
            data_plane,
            send_queue=self._send_queue,
            now=self._now,
            attempt=attempt,
            site=self._site,
            phase=self._phase,
            link=self._link,
            spans=self.spans,
            opinions=self._opinions,
            key_of=self.key_of,
            met=self._met,
            paced=self._paced,
        )
        if (last := self._last()) is not None:
            last.halt()  # an abandoned round must not vote any more
        self._last = ref(data_plane)
        return current

    def _link(self) -> tuple[int, int]:
        return self._send_queue.bandwidth.end_round() if self.planes.spec.by_bandwidth else (0, 0)

    @property
    def patience(self) -> float:
        """Seconds without progress before this peer acts."""
        return self._patience.seconds

    async def outcome(self, current: Round, *, give_up: float | None = None) -> Outcome:
        """Return the Outcome of a round; without a commit if it is given up, or if we are behind.

        `give_up`: seconds after which it is, unless its data is arriving.
        """
        began = self._now()
        behind = asyncio.ensure_future(self.behind.wait())
        wait = asyncio.ensure_future(current.wait())
        try:
            await self.until_given_up(current, (wait, behind), give_up)
            outcome = wait.result() if wait.done() else Outcome(diverged=behind.done())
        finally:
            wait.cancel()
            behind.cancel()
        if outcome.commit is not None:
            proof = certificate(outcome.commit, current.agreement.terms, self.key_of, self.verify)
            outcome = replace(outcome, certificate=proof)
        if outcome.commit is not None and not current.booked:
            current.booked = True  # callers that follow rounds ask again for the outcome of the next one
            withheld = current.data_plane.withheld & set(self._live)  # a broken link shows nothing
            led = current.agreement.acceptor.heeded
            self.peer_backoff.record(outcome.commit.proposal, current.data_plane.failed, withheld, led)
            self._record_ring(current)
            if current.opened_at is not None:
                took = self._now() - max(began, current.opened_at)
                self._patience.observe(current.data_plane.progress.duration_without_late_peers(took))
        return outcome

    async def until_given_up(
        self, current: Round, futures: Collection[asyncio.Future[Any]], give_up: float | None
    ) -> None:
        """Wait for the first of the futures, or until a peer gives the round up, see `outcome`."""
        began, left = self._now(), give_up
        while left is None or left > 0:
            done, _ = await asyncio.wait(
                futures, timeout=None if left is None else max(TICK, left), return_when=asyncio.FIRST_COMPLETED
            )
            if done or give_up is None:
                return
            left = current.given_up_at(began, give_up) - self._now()

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

    def verify(self, peer: PeerId, message: Message, signature: bytes) -> bool:
        """Return True if `signature` is the peer's under the message, and its key is known."""
        key = self.key_of(peer)
        return key is not None and verify_message(message, signature, key, self._run_id)

    def with_keys(self, keys: tuple[bytes, ...]) -> Verify:
        """Return `verify`, also for peers that we do not know, by their public keys."""
        known = {peer_id_of(key): key for key in keys}

        def verify(peer: PeerId, message: Message, signature: bytes) -> bool:
            key = known.get(peer) or self.key_of(peer)
            return key is not None and verify_message(message, signature, key, self._run_id)

        return verify

    def key_of(self, peer: PeerId) -> bytes | None:
        """Return the public key of a peer, if it is known."""
        if peer == self._identity.peer_id:
            return self._identity.public_key
        return self._key_of(peer) or self._met.get(peer)
