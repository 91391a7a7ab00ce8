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
import msgspec
import numpy as np
from thinwire.collectives.aggregate import Rule, outliers
from thinwire.collectives.agreement import ORPHANED, Agreement
from thinwire.collectives.buffers import Pool
from thinwire.collectives.outbox import Outbox
from thinwire.collectives.outcome import Outcome
from thinwire.collectives.shards import Grid, owners
from thinwire.collectives.stash import Stash
from thinwire.collectives.statesync import IN_FLIGHT
from thinwire.compression.codec import Buffer, Codec, CodecError
from thinwire.swarm.frame import Frame
from thinwire.swarm.protocol import (
    MAX_GROUP,
    Ask,
    Ballot,
    Chunk,
    Digest,
    Fetch,
    Open,
    PeerId,
    Ready,
    Record,
    Result,
)

MAX_SOURCES = 4
"""Peers that a repair asks at once."""


def digest_of(hashes: Sequence[Digest | None]) -> Digest:
    """Digest of all results: blake3 over their hashes in grid order."""
    return blake3.blake3(b"".join(h for h in hashes if h is not None)).digest()


class Butterfly:
    """One peer's part in averaging one fragment in one round.

    Feed it frames with `hear`, time with `tick`, link changes with `lost` and `reach`; `announce` starts our own
    contribution; `wait` returns the Outcome. `usual` is the running norm of each chunk, and `pool` lends the memory of
    results; the caller keeps both from round to round. `attempt` is the number of our last announcement, if there was one in
    this round before. After the commit it stays as the server of results for those who
    missed some.
    """

    def __init__(
        self,
        agreement: Agreement,
        *,
        codec: Codec,
        grid: Grid,
        rule: Rule,
        seed: bytes,
        outbox: Outbox,
        now: Callable[[], float],
        usual: dict[int, float],
        pool: Pool | None = None,
        attempt: int = 0,
        phase: Callable[[int, str], None] = lambda round, name: None,
    ) -> None:
        self.agreement, self.grid, self.codec = agreement, grid, codec
        self.me, self.round, self.fragment = agreement.me, agreement.terms.round, agreement.terms.fragment
        self._seed, self._outbox, self._now, self._phase = seed, outbox, now, phase
        self._rule, self._usual, self._pool = rule, usual, pool or Pool()
        self._mean = np.empty(0, np.float32)
        count = len(grid)
        self._source: Sequence[Buffer] = ()
        self.attempt = attempt
        self._held: dict[tuple[PeerId, int], dict[int, Buffer]] = {}
        self._norms: dict[tuple[PeerId, int], dict[int, float]] = {}
        # What the usual norms become when these contributors commit; and, where all were beyond them, (these contributors,
        # what was usual for them, what is for the next).
        self._news: dict[bytes, dict[int, float]] = {}
        self._raised: dict[int, tuple[bytes, float, float]] = {}
        self._opened: Open | None = None
        self._keys: dict[Ballot, bytes] = {}
        self._key = b""
        self._owners: tuple[PeerId, ...] = ()
        self._mine: list[int] = []
        self._sent: set[tuple[PeerId, int]] = set()
        self._hashes: list[Digest | None] = [None] * count
        self._expected: list[Digest | None] = [None] * count
        self.results: list[Buffer | None] = [None] * count
        self._missing = count
        self._wanted: Digest | None = None
        self._asked_at = 0.0
        self._asked: dict[int, PeerId] = {}
        self._tries = 0
        self._early = Stash(2 * count + MAX_GROUP, 2 * count)
        self._accused: Ballot | None = None
        self._recorded: bytes = b""
        self._moved = 0.0
        self.opened_at: float | None = None
        """When the ballot in progress opened here: what came before was waiting, and says nothing about the links."""
        self.lost_after_open: set[PeerId] = set()
        """Peers whose process went away after the round had opened: they may have voted, and will not remember."""
        self._settled = asyncio.Event()

    # --- our own contribution

    def announce(
        self, source: Sequence[Buffer], *, weight: int, loss: float, speed: float, hashes: bytes | None = None
    ) -> None:
        """Take part with the encoded chunks `source` (grid order; not to be changed before the round ends).

        With `weight` 0 and no source the peer takes part (it owns chunks and gets the results) without contributing.
        """
        self._source, self.attempt = source, self.attempt + 1
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
            self.agreement.witness,
            float(loss),
            float(speed),
        )
        self._phase(self.round, "announce")
        self.agreement.announce(ready, self._now())
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
    def nbytes(self) -> int:
        """Bytes of the results that are here."""
        return sum(memoryview(result).nbytes for result in self.results if result is not None)

    @property
    def moved(self) -> float:
        """When something of use came last."""
        return self._moved

    @property
    def complete(self) -> bool:
        """Whether every result that was committed is here."""
        commit = self.agreement.commit
        return commit is not None and self._missing == 0 and digest_of(self._hashes) == commit.digest

    # --- events

    def hear(self, sender: PeerId, frame: Frame) -> None:
        """A checked frame of this round and fragment."""
        message = frame.message
        if getattr(message, "fragment", self.fragment) != self.fragment:
            return
        if isinstance(message, Chunk | Result | Record):
            self._take(sender, frame)
        elif isinstance(message, Fetch):
            self._serve(sender, message)
        else:
            self.agreement.hear(sender, message, frame.signature, self._now())
            if isinstance(message, Ready):
                self._forget(sender)
                self._replay()
        self.pump()

    def lost(self, peer: PeerId, *, gone: bool) -> None:
        """The link to `peer` broke."""
        if self._opened is not None and gone:
            self.lost_after_open.add(peer)
        self._sent = {key for key in self._sent if key[0] != peer}
        self.agreement.lost(peer, self._now(), gone=gone)
        self.pump()

    def reach(self, peer: PeerId) -> None:
        """A link to `peer` is up."""
        self.agreement.reach(peer, self._now())
        opened = self._opened
        if opened is not None and peer in opened.alive and self.agreement.commit is None:
            self._scatter(opened)
            for index in self._mine:
                self._send_result(opened, index, (peer,))
        self.pump()

    def tick(self) -> None:
        """Let time pass: see agreement.tick; say who holds us up; ask again for what a repair still lacks."""
        now, patience = self._now(), self.agreement.terms.patience
        self.agreement.tick(now)
        if self._wanted is not None and self._missing and now >= max(self._asked_at, self._moved) + patience:
            self._repair()
        if self.agreement.commit is not None and self._missing and now >= self._moved + ORPHANED * patience:
            if not self._sources():
                self._void(now)
        opened = self._opened
        stuck = opened is not None and self.agreement.commit is None and now >= self._moved + patience
        if (
            stuck
            and opened is not None
            and self.me in opened.alive
            and self._missing
            and self._accused != opened.ballot
        ):
            self._accused = opened.ballot
            self._accuse_idle(opened)
        self.pump()

    def pump(self) -> None:
        """Act on what the agreement has come to and send what it has to say."""
        opened, commit = self.agreement.opened, self.agreement.commit
        if commit is not None and (opened is None or commit.opened.ballot != opened.ballot):
            opened = commit.opened
        if opened is not None and opened is not self._opened:
            self._reopen(opened)
        if commit is not None and self._wanted != commit.digest and not self.complete:
            self._want(commit.digest)
        for to, message in self.agreement.take():
            for peer in sorted(self.agreement.reachable) if to is None else (to,):
                if peer != self.me:
                    self._outbox.control(peer, message)
        if self.complete or self.agreement.diverged:
            if not self._settled.is_set() and self.complete:
                self._phase(self.round, "commit")
                self._source, self._held, self._norms = (), {}, {}
                self._early.clear()
                self._usual.update(self._news.get(self._key, {}))
            self._settled.set()

    # --- a ballot opens

    def _reopen(self, opened: Open) -> None:
        self._opened, self._moved = opened, self._now()
        self.opened_at = self._moved
        key = blake3.blake3(msgspec.msgpack.encode(opened.contributors)).digest()
        self._keys[opened.ballot] = key
        if key != self._key:
            count = len(self.grid)
            self._key, self._recorded, self._missing, self._wanted = key, b"", count, None
            self._hashes, self._expected, self.results = [None] * count, [None] * count, [None] * count
        working = [peer for peer in opened.alive if peer not in opened.idle]
        before, self._owners = self._owners, owners(len(self.grid), opened.group, working, self._seed)
        self._mine = [i for i, owner in enumerate(self._owners) if owner == self.me and self.me in opened.alive]
        for index, owner in enumerate(before):
            if owner != self._owners[index]:
                self._expected[index] = None  # it was the word of another owner
        self._phase(self.round, "open")
        named = next((entry for entry in opened.contributors if entry.peer == self.me), None)
        if self.agreement.commit is None:
            if named is not None and opened.adopted is None and not self._names_us(opened):
                self.agreement.accuse(self.me, "withdrawn", self._now())
            self._scatter(opened)
            self._ask_unannounced(opened)
        if opened.adopted is not None:
            self._want(opened.adopted)
        self._replay()
        for index in self._mine:
            if self.results[index] is not None:
                self._send_result(opened, index, opened.alive)
            else:
                self._reduce(index)
        self._record()
        self._check_complete()

    def _ask_unannounced(self, opened: Open) -> None:
        """Who came in the middle of the round has not heard what was announced before; without it chunks mean nothing."""
        for entry in opened.contributors:
            ready = self.agreement.ready.get(entry.peer)
            if self.me in opened.alive and (ready is None or ready.attempt < entry.attempt):
                self._outbox.control(entry.peer, Ask(self.round, self.fragment))

    def _names_us(self, opened: Open) -> bool:
        named = next((entry for entry in opened.contributors if entry.peer == self.me), None)
        return named is not None and named.attempt == self.attempt and bool(self._source)

    def _scatter(self, opened: Open) -> None:
        if not self._names_us(opened):
            return
        held = self._held.setdefault((self.me, self.attempt), {})
        for index, owner in enumerate(self._owners):
            if owner == self.me:
                held[index] = self._source[index]
            elif (owner, index) not in self._sent:
                self._sent.add((owner, index))
                message = Chunk(self.round, self.fragment, self.attempt, index)
                self._outbox.bulk(owner, Frame(message, self._source[index]))

    def _forget(self, sender: PeerId) -> None:
        """Free what a peer sent for attempts that count no more."""
        ready = self.agreement.ready.get(sender)
        named = (
            {entry.attempt for entry in self._opened.contributors if entry.peer == sender} if self._opened else set()
        )
        for key in [key for key in self._held if key[0] == sender and ready and key[1] not in (ready.attempt, *named)]:
            del self._held[key]
            self._norms.pop(key, None)

    def _replay(self) -> None:
        """Take again what came before the message that gives it a meaning."""
        for sender, frame in self._early.take():
            self._take(sender, frame)

    def _take(self, sender: PeerId, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, Chunk):
            ready = self.agreement.ready.get(sender)
            waits = ready is None or message.attempt > ready.attempt
        else:
            assert isinstance(message, Result | Record)
            waits = not self._key or self._keys.get(message.ballot) != self._key
        if waits:
            if self._fits(frame) and not self.complete:
                self._early.put(sender, frame)
        elif isinstance(message, Chunk):
            self._take_chunk(sender, message, frame.payload)
        elif isinstance(message, Record):
            self._take_record(sender, message)
        else:
            assert isinstance(message, Result)
            self._take_result(sender, message, frame.payload)

    def _fits(self, frame: Frame) -> bool:
        """Whether a frame can be of this round's grid, as far as its lengths tell."""
        message, size = frame.message, memoryview(frame.payload).nbytes
        if not isinstance(message, Chunk | Result):
            return True
        return message.index < len(self.grid) and size <= self.codec.nbytes(self.grid.size(message.index))

    # --- owning chunks

    def _take_chunk(self, sender: PeerId, message: Chunk, payload: Buffer) -> None:
        ready = self.agreement.ready[sender]
        if message.attempt != ready.attempt or message.index >= len(self.grid) or self.agreement.commit is not None:
            return
        key = (sender, message.attempt)
        held = self._held.setdefault(key, {})
        mine = message.index < len(self._owners) and self._owners[message.index] == self.me
        # A chunk may come before the Open that makes it ours; of such we hold no more than one fragment, and one of each peer.
        spare = sum(len(chunks) for chunks in self._held.values()) < 2 * len(self.grid) + len(self.agreement.ready)
        if message.index in held or not (mine or spare):
            return
        reason = ""
        if blake3.blake3(payload).digest() != ready.hashes[32 * message.index : 32 * message.index + 32]:
            reason = "hash"
        else:
            try:
                square = self.codec.check(payload, self.grid.size(message.index))
                self._norms.setdefault(key, {})[message.index] = square
            except CodecError as error:
                reason = error.reason
        if reason:
            self.agreement.accuse(sender, reason, self._now())
            return
        held[message.index] = payload
        self._progress()
        self._reduce(message.index)
        self._record()

    def _reduce(self, index: int) -> None:
        opened = self._opened
        if opened is None or self._owners[index] != self.me or self.results[index] is not None:
            return
        payloads: list[Buffer] = []
        for entry in opened.contributors:
            payload = self._held.get((entry.peer, entry.attempt), {}).get(index)
            if payload is None:
                return
            payloads.append(payload)
        far = self._outliers(opened, index)
        if far:
            for peer in far:
                self.agreement.accuse(peer, "norm", self._now())
            return
        weights = [float(entry.weight) for entry in opened.contributors]
        size = self.grid.size(index)
        result = self._pool.lend(self.codec.nbytes(size))
        if self.codec.plain:
            self._rule(self.codec, payloads, weights, np.frombuffer(result, np.float32))
        else:
            if not self._mean.size:
                self._mean = np.empty(self.grid.chunk, np.float32)
            mean = self._mean[:size]
            self._rule(self.codec, payloads, weights, mean)
            self.codec.encode(mean, np.frombuffer(result, np.uint8))
        self._accept(index, result, blake3.blake3(result).digest())
        self._send_result(opened, index, opened.alive)

    def _send_result(self, opened: Open, index: int, to: Sequence[PeerId]) -> None:
        result = self.results[index]
        if result is not None:
            frame = Frame(Result(self.round, self.fragment, opened.ballot, index), result)
            for peer in to:
                if peer != self.me:
                    self._outbox.bulk(peer, frame)

    def _outliers(self, opened: Open, index: int) -> tuple[PeerId, ...]:
        keys = {entry.peer: (entry.peer, entry.attempt) for entry in opened.contributors}
        norms = {
            peer: self._norms[key][index] ** 0.5 for peer, key in keys.items() if index in self._norms.get(key, ())
        }
        key, before, raised = self._raised.get(index, (b"", 0.0, self._usual.get(index, 0.0)))
        usual = before if key == self._key else raised
        far, after = outliers(norms, usual)
        if far and all(peer in far for peer, norm in norms.items() if norm > 0.0):
            self._raised[index] = (self._key, usual, after)
        else:
            self._news.setdefault(self._key, {})[index] = after
        return far

    def _record(self) -> None:
        opened = self._opened
        done = bool(self._mine) and all(self.results[i] is not None for i in self._mine)
        if opened is None or not done or self._recorded == msgspec.msgpack.encode(opened.ballot):
            return
        self._recorded = msgspec.msgpack.encode(opened.ballot)
        hashes = b"".join(h for i in self._mine if (h := self._hashes[i]) is not None)
        record = Record(self.round, self.fragment, opened.ballot, tuple(self._mine), hashes)
        self._phase(self.round, "record")
        for peer in opened.alive:
            if peer != self.me:
                self._outbox.control(peer, record)

    # --- receiving results

    def _take_result(self, sender: PeerId, message: Result, payload: Buffer) -> None:
        index = message.index
        if index >= len(self.grid) or self.results[index] is not None:
            return
        found, expected = blake3.blake3(payload).digest(), self._expected[index]
        try:
            self.codec.check(payload, self.grid.size(index))
        except CodecError:
            expected = b""  # what cannot be decoded must never be voted for, whatever its owner signed
        if expected not in (None, found):
            self.agreement.accuse(sender, "result", self._now())
        elif expected is not None or sender == self._owners[index]:
            self._accept(index, payload, found)

    def _take_record(self, sender: PeerId, record: Record) -> None:
        if len(record.hashes) != 32 * len(record.indices) or any(i >= len(self.grid) for i in record.indices):
            return
        if self.complete:
            return
        whole = record.indices == tuple(range(len(self.grid))) and blake3.blake3(record.hashes).digest() == self._wanted
        for at, index in enumerate(record.indices):
            expected = record.hashes[32 * at : 32 * at + 32]
            if not whole and self._owners[index] != sender:
                continue
            self._expected[index] = expected
            if self._hashes[index] not in (None, expected):
                self._hashes[index], self.results[index] = None, None
                self._missing += 1
        self._check_complete()

    def _accept(self, index: int, payload: Buffer, found: Digest) -> None:
        self.results[index], self._hashes[index] = payload, found
        self._missing -= 1
        self._progress()
        self._check_complete()

    def _check_complete(self) -> None:
        if self._missing:
            return
        known = all(self._owners[i] == self.me or e is not None for i, e in enumerate(self._expected))
        if known or self._wanted is not None:
            digest = digest_of(self._hashes)
            if self._wanted in (None, digest):
                self._phase(self.round, "vote")
                self.agreement.complete(digest, self._now())

    def _progress(self) -> None:
        self._moved = self._now()
        self.agreement.progress(self._moved)

    def _accuse_idle(self, opened: Open) -> None:
        for entry in opened.contributors:
            held = self._held.get((entry.peer, entry.attempt), {})
            if any(index not in held and self.results[index] is None for index in self._mine):
                reason = "chunk missing" if entry.peer in self.agreement.ready else "not announced"
                self.agreement.accuse(entry.peer, reason, self._now())
                return
        for index, owner in enumerate(self._owners):
            if self.results[index] is None and owner != self.me:
                self.agreement.accuse(owner, "result missing", self._now())
                return

    # --- repair

    def _want(self, digest: Digest) -> None:
        """The results are settled as `digest`: fetch what is missing or differs."""
        self._wanted = digest
        if self._missing == 0 and digest_of(self._hashes) != digest:
            count = len(self.grid)
            self._hashes, self.results, self._missing = [None] * count, [None] * count, count
        owner_lost = any(
            result is None and self._owners[i] not in self.agreement.reachable for i, result in enumerate(self.results)
        )
        untouched = self._opened is None or self.me not in self._opened.alive
        self._asked_at = self._now()
        if self._missing and (owner_lost or untouched or self.agreement.commit is None):
            self._repair()
        self._check_complete()

    def _sources(self) -> list[PeerId]:
        """Reachable peers that hold every result."""
        commit, opened = self.agreement.commit, self._opened
        voters = [proof.peer for proof in commit.votes] if commit else list(opened.sources) if opened else []
        return [peer for peer in voters if peer != self.me and peer in self.agreement.reachable]

    def _void(self, now: float) -> None:
        self._phase(self.round, "void")
        self._opened, self._key, self._wanted = None, b"", None
        self.agreement.void(now)

    def _repair(self) -> None:
        sources = self._sources()
        if not sources or self._wanted is None:
            return
        self._asked_at = self._now()
        first, self._tries = self._tries, self._tries + 1
        chosen = [sources[(first + i) % len(sources)] for i in range(min(MAX_SOURCES, len(sources)))]
        parts: dict[PeerId, list[int]] = {}
        for at, index in enumerate(i for i, result in enumerate(self.results) if result is None):
            peer = chosen[at % len(chosen)]
            if peer == self._asked.get(index):
                peer = chosen[(at + 1) % len(chosen)]  # it has not answered
            self._asked[index] = peer
            parts.setdefault(peer, []).append(index)
        for peer, part in parts.items():
            self._outbox.control(peer, Fetch(self.round, self.fragment, self._wanted, tuple(part)))

    def _serve(self, sender: PeerId, message: Fetch) -> None:
        opened = self._opened
        if opened is None or self._missing or digest_of(self._hashes) != message.digest:
            return
        if self._outbox.later(sender) > 2 * IN_FLIGHT:
            return  # it has not even read what it asked for before
        hashes = b"".join(h for h in self._hashes if h is not None)
        everything = tuple(range(len(self.grid)))
        self._outbox.control(sender, Record(self.round, self.fragment, opened.ballot, everything, hashes))
        for index in dict.fromkeys(message.indices):
            if index < len(self.grid) and (result := self.results[index]) is not None:
                frame = Frame(Result(self.round, self.fragment, opened.ballot, index), result)
                self._outbox.bulk(sender, frame, later=True)
