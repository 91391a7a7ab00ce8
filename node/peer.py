"""One peer of one run, from the first knock to the goodbye: what the daemon and the Python interface have in common.

Two stages, because the manifest says what is trained: `found` or `arrive` open the transport and know the run; `take_up` then
gets the model's parameters and makes the peer a member.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from thinwire.collectives.transport import Contact, Transport
from thinwire.compression.codec import Floats
from thinwire.swarm.errors import HintedError
from thinwire.swarm.identity import Identity, short
from thinwire.swarm.invite import MAX_SEEDS, Invite, Seed
from thinwire.swarm.manifest import ManifestError, ManifestMismatch, SignedManifest
from thinwire.swarm.preset import Preset
from thinwire.swarm.protocol import VERSION, Hello, PeerId, Refuse, Welcome
from thinwire.swarm.record import PeerRecord, RecordError
from thinwire.swarm.roster import Roster
from thinwire.swarm.seat import Seating, seating

from .anchors import Anchors, contacts
from .chains import ChainedReplica
from .checkpoint import CheckpointStore, SaveOutcome
from .directories import RunDirectory
from .doors import Doors, OpenTransport
from .fragments import Layout
from .keep import Keep
from .knock import SEARCH_SECONDS, NoSwarm, Refused, knock, welcome
from .ledger import Lease
from .memory import replace_file
from .methods import check_codec, fitted, method_of
from .outer import Read, Replica, Write
from .power import FRESH, steps_by_power
from .presence import Emit, Presence
from .rounds import Lost, Rounds
from .session import Session
from .snapshot import PrivateState
from .turns import ChainedRounds
from .waiting import Work
from .watch import Watch

PATIENCE = 2.0
"""Least seconds without progress before somebody acts."""

OWN_STATE = 5
"""Times that a newer state than our checkpoint's is asked for, before that one has to do."""

PROBATION = 2
"""Rounds without a vote after a restart: the one in progress, and one more, because it may have just been committed."""


