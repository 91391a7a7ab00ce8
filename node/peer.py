"""One peer of one run, from the first knock to the goodbye: what the daemon and the Python interface have in common.

Two stages, because the manifest says what is trained: `found` or `arrive` open the transport and know the run; `take_up` then
gets the model's parameters and makes the peer a member.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from thinwire.collectives.shards import grid
from thinwire.collectives.transport import REFUSED, Admit, Contact, Transport
from thinwire.compression import registry
from thinwire.compression.codec import Floats
from thinwire.swarm.errors import HintedError
from thinwire.swarm.identity import Identity, short
from thinwire.swarm.invite import Invite, Seed
from thinwire.swarm.manifest import ManifestMismatch, SignedManifest
from thinwire.swarm.preset import Preset
from thinwire.swarm.protocol import VERSION, Digest, Hello, PeerId, Refuse, Welcome
from thinwire.swarm.record import PeerRecord, RecordError
from thinwire.swarm.roster import Roster

from .checkpoint import CheckpointStore, Saved, SaveOutcome
from .directories import RunDirectory
from .disk import Disk
from .fragments import Layout
from .memory import AnchorFile, replace_file
from .outer import Read, Replica
from .presence import Emit, Presence
from .rounds import Rounds
from .session import Session
from .snapshot import FragmentState, PrivateState, Snapshot
from .waiting import Work

SEARCH_SECONDS = 60.0
"""How long a swarm is looked for before `join` gives up, when it is not told otherwise."""

PATIENCE = 2.0
"""Least seconds without progress before somebody acts."""

OWN_STATE = 5
"""Times that a newer state than our checkpoint's is asked for, before that one has to do."""

PROBATION = 2
"""Rounds without a vote after a restart: the one in progress, and one more, because it may have just been committed."""

MAX_RECORDS = 10
MAX_SEEDS = 4


class NoSwarm(HintedError):
    """None of the addresses of the invite answered, or none let us in."""

    exit_code: ClassVar[int] = 4


class Refused(HintedError):
    """The swarm is there and does not want us: another version or run."""

    exit_code: ClassVar[int] = 5


OpenTransport = Callable[[Admit], Awaitable[Transport]]
"""Opens the transport of this peer with the gate's decision given."""


@dataclass(frozen=True, slots=True)
class Doors:
    """The only ways to the world outside: clocks, randomness, disk. `now` is monotonic seconds, `wall` unix seconds."""

    now: Callable[[], float]
    wall: Callable[[], float]
    rng: random.Random
    disk: Disk


