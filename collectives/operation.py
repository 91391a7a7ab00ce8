"""One average that is no training round, beside whatever else a swarm does: several peers' arrays become one.

Peers call it by a name and a number. Who calls first has nobody to agree with yet, so there are two parts. First they find
together and settle on a group: see `callers`. Then it is a round like any other, with that group as its members: see
`agreement` and `butterfly`. Who calls later than that gets the result without being in it. A peer fails when those who want
something else are not fewer than those who want the same.

Two groups can be named at once, when a leader dies at that moment, when links are missing, or when one member would not wait
as long as the others. Until it has voted a peer goes over to the greater one, or to one that most name, afterwards only to
one that most have; a result is always that of the contributors it names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

import blake3
import msgspec
from thinwire.collectives.aggregate import mean
from thinwire.collectives.agreement import Agreement
from thinwire.collectives.butterfly import Butterfly
from thinwire.collectives.callers import Callers, Place
from thinwire.collectives.elements import Elements
from thinwire.collectives.exchange import Exchange
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.proposal import Terms
from thinwire.collectives.series import GIVE_UP
from thinwire.collectives.shards import Grid
from thinwire.collectives.stash import Stash
from thinwire.compression.codec import Buffer, Codec
from thinwire.swarm.frame import Frame, sign_message, verify_message
from thinwire.swarm.protocol import MAX_GROUP, OPERATIONS, Ask, Call, Message, Over, PeerId, Plan, Ready
from thinwire.swarm.rendezvous import leader_order

LOGGER = logging.getLogger(__name__)

MAX_WEIGHT = 2**31
"""Largest weight of one peer in a mean; what a peer says it weighs is believed up to it."""


@dataclass(frozen=True, slots=True)
class Share:
    """What this peer brings: its encoded chunks in grid order with their hashes, how they are cut and computed with."""

    payloads: Sequence[Buffer]
    hashes: bytes
    weight: int
    grid: Grid
    elements: Elements


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended: with an outcome that has a commit, or with `failure`, what went wrong, and a `hint`.

    missing: peers that were here and are not in it, each with a reason.
    """

    outcome: Outcome = field(default_factory=Outcome)
    missing: dict[PeerId, str] = field(default_factory=dict)
    failure: str = ""
    hint: str = ""