class Peer:
    """See the module. Made by `found` (the run's first peer) or `arrive` (with an invite)."""

    session: Session
    rounds: Rounds | ChainedRounds
    replica: Replica
    layout: Layout

    def __init__(
        self,
        identity: Identity,
        run_id: bytes,
        doors: Doors,
        directory: RunDirectory,
        preset: Preset,
        emit: Emit,
        site: str = "",
    ) -> None:
        self.identity, self.run_id = identity, run_id
        self.transport: Transport
        self.signed: SignedManifest
        self.private: PrivateState | None = None
        """Private state of the checkpoint that `take_up` found, for the inner optimizer and the data."""
        self.doors, self._directory, self._preset, self.emit, self._site = doors, directory, preset, emit, site
        self.lost: Lost | None = None
        """Brings back a fragment that nobody here has, where that can be."""
        self.beside: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """What is done from `take_up` on, for as long as we are there."""
        self.ready = False
        """Whether the session has begun: there are rounds, a replica and a roster to ask about."""
        self._running: asyncio.Task[None] | None = None
        self.anchors = Anchors(directory.path / "anchors.json", doors)
        self._lived = directory.manifest.name in doors.disk.names(directory.path)
        self.keep = Keep(CheckpointStore(directory.checkpoints, doors.disk, identity), run_id, doors, emit)

    # --- the first stage: the run

    async def found(self, signed: SignedManifest, open_transport: OpenTransport) -> bool:
        """Open a run of our own, or come back to it, see `Anchors.come_back`. Raises NoSwarm, Refused."""
        self._take(signed)
        await self._open(open_transport)
        return await self.anchors.come_back(self._knock)

    async def arrive(self, invite: Invite, open_transport: OpenTransport, search: float) -> None:
        """Find the swarm of an invite, within `search` seconds. Raises NoSwarm, Refused, ManifestMismatch."""
        await self._open(open_transport)
        seeds = [Contact(seed.address, seed.transport_key) for seed in invite.seeds]
        refusal = await self._knock((*seeds, *self.anchors.known()), search, ())
        if refusal is not None:
            raise refusal

    async def _open(self, open_transport: OpenTransport) -> None:
        self.transport = await open_transport(self._admit)
        record = PeerRecord.create(
            self.identity,
            run_id=self.run_id,
            addresses=self.transport.addresses()[:8],
            sequence=int(self.doors.wall() * 1000),
            issued=int(self.doors.wall()),
        )
        self.transport.learn(record)
        roster = Roster(
            self.identity,
            record,
            run_id=self.run_id,
            preset=self._preset,
            rng=self.doors.rng,
            now=self.doors.now(),
            wall=lambda: int(self.doors.wall()),
        )
        doors = self.doors
        self.presence = Presence(
            self.transport, roster, now=doors.now, emit=self._seen, site=self._site, aside=doors.aside
        )
        self.presence.watch = Watch(
            roster,
            self.presence.outbox,
            self.presence.live,
            now=self.doors.now,
            wall=self.doors.wall,
            emit=self.emit,
        )
        self._running = asyncio.create_task(self.presence.run())

    async def _knock(self, contacts: Sequence[Contact], seconds: float, lasting: Sequence[str]) -> HintedError | None:
        def hello() -> Hello:
            return Hello(VERSION, self.run_id, self.presence.roster.record.wire)

        return await knock(contacts, hello, self._welcome, self.transport, self.doors, seconds=seconds, lasting=lasting)

    def _welcome(self, told: Welcome) -> None:
        self._take(SignedManifest(told.manifest, told.author, told.manifest_signature))
        for wire in (told.record, *told.records):
            try:
                record = PeerRecord.parse(wire, run_id=self.run_id, now=int(self.doors.wall()))
                self.presence.roster.learn(record, self.doors.now())
            except RecordError as error:
                self.emit("refused", {"peer": "", "detail": f"a record in the welcome: {error}"})

    def _take(self, signed: SignedManifest) -> None:
        """Check the run's manifest and keep a copy of its text for those who read checkpoints without us.

        Raises ManifestMismatch.
        """
        manifest = signed.verify(self.run_id)
        try:
            check_codec(manifest, "the swarm's manifest")
        except ManifestError as error:  # its author has made what this version refuses to make
            raise ManifestMismatch(str(error), "the swarm may run another version of thinwire") from None
        self.manifest = manifest
        self.signed = signed
        for warning in self.manifest.warnings():
            self.emit("alarm", {"detail": warning})
        try:
            replace_file(self._directory.manifest, self.doors.disk, signed.toml)
        except OSError as error:
            self.emit("alarm", {"detail": f"cannot write {self._directory.manifest}: {error.strerror}"})

    def _admit(self, hello: Hello, record: PeerRecord) -> Welcome | Refuse:
        """The gate's decision about a stranger whose record has been checked."""
        if not hasattr(self, "signed"):
            return Refuse("busy", "still looking for the swarm; knock again")
        roster = self.presence.roster
        roster.learn(record, self.doors.now())
        return welcome(self.signed, roster, record.peer_id, self.doors.rng)

    # --- the second stage: the model

    async def take_up(
        self,
        layout: Layout,
        theta: Floats,
        *,
        read: Read,
        write: Write,
        work: Work,
        joins: bool,
        held: Collection[int] | None = None,
        beside: Work | None = None,
    ) -> None:
        """Become a member with these parameters: from the own checkpoint or the swarm's state, whichever is newer.

        `theta` are the first parameters, the same on every peer (they follow from the manifest's seed). `held`: the fragments
        that this peer has to do with, where each has rounds of its own; None: all. `beside`: as `work`, while that trains.
        Raises ManifestMismatch when the model here is not the swarm's, ManifestError when it is too large for what the manifest
        says, or cannot be held in parts.
        """
        method = method_of(self.manifest)
        codec, cut = fitted(self.manifest, layout)
        self.layout = layout
        members = () if joins else (self.identity.peer_id,)
        begin = partial(method.replica.begin, self.manifest, layout, codec, theta, members)
        if held is not None:
            if not (self.manifest.chained and joins):
                raise ManifestError(
                    "a peer holds some fragments only where fragments have rounds of their own, and somebody holds the others",
                    "begin the run with a peer that holds the whole model, and raise outer.overlap above steps / fragments",
                )
            begin = partial(begin, held=held)
        self.replica = await work(begin)
        await work(lambda: self.replica.keep_ledger(self.manifest))
        del theta  # the replica has its own; this one would stay for as long as joining takes
        self.private = await self.keep.restore(self.replica, layout, work)
        self.anchors.founds = not joins
        if not joins:
            # Nobody else runs this: whatever swarm there was, it goes on from here.
            self.replica.members = (self.identity.peer_id,)
            await work(self.replica.seal)
        self.session = method.session(
            self.identity,
            self.manifest,
            self.run_id,
            presence=self.presence,
            replica=self.replica,
            codec=codec,
            grid=cut,
            now=self.doors.now,
            emit=self.emit,
            probation=PROBATION if joins and self._lived else 0,
            patience=PATIENCE,
        )
        self.rounds = method.rounds(self.session, self.manifest, read=read, write=write, work=work)
        if isinstance(self.rounds, Rounds):
            self.rounds.beside = beside
        self.ready = True
        if not joins and self.replica.alike:
            self.drop_anchor()
        if joins:
            alone = int(SEARCH_SECONDS / PATIENCE)
            tries = OWN_STATE if self.replica.round else 0
            lost = partial(self.anchors.found_again, self.session, work) if self.anchors.returns else self.lost
            if not await self.rounds.enter(tries=tries, alone=alone, lost=lost):
                raise NoSwarm("the swarm went away before it could give us its state", self.anchors.advice)
        else:
            await work(lambda: write(self.replica.theta))
            if self.manifest.asynchronous:
                self.session.take_part()
        for one in self.beside:
            self.presence.attend(one())

    def save(self, private: PrivateState | None) -> SaveOutcome:
        """Write a checkpoint, see `Keep.save`."""
        return self.keep.save(self.replica, self.layout, private)

    # --- while it runs

    def invite(self) -> Invite | None:
        """An invite that names us first and then others; None when nobody can dial us."""
        own = self.transport.addresses()
        seeds = [Seed(own[0], self.identity.transport_public)] if own else []
        if self.ready:
            roster = self.session.roster
            seeds += [Seed(other.address, other.transport_key) for other in contacts(roster, roster.view.peers)]
        return Invite(self.run_id, tuple(seeds[:MAX_SEEDS])) if seeds else None

    def _seen(self, kind: str, fields: Mapping[str, object]) -> None:
        """Tell it; and some of who is here are worth knowing before the first round with them is over, which may take hours."""
        self.emit(kind, fields)
        if kind == "joined" and self.ready and self._alone and self.anchors.few:
            self.drop_anchor()

    def drop_anchor(self) -> None:
        """Keep on disk where the others are."""
        self.anchors.drop(self.session.roster, alone=self._alone)

    @property
    def _alone(self) -> bool:
        return self.replica.alike and self.replica.members == (self.identity.peer_id,)

    @property
    def running(self) -> asyncio.Task[None]:
        """The presence's task; it ends only with an error of ours."""
        assert self._running is not None
        return self._running

    def place(self) -> tuple[PeerId, ...]:
        """The group that shares the data among itself: the members, or before we are one, all that are here.

        Before the first round the founder is the only member on paper; it must not take everybody's shards for itself.
        """
        replica = self.replica
        # Who holds a later stage of the model has no use for data: in the first there are all others.
        first = replica.chains.get(0) if isinstance(replica, ChainedReplica) and self.manifest.pipeline.stages else None
        members = replica.members if first is None else first.replica.members
        # Where replicas differ the members are those of a pair.
        settled = self.replica.alike and self.replica.round > 0 and self.identity.peer_id in members
        return members if settled else self.session.roster.view.peers

    def announce(self, capabilities: int) -> None:
        """Say in our record what we hold, see swarm/seat.py."""
        self.presence.roster.announce(capabilities, self.doors.now())

    def seats(self, *, linked: bool = False) -> Seating:
        """Who holds which stage of the model, as the records of those say who are here; `linked`: and within our reach."""
        roster, reach = self.presence.roster, self.presence.live | {self.identity.peer_id}
        peers = [peer for peer in roster.view.peers if not linked or peer in reach]
        records = [record for peer in peers if (record := roster.record_of(peer)) is not None]
        return seating(records, self.manifest.pipeline.stages)

    def position(self) -> int:
        """Inner steps before those of the next round, as rounds count them: alike for all that are in it."""
        return self.manifest.steps_after(self.rounds.turn)

    def over(self, rounds: int) -> bool:
        """Whether so many rounds are behind us. Who holds a part makes the steps of the other parts' last rounds too."""
        held = isinstance(self.replica, ChainedReplica) and len(self.replica.chains) < self.replica.count
        return self.replica.round >= rounds and (not held or self.rounds.turn >= rounds)

    def steps(self, speed: float) -> int:
        """Inner steps of the next round for one that makes `speed` tokens/s, 0 when that is not known."""
        outer = self.manifest.outer
        if self.gathers:
            return 0
        if outer.work == "equal":
            return self.manifest.pace - self._cut
        oldest = self.replica.round - FRESH
        others = [theirs for _, theirs, number in list(self.session.stats.values()) if number > oldest]
        return steps_by_power(speed, others, outer.steps, outer.spread)

    @property
    def overlap(self) -> int:
        """Inner steps to make while the exchange that has begun is under way."""
        return min(self.manifest.overlap, self.manifest.pace - self._cut)

    @property
    def _cut(self) -> int:
        return self.rounds.cut if self.ready and isinstance(self.rounds, ChainedRounds) else 0

    def lease(self) -> Lease | None:
        """What of the data we may use in the next round; None where nobody keeps book."""
        replica, inner, me = self.replica, self.manifest.inner, self.identity.peer_id
        if replica.ledger is None:
            return None
        samples, members = inner.batch * inner.accumulate, replica.members
        if inner.global_batch and me in members:
            share, larger = divmod(inner.global_batch, len(members))
            samples = share + (members.index(me) < larger)
        return replica.ledger.lease(members, me, replica.round, samples)

    @property
    def idle_weight(self) -> int:
        """What a contribution weighs in which nothing was trained: a token where its round would else have none at all.

        That is the round that only gathers, and, where only members may train, the one of newcomers whose members are gone.
        """
        members, roster, me = self.replica.members, self.session.roster, self.identity.peer_id
        orphaned = not any(peer == me or roster.alive(peer) for peer in members)
        return int(self.gathers or (orphaned and self.replica.ledger is not None))

    @property
    def gathers(self) -> bool:
        """Whether the next round only makes those who are here members, so that they are waited for when they merge."""
        return self.manifest.outer.method == "merge" and not self.replica.round

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far, all that was put on the wire."""
        return self.transport.totals()

    async def linger(self, seconds: float) -> None:
        """Stay, at most so long, until everyone here has the last round: some may still have to fetch it from us."""
        until, last = self.doors.now() + seconds, self.manifest.run.rounds
        mine = min(self.replica.round, last or self.replica.round)  # who holds the last fragments only counts on
        roster = self.session.roster
        while self.doors.now() < until:
            if not any(roster.alive(peer) and roster.progress_of(peer) < mine for peer in self.session.live):
                return
            await asyncio.sleep(0.1)

    async def leave(self) -> None:
        """Say goodbye and close everything."""
        if self._running is None:
            return
        await self.presence.leave()
        await self.vanish()

    async def vanish(self) -> None:
        """Close everything without a word, as a process that is killed."""
        if self._running is None:
            return
        try:
            if self.ready:
                await self.rounds.rest()
        finally:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            await self.presence.close()

    def __repr__(self) -> str:
        return f"Peer({short(self.identity.peer_id)})"


__all__ = ["Doors", "NoSwarm", "OpenTransport", "Peer", "Refused"]