class Peer:
    """See the module. Made by `found` (the run's first peer) or `arrive` (with an invite)."""

    session: Session
    rounds: Rounds
    replica: Replica
    layout: Layout

    def __init__(
        self, identity: Identity, run_id: bytes, doors: Doors, directory: RunDirectory, preset: Preset, emit: Emit
    ) -> None:
        self.identity, self.run_id = identity, run_id
        self.transport: Transport
        self.signed: SignedManifest
        self.private: PrivateState | None = None
        """Private state of the checkpoint that `take_up` found, for the inner optimizer and the data."""
        self.kept: Digest | None = None
        """Digest of the state in the newest checkpoint, as far as we know."""
        self.doors, self._directory, self._preset, self._emit = doors, directory, preset, emit
        self.ready = False
        """Whether the session has begun: there are rounds, a replica and a roster to ask about."""
        self._running: asyncio.Task[None] | None = None
        self._anchors = AnchorFile(directory.path / "anchors.json", doors.disk)
        self._lived = directory.manifest.name in doors.disk.names(directory.path)
        self._store = CheckpointStore(directory.checkpoints, doors.disk, identity)

    # --- the first stage: the run

    async def found(self, signed: SignedManifest, open_transport: OpenTransport) -> bool:
        """Open a run of our own, or come back to it: True when peers of an earlier life still run it."""
        self._take(signed)
        await self._open(open_transport)
        anchors = self._anchors.load()
        return bool(anchors) and await self._meet(anchors, seconds=5.0, fatal=False)

    async def arrive(self, invite: Invite, open_transport: OpenTransport, search: float) -> None:
        """Find the swarm of an invite, within `search` seconds. Raises NoSwarm, Refused, ManifestMismatch."""
        await self._open(open_transport)
        contacts = [Contact(seed.address, seed.transport_key) for seed in invite.seeds]
        await self._meet((*contacts, *self._anchors.load()), seconds=search, fatal=True)

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
        self.presence = Presence(self.transport, roster, now=self.doors.now, emit=self._emit)
        self._running = asyncio.create_task(self.presence.run())

    async def _meet(self, contacts: Sequence[Contact], *, seconds: float, fatal: bool) -> bool:
        """Knock until somebody lets us in. When nobody does and it is `fatal`, raises the last lasting refusal, or NoSwarm.

        When it is not `fatal`, machines that answer that nobody listens there any more are not asked again.
        """
        hello = Hello(VERSION, self.run_id, self._record.wire)
        until, said = self.doors.now() + seconds, "nobody answered"
        last: HintedError | None = None
        while contacts:
            for contact in list(contacts):
                answer = await self.transport.meet(contact, hello)
                if isinstance(answer, Welcome):
                    try:
                        self._welcome(answer)
                        return True
                    except ManifestMismatch as error:
                        last, contacts = error, [other for other in contacts if other is not contact]
                        continue
                said = f"{contact.address}: {answer.detail or answer.code}"
                if answer.code == REFUSED and not fatal:
                    contacts = [other for other in contacts if other is not contact]
                if answer.code in ("version", "run", "signature", "banned") and fatal:
                    text = f"{contact.address} refused us ({answer.code}): {answer.detail}"
                    last, contacts = Refused(text, _ADVICE[answer.code]), [o for o in contacts if o is not contact]
            if self.doors.now() >= until:
                break
            await asyncio.sleep(0.2 + 0.8 * self.doors.rng.random())
        if not fatal:
            return False
        if last is not None:
            raise last
        raise NoSwarm(
            f"no peer of the swarm could be reached; {said}",
            "check that a peer of the swarm runs and that its address can be dialled from here, or ask for a new invite",
        )

    def _welcome(self, welcome: Welcome) -> None:
        self._take(SignedManifest(welcome.manifest, welcome.author, welcome.manifest_signature))
        for wire in (welcome.record, *welcome.records):
            try:
                record = PeerRecord.parse(wire, run_id=self.run_id, now=int(self.doors.wall()))
                self.presence.roster.learn(record, self.doors.now())
            except RecordError as error:
                self._emit("refused", {"peer": "", "detail": f"a record in the welcome: {error}"})

    def _take(self, signed: SignedManifest) -> None:
        """Check the run's manifest and keep a copy of its text for those who read checkpoints without us."""
        self.manifest = signed.verify(self.run_id)
        self.signed = signed
        try:
            replace_file(self._directory.manifest, self.doors.disk, signed.toml)
        except OSError as error:
            self._emit("alarm", {"detail": f"cannot write {self._directory.manifest}: {error.strerror}"})

    def _admit(self, hello: Hello, record: PeerRecord) -> Welcome | Refuse:
        """The gate's decision about a stranger whose record has been checked."""
        if not hasattr(self, "signed"):
            return Refuse("busy", "still looking for the swarm; knock again")
        roster = self.presence.roster
        roster.learn(record, self.doors.now())
        view = [peer for peer in roster.view.peers if peer not in (record.peer_id, self.identity.peer_id)]
        chosen = self.doors.rng.sample(view, min(MAX_RECORDS, len(view)))
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
        self, layout: Layout, theta: Floats, *, read: Read, write: Callable[[Floats], None], work: Work, joins: bool
    ) -> None:
        """Become a member with these parameters: from the own checkpoint or the swarm's state, whichever is newer.

        `theta` are the first parameters, the same on every peer (they follow from the manifest's seed). Raises
        ManifestMismatch when the model here is not the swarm's.
        """
        codec = registry.parse(self.manifest.exchange.codec)
        self.layout = layout
        self.replica = await work(partial(Replica, layout.digest, theta, () if joins else (self.identity.peer_id,)))
        del theta  # the replica has its own; this one would stay for as long as joining takes
        await self._restore(work)
        if not joins:
            # Nobody else runs this: whatever swarm there was, it goes on from here.
            self.replica.members = (self.identity.peer_id,)
            await work(self.replica.seal)
        self.session = Session(
            self.identity,
            self.manifest,
            self.run_id,
            presence=self.presence,
            replica=self.replica,
            codec=codec,
            grid=grid(layout.total, codec),
            now=self.doors.now,
            emit=self._emit,
            probation=PROBATION if joins and self._lived else 0,
            patience=PATIENCE,
        )
        self.rounds = Rounds(self.session, self.manifest, read=read, write=write, work=work)
        self.ready = True
        if joins:
            alone = int(SEARCH_SECONDS / PATIENCE)
            if not await self.rounds.enter(tries=OWN_STATE if self.replica.round else 0, alone=alone):
                raise NoSwarm("the swarm went away before it could give us its state", "ask for a new invite")
        else:
            await work(lambda: write(self.replica.theta))

    async def _restore(self, work: Work) -> None:
        loaded = await work(lambda: self._store.load(self.run_id))
        for remark in loaded.remarks:
            self._emit("checkpoint", {"detail": remark})
        snapshot = loaded.snapshot
        if snapshot is None:
            return
        try:
            await work(lambda: self._install(snapshot))
        except (KeyError, ValueError) as error:
            self._emit("checkpoint", {"detail": f"does not fit the model: {error}"})
            return
        self.private, self.kept = snapshot.private, self.replica.digest
        self._emit("restored", {"round": snapshot.round, "detail": str(loaded.path)})

    def _install(self, snapshot: Snapshot) -> None:
        replica, fragment = self.replica, snapshot.fragments[0]
        state = np.concatenate([self._flat(part) for part in (fragment.weights, fragment.momentum)])
        if state.size != replica.state.size:
            raise ValueError(f"{state.size // 2} parameters, the model has {self.layout.total}")
        replica.state[:] = state
        replica.round, replica.members = snapshot.round, snapshot.members
        replica.seal()

    def _flat(self, tensors: Mapping[str, np.ndarray]) -> Floats:
        return np.concatenate([np.asarray(tensors[piece.name], np.float32).reshape(-1) for piece in self.layout.pieces])

    def save(self, private: PrivateState | None) -> SaveOutcome:
        """Write a checkpoint. Blocks for the disk; the state must not change meanwhile, so in `work` or while that rests."""
        replica, split = self.replica, self.layout.split
        fragment = FragmentState(split(replica.theta), split(replica.momentum))
        snapshot = Snapshot(self.run_id, replica.round, replica.digest, replica.members, {0: fragment}, private)
        saved = self._store.save(snapshot, now=self.doors.wall(), suffix=f"{self.doors.rng.getrandbits(32):08x}")
        if isinstance(saved, Saved):
            self.kept = replica.digest
        return saved

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

    def drop_anchor(self) -> None:
        """Keep on disk where the others are."""
        records = [self.session.roster.record_of(peer) for peer in self.session.roster.view.peers]
        self._anchors.save(
            Contact(address, record.transport_key)
            for record in records
            if record is not None and record.peer_id != self.identity.peer_id
            for address in record.addresses[:1]
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
        members = self.replica.members
        settled = self.replica.round > 0 and self.identity.peer_id in members
        return members if settled else self.session.roster.view.peers

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far, all that was put on the wire."""
        return self.transport.totals()

    async def linger(self, seconds: float) -> None:
        """Stay, at most so long, until everyone here has the last round: some may still have to fetch it from us."""
        until, mine = self.doors.now() + seconds, self.replica.round
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
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.presence.close()

    def __repr__(self) -> str:
        return f"Peer({short(self.identity.peer_id)})"


_ADVICE = {
    "version": "install the version of thinwire that the swarm runs",
    "run": "the peer at that address runs something else now; ask for a new invite",
    "signature": "check that the clocks of both machines are right to within two minutes",
    "banned": "this key has misbehaved; see `thinwire id`",
}


__all__ = ["Doors", "ManifestMismatch", "NoSwarm", "Peer", "Refused"]