class Operation:
    """One peer's part. Feed it what `Operations` routes; `ended` has its end.

    fresh: we are new to the name, and do not know which number is next. attempt: the number of our last announcement by this
    number, or of this life. grace: seconds that peers which are here and have not called are waited for. patience: seconds
    without progress before somebody acts. `lowered`: how often it was given a lower number.
    """

    def __init__(
        self,
        place: Place,
        name: str,
        number: int,
        plan: Plan,
        share: Share,
        *,
        fresh: bool,
        attempt: int,
        grace: float,
        patience: float,
    ) -> None:
        self.name, self.number, self.plan = name, number, plan
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.ended_at, self.lowered = 0.0, 0
        self.group: tuple[PeerId, ...] = ()
        self.fly: Butterfly | None = None
        self._place, self._share, self._fresh = place, share, fresh
        self._grace, self._patience = grace, patience
        self._callers = Callers(place, plan, grace=grace, patience=patience)
        self._stash = Stash(4 * MAX_GROUP, 16)
        self._told: dict[PeerId, float] = {}  # who was told since that we call by this number, and when
        self._located: dict[PeerId, int] = {}  # for which other number that each called
        self._started = self._called_at = place.now()
        self._attempt, self._witness, self._voted = attempt, True, False
        self._withdrew: set[PeerId] = set()  # who has left us alone in a group
        self._waiting: asyncio.Task[Outcome] | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Round and fragment of its messages."""
        return key_of(self.name, self.number)

    @property
    def nbytes(self) -> int:
        """Bytes that are held for it: what we have brought, what others have, and the results."""
        own = sum(memoryview(payload).nbytes for payload in self._share.payloads)
        return own + (self.fly.nbytes if self.fly is not None else 0)

    @property
    def callers(self) -> Collection[PeerId]:
        """The others who have called."""
        return self._callers.calls.keys()

    @property
    def waited(self) -> float:
        """Seconds since it was called."""
        return self._callers.waited

    def call(self) -> None:
        """Tell everybody that is here."""
        self._told, self._located, self._called_at = {}, {}, self._place.now()
        for peer in sorted({*self._place.here(), *self._place.live} - {self._place.me}):
            self.answer(peer)

    def answer(self, peer: PeerId) -> None:
        """Tell one."""
        self._place.outbox.control(peer, self._said())

    def locate(self, peer: PeerId, number: int) -> None:
        """Tell one that calls another number where we are, once for each."""
        if peer not in self.callers and self._located.get(peer) != number:
            self._located[peer] = number
            self._told[peer] = self._place.now()
            self._place.outbox.control(peer, Over(self.name, self.number, False))
            self.answer(peer)

    def renumber(self, number: int, attempt: int) -> None:
        """The others are at another number; only before it has begun."""
        self.lowered += number < self.number
        self.number, self._fresh, self._attempt = number, False, attempt
        self._callers.clear()
        self._stash.clear()

    async def wait(self) -> Ended:
        """Its end. Cancelled, it withdraws."""
        try:
            return await asyncio.shield(self.ended)
        except asyncio.CancelledError:
            self.withdraw()
            raise

    def withdraw(self) -> None:
        """Whoever called does not wait any more."""
        self._give_up("it was cancelled")

    # --- what comes in

    def hear_call(self, peer: PeerId, call: Call) -> None:
        """Somebody calls the same."""
        begun, now = self.fly is not None, self._place.now()
        if begun and not call.group:
            self.answer(peer)  # it comes late
        if self.ended.done():
            return
        if not begun and now > self._told.get(peer, self._called_at) + self._patience:
            self._told[peer] = now
            self.answer(peer)  # what we have said before may be too old for it
        if self._callers.hear(peer, call):
            self._heed()

    def forget(self, peer: PeerId) -> None:
        """Somebody does not call any more. Who is in our group, and has no part in its round yet, will have none; as long as
        nothing was promised in it, we look for another group then. Of each peer once, or one could keep all from any.
        """
        fly = self.fly
        if fly is None:
            self._callers.withdraw(peer)
        elif not (
            self.ended.done()
            or peer not in self.group
            or peer in self._withdrew
            or peer in fly.agreement.ready
            or fly.agreement.opened is not None
            or fly.agreement.bound
        ):
            self._withdrew.add(peer)
            self._callers.withdraw(peer)
            self._callers.again()
            self._attempt, self.fly, self.group = fly.attempt, None, ()
            if self._waiting is not None:
                self._waiting.cancel()
            self.call()

    @property
    def announced(self) -> int:
        """The number of our last announcement; 0: we have made none."""
        if self.fly is None:
            return self._attempt if self._withdrew else 0
        return self.fly.attempt

    def hear(self, peer: PeerId, frame: Frame) -> None:
        """A frame of the round."""
        if self.fly is not None:
            self.fly.hear(peer, frame)
        elif frame.signature:
            self._stash.put(peer, frame)

    def reach(self, peer: PeerId) -> None:
        """A link to `peer` is up."""
        if not self.ended.done():
            self.answer(peer)
        if self.fly is not None:
            self.fly.reach(peer)

    def lost(self, peer: PeerId, *, gone: bool) -> None:
        """The link to `peer` broke."""
        self._told.pop(peer, None)
        self._located.pop(peer, None)
        if self.fly is not None:
            self._callers.calls.pop(peer, None)
            self.fly.lost(peer, gone=gone)
        else:
            self._callers.forget(peer)
            self._heed()

    def tick(self) -> None:
        """Let time pass."""
        now = self._place.now()
        if self.fly is not None:
            self.fly.tick()
            if not self.ended.done() and now > max(self._started, self.fly.moved) + GIVE_UP * self._patience:
                self._fail(
                    "no majority of those who began it is left, or in reach", "call again, with those that are here"
                )
        else:
            self._heed()

    # --- finding together

    def _said(self) -> Call:
        return Call(self.name, self.number, self._fresh, self.plan, self.group)

    def _heed(self) -> None:
        """Take up what others have named, if it is sound, or name one."""
        if self.ended.done() or self._voted:
            return
        group = self._callers.named(self.group, begun=self.fly is not None)
        if group is None:
            if self.fly is None:
                self._find()
        elif group != self.group:
            self._take_up(group)

    def _find(self) -> None:
        if differ := self._callers.outvoted:
            self._fail(differ, "all peers call with the same shapes, types, op and codec")
            return
        group = self._callers.own(self.key)
        if group:
            self._take_up(group)
        elif group is not None:
            self._give_up(
                f"{len(self._callers.all)} of at least {self.plan.least} peers have called within {self._grace:g} s",
                next(iter(self._callers.differing.values()), ""),
            )

    def _take_up(self, group: tuple[PeerId, ...]) -> None:
        place, (round, fragment) = self._place, self.key
        again = self.fly is not None or place.me not in group or not self._witness
        self.group, self._started, self._voted = group, place.now(), False
        seed = blake3.blake3(
            b"".join((place.run_id, round.to_bytes(8, "big"), fragment.to_bytes(8, "big"), *group))
        ).digest()
        terms = Terms(
            round,
            fragment,
            leader_order(seed, group, round, fragment),
            seed,
            blake3.blake3(msgspec.msgpack.encode(self.plan)).digest(),
            min_peers=self.plan.least,
            max_weight=MAX_WEIGHT,
            grace=self._patience,
            patience=self._patience,
            chunks=len(self._share.grid),
        )
        agreement = Agreement(
            place.me,
            terms,
            sign=lambda message: sign_message(message, b"", place.identity, place.run_id),
            verify=self._verify,
            live=place.live,
            gone=set(place.gone),
            witness=self._witness,
        )
        exchange = Exchange(
            agreement,
            codec=cast(Codec, self._share.elements),  # of a codec an exchange uses what Elements has
            grid=self._share.grid,
            rule=mean,
            seed=seed,
            outbox=place.outbox,
            now=place.now,
            usual={},
            phase=self._phase,
            reducer=self._share.elements,
        )
        fly = Butterfly(
            agreement,
            exchange,
            outbox=place.outbox,
            now=place.now,
            attempt=self._attempt,
            phase=self._phase,
            link=place.link,
        )
        self.fly = fly
        self.call()
        self._wait(fly)
        fly.announce(self._share.payloads, weight=self._share.weight, loss=0.0, speed=0.0, hashes=self._share.hashes)
        self._attempt = fly.attempt
        if again:
            for peer in sorted(place.live):
                place.outbox.control(peer, Ask(round, fragment))
        for peer, frame in self._stash.take():
            message = frame.message
            if not (
                self._withdrew and isinstance(message, Ready) and message.base != seed
            ):  # of the group that is no more
                fly.hear(peer, frame)

    def _verify(self, peer: PeerId, message: Message, signature: bytes) -> bool:
        place = self._place
        key = place.identity.public_key if peer == place.me else place.key_of(peer)
        return key is not None and verify_message(message, signature, key, place.run_id)

    def _phase(self, round: int, name: str) -> None:
        self._voted |= name == "vote"

    # --- the end

    def _wait(self, fly: Butterfly) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = asyncio.ensure_future(fly.wait())
        self._waiting.add_done_callback(lambda task: self._settled(fly, task))

    def _settled(self, fly: Butterfly, task: asyncio.Task[Outcome]) -> None:
        if task.cancelled() or self.fly is not fly or self.ended.done():
            return
        outcome = task.result()
        if outcome.commit is not None:
            self._end(Ended(outcome, self._absent(outcome)))
            return
        other = self._callers.other(self.group)
        if other is None:
            self._fail("the others began it as another group", "call again")
            return
        self._witness = False  # what was promised in the other group may have counted there
        self._take_up(other)

    def _absent(self, outcome: Outcome) -> dict[PeerId, str]:
        place, said = self._place, dict(outcome.missing)
        others = {*self.group, *place.here(), *said, *self._callers.differing}.difference(outcome.contributors)
        return {peer: self._reason(peer, said.get(peer, "")) for peer in sorted(others)}

    def _reason(self, peer: PeerId, said: str) -> str:
        if peer in self._callers.differing:
            return self._callers.differing[peer]
        call = self._callers.calls.get(peer)
        if call is not None and call.group and self._place.me in set(self.group) - set(call.group):
            return "began without us"
        return said or ("gone" if peer in self._place.gone else "late" if call is not None else "has not called")

    def _give_up(self, failure: str, hint: str = "") -> None:
        """Nobody shall count on us any more, as far as that is possible."""
        if not self.ended.done() and self.fly is None:
            for peer in sorted(self._place.live):
                self._place.outbox.control(peer, Over(self.name, self.number + 1, True))
        self._fail(failure, hint)

    def broke(self, error: Exception) -> None:
        """Something went wrong here, and shall end nothing but this."""
        LOGGER.error("average %r number %d", self.name, self.number, exc_info=error)
        self._fail(f"it went wrong here: {type(error).__name__}: {error}", "please report it with the log")

    def _fail(self, failure: str, hint: str = "") -> None:
        self._end(Ended(failure=failure, hint=hint))
        if self._waiting is not None:
            self._waiting.cancel()

    def _end(self, ended: Ended) -> None:
        if not self.ended.done():
            self.ended.set_result(ended)
            self.ended_at = self._place.now()


def key_of(name: str, number: int) -> tuple[int, int]:
    """Round and fragment by which the messages of an average are known: 47 bits of the hash of its name, and its number."""
    first, fragment = _first_key(name)
    return (first + number) % 2**32, fragment


@lru_cache(maxsize=4096)  # asked of every operation that is kept, for every frame
def _first_key(name: str) -> tuple[int, int]:
    digest = blake3.blake3(name.encode()).digest()
    return int.from_bytes(digest[2:6], "big"), OPERATIONS | int.from_bytes(digest[:2], "big") % OPERATIONS
