"""One peer of one run, from the first knock to the goodbye: what the daemon and the Python interface have in common.

Two stages, because the manifest says what is trained: `found` or `arrive` open the transport and know the run; `take_up` then
gets the model's parameters and makes the peer a member.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from thinwire.collectives.transport import REFUSED, Contact, Transport
from thinwire.compression.codec import Floats
from thinwire.swarm.errors import HintedError
from thinwire.swarm.identity import Identity, short
from thinwire.swarm.invite import Invite, Seed
from thinwire.swarm.manifest import ManifestError, ManifestMismatch, SignedManifest
from thinwire.swarm.preset import Preset
from thinwire.swarm.protocol import VERSION, Hello, PeerId, Refuse, Welcome
from thinwire.swarm.record import PeerRecord, RecordError
from thinwire.swarm.roster import Roster
from thinwire.swarm.seat import Seating, seating

from .chains import ChainedReplica
from .chainsession import ChainedSession
from .checkpoint import CheckpointStore, SaveOutcome
from .directories import RunDirectory
from .doors import Doors, OpenTransport
from .fragments import Layout
from .keep import Keep
from .knock import NoSwarm, Refused, knock
from .ledger import Lease
from .memory import MOST, AnchorFile, replace_file
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

SEARCH_SECONDS = 60.0
"""How long a swarm is looked for before `join` gives up, when it is not told otherwise."""

BACK_SECONDS = 5.0
"""How long a founder that comes back and was alone looks for peers that still run what it founded."""

PATIENCE = 2.0
"""Least seconds without progress before somebody acts."""

OWN_STATE = 5
"""Times that a newer state than our checkpoint's is asked for, before that one has to do."""

PROBATION = 2
"""Rounds without a vote after a restart: the one in progress, and one more, because it may have just been committed."""

