"""Sharded all-reduce of one fragment: every chunk has an owner that averages it and sends the result to all.

The data plane of a round; `agreement` decides who takes part and whether it commits. Chunks are pipelined: contributors send
in grid order, an owner averages a chunk as soon as every named contribution of it is in and sends the result on at once.
Everything is event-driven and runs on the loop's thread; a chunk's kernels take well under a millisecond each.

Payloads are checked against the hashes that their contributor announced, results against the signed record of their
owner, and all results against the digest that was voted for. What a peer does wrong ends as an accusation with a reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import blake3
from thinwire.collectives.agreement import Agreement
from thinwire.collectives.electorate import ORPHANED
from thinwire.collectives.outbox import Outbox
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.plane import Plane
from thinwire.collectives.repair import Repair
from thinwire.collectives.statesync import IN_FLIGHT
from thinwire.compression.codec import Buffer
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import (
    Ballot,
    Chunk,
    Commit,
    Digest,
    Fetch,
    Partial,
    PeerId,
    Ready,
    Record,
    Result,
    Span,
    Subtotal,
)

TRICKLE = 2048
"""Bytes/s that count as progress; streams on which a frame comes more slowly are closed (see limits)."""


class Butterfly:
    """One peer's part in averaging one fragment in one round; `exchange` is what moves the data.

    Feed it frames with `hear`, time with `tick`, link changes with `lost` and `reach`; `announce` starts our own
    contribution; `wait` returns the Outcome. `attempt` is the number of our last announcement, if there was one in this round
    before; `site`: the network that we share with others. `link` says what our link carries, bytes/s up and down (0:
    unknown), `spans` what those to some others do. After the commit it stays as the server of results for those who missed
    some.
    """

    def __init__(
        self,
        agreement: Agreement,
        exchange: Plane,
        *,
        outbox: Outbox,
        now: Callable[[], float],
        attempt: int = 0,
        site: str = "",
        phase: Callable[[int, str], None] = lambda round, name: None,
        link: Callable[[], tuple[int, int]] = lambda: (0, 0),
        spans: Callable[[], tuple[Span, ...]] = tuple,
    ) -> None:
        self.agreement, self.exchange = agreement, exchange
        self.me, self.round, self.fragment = agreement.me, agreement.terms.round, agreement.terms.fragment
        self._outbox, self._now, self._phase = outbox, now, phase
        self._link, self._spans = link, spans
        self.attempt = attempt
        self._site = site
        self._repairs = Repair()
        self._accused: Ballot | None = None
        self.opened_at: float | None = None
        """When the ballot in progress opened here: what came before was waiting, and says nothing about the links."""
        self.lost_after_open: set[PeerId] = set()
        """Peers whose process went away after the round had opened: they may have voted, and will not remember."""
        self.booked = False
        """Whether what the round showed of others has been remembered."""
        self._gone: set[PeerId] = set()
        self._spent: set[PeerId] = set()
        self._settled = asyncio.Event()
        self._came: tuple[float, dict[PeerId, int]] = (now(), {})
        """When the bytes of those who owe us something were counted last, and how many had come of each."""

    # --- our own contribution

    def announce(
        self, source: Sequence[Buffer], *, weight: int, loss: float, speed: float, hashes: bytes | None = None
    ) -> None:
        """Take part with the encoded chunks `source` (grid order; not to be changed before the round ends).

        With `weight` 0 and no source the peer takes part (it owns chunks and gets the results) without contributing.
        """
        self.attempt += 1
        self.exchange.contribute(source, self.attempt)
        if hashes is None:
            hashes = b"".join(blake3.blake3(chunk).digest() for chunk in source)
        terms = self.agreement.terms
        ready = Ready(
            self.round,
            self.fragment,
            self.attempt,
            terms.base,
            terms.plan,
            weight,
            hashes,
            self.agreement.remembers,
            float(loss),
            float(speed),
            *self._link(),
            site=self._site,
            spans=self._spans(),
        )
        self._phase(self.round, "announce")
        self.agreement.announce(ready, self._now())
        self.pump()

    def resume(self) -> None:
        """Go on after `wait` has said that our state differs: there was no other to be had. What was promised still holds."""
        self.agreement.diverged = False
        self._settled.clear()
        self.pump()

    async def wait(self) -> Outcome:
        """Until the round has committed here with every result, or our state turns out to differ from the majority's."""
        await self._settled.wait()
        commit = self.agreement.commit
        missing = {entry.peer: entry.reason for entry in commit.opened.excluded} if commit else {}
        if not self.complete or commit is None:
            return Outcome(diverged=self.agreement.diverged, missing=missing)
        return Outcome(tuple(chunk for chunk in self.results if chunk is not None), commit, missing)

    @property
    def results(self) -> Sequence[Buffer | None]:
        """The results in grid order, as far as they are here."""
        return self.exchange.results.chunks

    @property
    def nbytes(self) -> int:
        """Bytes of contributions and results that are here."""
        return self.exchange.nbytes

    @property
    def departed(self) -> set[PeerId]:
        """Peers whose process went away in this round, so that they are gone for the next one, too. Who went before the round
        opened here may be a member all the same (`Open.members`), and is back only if it takes part.
        """
        opened = self.exchange.opened
        return self.lost_after_open | (self._gone.difference(opened.alive) if opened is not None else self._gone)

    @property
    def moved(self) -> float:
        """When something of use came last."""
        return self.exchange.moved

    @property
    def complete(self) -> bool:
        """Whether every result that was committed is here."""
        return self.exchange.complete

    # --- events

    def hear(self, sender: PeerId, frame: Frame) -> None:
        """A checked frame of this round and fragment."""
        message = frame.message
        if getattr(message, "fragment", self.fragment) != self.fragment:
            return
        if isinstance(message, (Chunk, Partial, Result, Record, Subtotal)):
            self.exchange.take(sender, frame)
        elif isinstance(message, Fetch):
            self._serve(sender, message)
        else:
            if isinstance(message, Commit):
                self._spent.discard(sender)  # what it said before was about another round
            before = self.agreement.ready.get(sender)
            self.agreement.hear(sender, message, frame.signature, self._now())
            if self.agreement.ready.get(sender) is not before:  # what is said again gives nothing a meaning
                self.exchange.announced(sender)
        self.pump()

    def spent(self, peer: PeerId) -> None:
        """A peer says that it is past this round and keeps nothing of it: what it was asked for is asked of others."""
        self._spent.add(peer)
        lacking = self._repairs.owed(peer).intersection(self.exchange.results.lacks())
        sources = [one for one in self.sources if one not in self._spent]
        if lacking and sources:
            self._fetch(sorted(lacking), sources)

    @property
    def forsaken(self) -> bool:
        """Whether there is a verdict, and most in reach who had its results keep them no more: the others have gone on, too."""
        sources = self.sources
        return self.agreement.commit is not None and 2 * len(self._spent.intersection(sources)) > len(sources)

    def lost(self, peer: PeerId, *, gone: bool) -> None:
        """The link to `peer` broke."""
        if gone:
            self._gone.add(peer)
            if self.exchange.opened is not None:
                self.lost_after_open.add(peer)
        self.exchange.lost(peer)
        self.agreement.lost(peer, self._now(), gone=gone)
        self.pump()

    def reach(self, peer: PeerId) -> None:
        """A link to `peer` is up."""
        self.agreement.reach(peer, self._now())
        self.exchange.reach(peer)
        self.pump()

    def tick(self) -> None:
        """Let time pass: see agreement.tick; say who holds us up; ask again for what a repair still lacks."""
        now, patience = self._now(), self.agreement.terms.patience
        self._listen(now)
        self.agreement.tick(now)
        exchange, committed = self.exchange, self.agreement.commit is not None
        opened, results = exchange.opened, exchange.results
        if results.wanted is not None and results.missing:
            # Those who have them go on to the next round, and keep them no longer than that takes.
            hurry = 1.0 if self._repairs.tries else exchange.hurry
            if now >= max(self._repairs.at, exchange.moved) + hurry * patience:
                self._repair()
        if opened is not None and not committed and results.missing:
            exchange.nudge()
        # Who only says that it has gone on may lie, or have nothing any more: it is asked for as long again.
        orphaned = now >= exchange.whole + ORPHANED * patience * (1 + bool(self.sources))
        if committed and results.missing and orphaned and not self._voters:
            self._void()
        elif opened is not None and not committed and results.missing and now >= exchange.moved + patience:
            if self.me in opened.alive and self._accused != opened.ballot:
                found = exchange.culprit(opened)
                early = found is not None and now < exchange.moved + exchange.bears.get(found[1], 1) * patience
                if not early:
                    self._accused = opened.ballot
                if found is not None and not early:
                    self.agreement.accuse(found[0], found[1], now)
        self.pump()

    def _listen(self, now: float) -> None:
        """Bytes of a frame that is on its way are progress, so that slow links are not taken for stuck peers: on an uplink
        that is shared by what is owed to all, the first whole chunk takes as long as nearly everything.
        """
        opened, (then, before) = self.exchange.opened, self._came
        if opened is None or not self.exchange.results.missing or now < then + self.agreement.terms.patience / 8:
            return
        came = {peer: self._outbox.came(peer) for peer in self.exchange.owing(opened)}
        self._came = (now, came)
        grown = sum(count - before[peer] for peer, count in came.items() if peer in before)
        if grown >= TRICKLE * (now - then):
            self.exchange.stirs()

    def pump(self) -> None:
        """Act on what the agreement has come to and send what it has to say."""
        opened, commit = self.agreement.opened, self.agreement.commit
        if commit is not None and (opened is None or commit.opened.ballot != opened.ballot):
            opened = commit.opened
        exchange = self.exchange
        self._tell()  # an Open before the data that it asks for: sealing and sending that takes milliseconds
        if opened is not None and opened is not exchange.opened:
            self.opened_at = self._now()
            exchange.open(opened)
            if opened.adopted is not None:
                self._want(opened.adopted)
        if commit is not None and exchange.results.wanted != commit.digest and not self.complete:
            self._want(commit.digest)
        self._tell()
        if self.complete or self.agreement.diverged:
            if not self._settled.is_set() and self.complete:
                self._phase(self.round, "commit")
                exchange.settle()
            self._settled.set()

    def _tell(self) -> None:
        """Send what the agreement has to say."""
        for to, message in self.agreement.take():
            for peer in sorted(self.agreement.reachable) if to is None else (to,):
                if peer != self.me:
                    self._outbox.control(peer, message)

    # --- repair

    def _want(self, digest: Digest) -> None:
        """The results are settled as `digest`: fetch what is missing or differs."""
        exchange, results = self.exchange, self.exchange.results
        results.settle(digest)
        lost = any(exchange.owners[index] not in self.agreement.reachable for index in results.lacks())
        untouched = exchange.opened is None or self.me not in exchange.opened.alive
        self._repairs.at = self._now()
        if results.missing and (lost or untouched or self.agreement.commit is None):
            self._repair()
        exchange.check()

    @property
    def sources(self) -> list[PeerId]:
        """Reachable peers that hold every result: those who voted for them; of a verdict, when none of these is left, those who
        say that they have gone on.
        """
        return self._voters or (sorted(self.agreement.past & self.agreement.reachable) if self.agreement.commit else [])

    @property
    def _voters(self) -> list[PeerId]:
        commit, opened = self.agreement.commit, self.exchange.opened
        voters = [proof.peer for proof in commit.votes] if commit else list(opened.sources) if opened else []
        return [peer for peer in voters if peer != self.me and peer in self.agreement.reachable]

    def _void(self) -> None:
        self._phase(self.round, "void")
        self.exchange.void()
        self.agreement.void(self._now())

    def _repair(self) -> None:
        sources = self.sources
        if sources:
            self._fetch(self.exchange.results.lacks(), [one for one in sources if one not in self._spent] or sources)

    def _fetch(self, lacking: Sequence[int], sources: Sequence[PeerId]) -> None:
        wanted = self.exchange.results.wanted
        if wanted is not None:
            for peer, part in self._repairs.plan(lacking, sources, self._now()).items():
                self._outbox.control(peer, Fetch(self.round, self.fragment, wanted, tuple(part)))

    def _serve(self, sender: PeerId, message: Fetch) -> None:
        exchange, opened = self.exchange, self.exchange.opened
        whole = exchange.results.digest == message.digest
        if opened is None or not (whole or exchange.part(message.digest)):
            return
        if self._outbox.later(sender) > 2 * IN_FLIGHT:
            return  # it has not even read what it asked for before
        exchange.asked(sender, message.indices)
        everything = tuple(range(len(exchange.results)))
        if whole:
            record = Record(self.round, self.fragment, opened.ballot, everything, exchange.results.hashes(everything))
            self._outbox.control(sender, record)
        for index in dict.fromkeys(message.indices):
            if index < len(everything) and (result := self.results[index]) is not None:
                frame = Frame(Result(self.round, self.fragment, opened.ballot, index), result)
                self._outbox.bulk(sender, frame, later=True)
