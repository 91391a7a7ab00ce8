"""One round after another of one peer: made alike, waited for alike, and each tells how patient to be in the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import blake3
import numpy as np
from thinwire.collectives.aggregate import RULES
from thinwire.collectives.agreement import Agreement
from thinwire.collectives.aside import Work, at_once
from thinwire.collectives.bandwidth import Bandwidth
from thinwire.collectives.buffers import Pool
from thinwire.collectives.butterfly import Butterfly
from thinwire.collectives.contributions import Screen
from thinwire.collectives.exchange import Exchange
from thinwire.collectives.gather import Gather
from thinwire.collectives.hierarchy import Hierarchy
from thinwire.collectives.outbox import Outbox
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.placement import Rate, Trip
from thinwire.collectives.plane import Plane
from thinwire.collectives.proposal import Terms
from thinwire.collectives.ring import Ring
from thinwire.collectives.ringorder import best
from thinwire.collectives.shards import Grid
from thinwire.collectives.sieve import Kept, Sieve, Sifts
from thinwire.collectives.standing import STEPS, Standing
from thinwire.collectives.stash import Stash
from thinwire.compression.codec import Codec
from thinwire.swarm.frame import sign_message, verify_message
from thinwire.swarm.identity import Identity
from thinwire.swarm.protocol import Commit, Digest, Message, PeerId, Span
from thinwire.swarm.rendezvous import leader_order, rank

TICK = 0.1
"""Seconds between looks at the clock; well below every patience."""

GIVE_UP = 10
"""A round that neither commits nor fails within grace plus this many patiences is left."""

MAX_PATIENCE = 120.0
"""Most seconds without progress before somebody acts, however slow rounds have been."""

STASH = 1024
"""Control frames kept for the round after the one in progress."""

STASH_EACH = 16
"""Of these, most of one peer: as many as one has to say in a bad round."""


def round_of(message: Message) -> int:
    """Number of the round that a message is about, 0 when it is about none."""
    number: int = message.opened.round if isinstance(message, Commit) else getattr(message, "round", 0)
    return number


def fragment_of(message: Message) -> int:
    """Number of the fragment that a message is about, -1 when it is about none."""
    number: int = message.opened.fragment if isinstance(message, Commit) else getattr(message, "fragment", -1)
    return number


class Series:
    """What the rounds of one peer have in common.

    `live`: peers with a link, kept by the caller. `key_of`: Ed25519 public key of another peer, None when it is not known.
    `patience`: seconds without progress before somebody acts, at least those given here; adapts to what rounds take.
    `moved`: bytes sent and received since the beginning, where chunks are dealt out by bandwidth; None: all own equally many.
    `collective`: "gather", every payload goes to everybody (and `codec` only says whether it is one); "sparse-butterfly", each
    chunk has an owner that adds up and sends a part of it (see `sieve`); or "butterfly", chunks are averaged by `rule`, with
    `topology` at their owners ("butterfly"), on their way round ("ring"), or in sites first ("hierarchy"). `site`: the network
    that we share with others. `bandwidth`: what is known of our link, and `stash`: what is kept for next rounds, where other
    series of this peer have the same. `kept`: what we have not sent of sums that we own, where these are thinned out, which is
    done in `aside`.
    """

    def __init__(
        self,
        identity: Identity,
        run_id: Digest,
        *,
        codec: Codec | Screen,
        rule: str,
        outbox: Outbox,
        now: Callable[[], float],
        live: Collection[PeerId],
        key_of: Callable[[PeerId], bytes | None],
        patience: float,
        phase: Callable[[int, str], None] = lambda round, name: None,
        collective: str = "butterfly",
        moved: Callable[[], tuple[int, int]] | None = None,
        topology: str = "butterfly",
        site: str = "",
        bandwidth: Bandwidth | None = None,
        stash: Stash | None = None,
        kept: Kept | None = None,
        aside: Work = at_once,
    ) -> None:
        self.patience = self.floor = patience
        self.behind = asyncio.Event()
        """Set when the others have gone on so far that we cannot follow."""
        self.stash = Stash(STASH, STASH_EACH) if stash is None else stash
        """Frames of the next round."""
        self.sick: Callable[[], Collection[PeerId]] = tuple
        """Peers that shall own no chunks in rounds that we lead."""
        self.rate: Rate | None = None
        """By which rings are ordered, where more is known than what each peer says of its own link."""
        self.spans: Callable[[], tuple[Span, ...]] = tuple
        """What we have measured of our links to others."""
        self._identity, self._run_id = identity, run_id
        self._codec, self._rule, self._outbox, self._now = codec, RULES[rule], outbox, now
        self._live, self._key_of, self._phase, self._collective = live, key_of, phase, collective
        self._topology, self._site = topology, site
        self._usual: dict[int, dict[int, float]] = {}
        self._pool = Pool()
        self._sieve: Sieve | None = None
        self.kept, self._aside = Kept() if kept is None else kept, aside
        self._standing = Standing()
        self._moved = moved
        self.bandwidth = bandwidth or Bandwidth()
        """What our link carries; unknown where nobody asks."""
        if moved is not None:
            outbox.handed = self.look
        self._breaks = self._straight = 0

    def begin(
        self,
        terms: Terms,
        grid: Grid,
        *,
        gone: Collection[PeerId],
        witness: bool = True,
        attempt: int = 0,
        turn: int = 0,
    ) -> Butterfly:
        """A round on these terms; the order of the members and the patience are filled in here. `turn`: which vector it is
        about, where they take turns: what norms are usual is known of each.
        """
        number = (terms.fragment << 48) + terms.round  # so that fragments do not all have the same backups
        seed = blake3.blake3(self._run_id + number.to_bytes(8, "big")).digest()
        sized = self._moved is not None and self._topology == self._collective == "butterfly"
        chunks = len(grid) if sized else 0
        order = leader_order(seed, terms.members, terms.round, terms.fragment)
        agreement = Agreement(
            self._identity.peer_id,
            replace(
                terms,
                members=order,
                patience=self.patience,
                chunks=chunks,
                hands=self._moved is not None and self._collective == "gather",
                sited=self._topology == "hierarchy",
                ring=partial(self._ring, seed, terms.round) if self._topology == "ring" else None,
            ),
            sign=lambda message: sign_message(message, b"", self._identity, self._run_id),
            verify=self._verify,
            live=self._live,
            gone=gone,
            witness=witness,
            idle={*self._standing.resting(terms.round), *self.sick()},
        )
        exchange = self._plane(agreement, grid, seed, turn)
        fly = Butterfly(
            agreement,
            exchange,
            outbox=self._outbox,
            now=self._now,
            attempt=attempt,
            site=self._site,
            phase=self._phase,
            link=self._link,
            spans=self.spans,
        )
        if self._sieve is not None:
            self._sieve.halt()  # a round that is left must not vote any more
        self._sieve = exchange if isinstance(exchange, Sieve) else None
        if self._sieve is not None:
            self._sieve.stirred = fly.pump
        return fly

    def look(self) -> None:
        """Time has passed, or something came: see how fast bytes move."""
        if self._moved is not None and self.bandwidth.due(now := self._now()):
            self.bandwidth.look(*self._moved(), now)

    def _link(self) -> tuple[int, int]:
        return self.bandwidth.settle()

    def _plane(self, agreement: Agreement, grid: Grid, seed: bytes, turn: int) -> Plane:
        if self._collective == "gather":
            return self._gather(agreement, grid, turn)
        if self._collective == "sparse-butterfly":
            return self._sifting(agreement, grid, turn)
        return self._exchange(agreement, grid, seed, turn)

    def _sifting(self, agreement: Agreement, grid: Grid, turn: int) -> Sieve:
        return Sieve(
            agreement,
            codec=cast(Sifts, self._codec),
            grid=grid,
            kept=self.kept,
            keeps=self._run_id,
            aside=self._aside,
            outbox=self._outbox,
            now=self._now,
            usual=self._usual.setdefault(turn, {}),
            phase=self._phase,
        )

    def _exchange(self, agreement: Agreement, grid: Grid, seed: bytes, turn: int) -> Exchange:
        if self._topology == "hierarchy":
            return self._hierarchy(agreement, grid, seed, turn)
        return (Ring if self._topology == "ring" else Exchange)(
            agreement,
            codec=cast(Codec, self._codec),
            grid=grid,
            rule=self._rule,
            seed=seed,
            outbox=self._outbox,
            now=self._now,
            usual=self._usual.setdefault(turn, {}),
            pool=self._pool,
            phase=self._phase,
        )

    def _hierarchy(self, agreement: Agreement, grid: Grid, seed: bytes, turn: int) -> Hierarchy:
        return Hierarchy(
            agreement,
            codec=cast(Codec, self._codec),
            grid=grid,
            rule=self._rule,
            seed=seed,
            outbox=self._outbox,
            now=self._now,
            usual=self._usual.setdefault(turn, {}),
            groups=self._usual.setdefault(-1 - turn, {}),
            pool=self._pool,
            phase=self._phase,
        )

    def _gather(self, agreement: Agreement, cut: Grid, turn: int) -> Gather:
        return Gather(
            agreement,
            screen=self._codec,
            pieces=cut,
            outbox=self._outbox,
            now=self._now,
            usual=self._usual.setdefault(turn, {}),
            phase=self._phase,
        )

    async def outcome(self, fly: Butterfly, *, give_up: float | None = None) -> Outcome:
        """How a round ends; without a commit when it has not within `give_up` seconds, or we are behind."""
        began = self._now()
        behind = asyncio.ensure_future(self.behind.wait())
        wait = asyncio.ensure_future(fly.wait())
        try:
            await asyncio.wait((wait, behind), timeout=give_up, return_when=asyncio.FIRST_COMPLETED)
            outcome = wait.result() if wait.done() else Outcome(diverged=behind.done())
        finally:
            wait.cancel()
            behind.cancel()
        if outcome.commit is not None and not fly.booked:
            fly.booked = True  # who follows rounds asks again for how its own has ended
            self._standing.settle(outcome.commit.opened, fly.exchange.failed)
            self._settle(fly)
            if fly.opened_at is not None:
                took = self._now() - max(began, fly.opened_at)
                self.patience = max(self.floor, min(MAX_PATIENCE, 0.7 * self.patience + 0.3 * 3.0 * took))
        return outcome

    def _ring(
        self, seed: Digest, round: int, peers: Sequence[PeerId], announced: Rate, trip: Trip
    ) -> tuple[PeerId, ...]:
        """The order of a ring that we open; empty while rings rest."""
        if round <= self._straight:
            return ()
        rate = self.rate or announced
        ranked = rank(seed, "ring", peers)
        rates = np.array([[rate(sender, receiver) for receiver in ranked] for sender in ranked])
        trips = np.array([[trip(sender, receiver) for receiver in ranked] for sender in ranked])
        return tuple(ranked[at] for at in best(rates, trips))

    def _settle(self, fly: Butterfly) -> None:
        """After a ring that came to nothing there is none for 2 rounds, then 4, 8 and so on; each that holds is a step back."""
        exchange = fly.exchange
        if isinstance(exchange, Ring) and exchange.broken:
            self._breaks = min(STEPS, self._breaks + 1)
            self._straight = fly.round + 2**self._breaks
        elif exchange.opened is not None and exchange.opened.order:
            self._breaks = max(0, self._breaks - 1)

    def _verify(self, peer: PeerId, message: Message, signature: bytes) -> bool:
        key = self._identity.public_key if peer == self._identity.peer_id else self._key_of(peer)
        return key is not None and verify_message(message, signature, key, self._run_id)