MAX_RECORDS = 10
MAX_SEEDS = 4


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
        self._anchors = AnchorFile(directory.path / "anchors.json", doors.disk)
        self._returns = False
        """Whether we have founded this run before, and were its only member when we left it."""
        self._lived = directory.manifest.name in doors.disk.names(directory.path)
        self.keep = Keep(CheckpointStore(directory.checkpoints, doors.disk, identity), run_id, doors, emit)

    # --- the first stage: the run

    async def found(self, signed: SignedManifest, open_transport: OpenTransport) -> bool:
        """Open a run of our own, or come back to it: True when peers of an earlier life still run it.

        Who was in a swarm with others and can reach none of them is cut off, for all it knows, and they go on: it does not
        begin the run anew beside them. Not so when it was alone before, or when nobody listens at their addresses any more.
        Raises NoSwarm, Refused.
        """
        self._take(signed)
        await self._open(open_transport)
        anchors = list(self._anchors.load())
        if not anchors:
            return False
        self.doors.rng.shuffle(anchors)  # the first may all be gone, and each of them takes its time
        # A machine that answers that nobody listens there any more need not be asked again.
        alone = self._returns = self._anchors.alone
        refusal = await self._knock(anchors, BACK_SECONDS if alone else SEARCH_SECONDS, (REFUSED,))
        if refusal is None or alone or (isinstance(refusal, (NoSwarm, Refused)) and refusal.nobody):
            return refusal is None
        if isinstance(refusal, Refused):
            raise refusal
        raise NoSwarm(
            f"none of the {len(anchors)} peers that this run had can be reached, and they may go on with it",
            f"start again when they can; if they are gone for good, remove {self._directory.path / 'anchors.json'} first",
        )

    async def arrive(self, invite: Invite, open_transport: OpenTransport, search: float) -> None:
        """Find the swarm of an invite, within `search` seconds. Raises NoSwarm, Refused, ManifestMismatch."""
        await self._open(open_transport)
        contacts = [Contact(seed.address, seed.transport_key) for seed in invite.seeds]
        refusal = await self._knock((*contacts, *self._anchors.load()), search, ())
        if refusal is not None:
            raise refusal

    async def _open(self, open_transport: OpenTransport) -> None:
        self.transport = await open_transport(self._admit)
        self._record = PeerRecord.create(
            self.identity,
            run_id=self.run_id,
            addresses=self.transport.addresses()[:8],
            sequence=int(self.doors.wall() * 1000),
            issued=int(self.doors.wall()),
        )
        self.transport.learn(self._record)
        roster = Roster(
            self.identity,
            self._record,
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
        hello = Hello(VERSION, self.run_id, self._record.wire)
        return await knock(contacts, hello, self._welcome, self.transport, self.doors, seconds=seconds, lasting=lasting)

    def _welcome(self, welcome: Welcome) -> None:
        self._take(SignedManifest(welcome.manifest, welcome.author, welcome.manifest_signature))
        for wire in (welcome.record, *welcome.records):
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
        others = roster.others
        if roster.alive(record.peer_id):
            others.remove(record.peer_id)
        chosen = self.doors.rng.sample(others, min(MAX_RECORDS, len(others)))
        records = tuple(known.wire for peer in chosen if (known := roster.record_of(peer)) is not None)
        return Welcome(
            roster.record.wire,
            self.signed.toml,
            self.signed.author,
            self.signed.signature,
            records,
            endpoint="",
            bulk="",
            secret=bytes(32),
        )

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
            lost = partial(self._again, work) if self._returns else self.lost
            if not await self.rounds.enter(tries=tries, alone=alone, lost=lost):
                hint = "start again: alone, or where all say that they have no state, this founder founds its run again"
                raise NoSwarm(
                    "the swarm went away before it could give us its state",
                    hint if self._returns else "ask for a new invite",
                )
        else:
            await work(lambda: write(self.replica.theta))
            if self.manifest.asynchronous:
                self.session.take_part()
        for one in self.beside:
            self.presence.attend(one())

    async def _again(self, work: Work, fragment: int) -> bool:
        """Go on alone, or found the run once more: those who came after the last round that we had alone have no state."""
        session, me = self.session, self.identity.peer_id
        session = session.links[fragment] if isinstance(session, ChainedSession) else session
        replica = session.replica
        if not set(self.presence.roster.view.peers) - {me} <= set(session.states.without):
            return False  # who may have one has not said that it does not, and may be rounds ahead

        def change() -> None:
            replica.members = (me,)

        await session.change(work, change)
        session.brought_back()
        return True

    def save(self, private: PrivateState | None) -> SaveOutcome:
        """Write a checkpoint, see `Keep.save`."""
        return self.keep.save(self.replica, self.layout, private)

    # --- while it runs

    def invite(self) -> Invite | None:
        """An invite that names us first and then others; None when nobody can dial us."""
        own = self.transport.addresses()
        seeds = [Seed(own[0], self.identity.transport_public)] if own else []
        for peer in self.session.roster.view.peers if self.ready else ():
            record = self.session.roster.record_of(peer)
            if record is not None and peer != self.identity.peer_id and record.addresses:
                seeds.append(Seed(record.addresses[0], record.transport_key))
        return Invite(self.run_id, tuple(seeds[:MAX_SEEDS])) if seeds else None

    def _seen(self, kind: str, fields: Mapping[str, object]) -> None:
        """Tell it; and some of who is here are worth knowing before the first round with them is over, which may take hours."""
        self.emit(kind, fields)
        alone = self.ready and self.replica.alike and self.replica.members == (self.identity.peer_id,)
        if kind == "joined" and alone and self._anchors.few:
            self.drop_anchor()

    def drop_anchor(self) -> None:
        """Keep on disk where the others are."""
        peers = self.session.roster.view.peers
        if len(peers) > MOST:
            peers = tuple(self.doors.rng.sample(peers, MOST))
        records = [self.session.roster.record_of(peer) for peer in peers]
        self._anchors.save(
            (
                Contact(address, record.transport_key)
                for record in records
                if record is not None and record.peer_id != self.identity.peer_id
                for address in record.addresses[:1]
            ),
            alone=self.replica.alike and self.replica.members == (self.identity.peer_id,),
        )

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
