"""Peer of one run, from the join handshake to its departure; for the daemon and the Python interface.

It has two stages, because the manifest defines the model: `found` or `arrive` opens the transport and gets the
manifest; `take_up` then gets the model's parameters and makes the peer a member.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from thinwire.collectives.transport.interface import Transport
from thinwire.compression.core.types import Floats
from thinwire.compression.device import HOST
from thinwire.node.membership.handler import Handler, Topic
from thinwire.node.membership.join import SEARCH_SECONDS, NoSwarm
from thinwire.node.membership.lost_peers import contacts_of
from thinwire.node.membership.presence import Presence
from thinwire.node.methods.fragments.fragment_sessions import FragmentSessions
from thinwire.node.methods.registry import fitted, method_of
from thinwire.node.outer.own_lineage import continue_alone, report
from thinwire.node.outer.round_loop import Lost, RoundLoop
from thinwire.node.outer.session import Session, SessionContext
from thinwire.node.peer.admission import Admission
from thinwire.node.peer.known_peers import KnownPeers
from thinwire.node.peer.workload import Workload
from thinwire.node.runtime.asyncio_extra import Work
from thinwire.node.runtime.directories import RunDirectory
from thinwire.node.runtime.environment import Environment, OpenTransport
from thinwire.node.runtime.event_log import Emit
from thinwire.node.state.checkpoint_store import CheckpointStore, SaveOutcome
from thinwire.node.state.checkpointer import Checkpointer, CheckpointsLost
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Replica
from thinwire.node.state.replica_buffers import ParameterWrite, Read
from thinwire.node.state.snapshot import PrivateState
from thinwire.node.state.vote_file import VoteFile
from thinwire.node.training.models.initial_weights import digest_of, missing_weights, not_finite, weights_not_finite
from thinwire.swarm.identity.admission_token import TokenError
from thinwire.swarm.identity.identity import Identity, peer_id_of, short
from thinwire.swarm.identity.invite import MAX_SEEDS, Invite, Seed
from thinwire.swarm.identity.stage_claim import Seating, seating
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.manifest.manifest import Manifest, ManifestError, ManifestMismatch
from thinwire.swarm.manifest.parser import SignedManifest
from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.messages.registry import Fork

PATIENCE = 2.0
"""Least patience of a round, in seconds without progress."""

OWN_STATE = 5
"""Maximum number of questions for a newer state than our checkpoint's before that is used."""

OWN_SEEDS = 2
"""Most of our own addresses in an invite: one for the internet, one for this network."""


class Peer:
    """Peer of one run. Call `found` (the run's first peer) or `arrive` (with an invite), then `take_up`."""

    session: Session
    rounds: RoundLoop
    workload: Workload
    replica: Replica
    layout: Layout

    def __init__(
        self,
        identity: Identity,
        run_id: bytes,
        environment: Environment,
        directory: RunDirectory,
        preset: Preset,
        emit: Emit,
        site: str = "",
        name: str = "",
    ) -> None:
        self.identity, self.run_id = identity, run_id
        self.private: PrivateState | None = None
        """Private state of the checkpoint that `take_up` found, for the inner optimizer and the data."""
        self.environment, self._directory, self.emit = environment, directory, emit
        self._held: Collection[int] | None = None
        self._recover: Lost | None = None
        self._arrived = False
        self._tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
        self.ready = False
        """True if the session exists, with rounds, a workload, a replica and a roster."""
        self.known_peers = KnownPeers(directory.path / "anchors.json", environment)
        self.admission = Admission(
            identity, run_id, environment, directory, self.known_peers, preset, self._on_event, site, name
        )
        self.checkpointer = Checkpointer(
            CheckpointStore(directory.checkpoints, environment.disk, identity), run_id, environment, emit
        )

    # First stage: the run

    async def found(self, signed: SignedManifest, open_transport: OpenTransport) -> bool:
        """Found a run, or return to it, see `KnownPeers.come_back`. Raises NoSwarm, Refused."""
        return await self.admission.found(signed, open_transport)

    async def arrive(self, invite: Invite, open_transport: OpenTransport, search: float) -> bool:
        """Find the swarm of an invite within `search` seconds, see `Admission.arrive`."""
        self._arrived = True
        return await self.admission.arrive(invite, open_transport, search)

    @property
    def transport(self) -> Transport:
        """The network, once the first stage has opened it."""
        return self.admission.transport

    @property
    def presence(self) -> Presence:
        """Links, membership and routing of messages, once the first stage has opened them."""
        return self.admission.presence

    @property
    def manifest(self) -> Manifest:
        """Manifest of the run, once the first stage has it."""
        return self.admission.known.manifest

    # Second stage: the model

    def hold(
        self,
        fragments: Collection[int] | None,
        handlers: Mapping[Topic, Handler] = MappingProxyType({}),
        *,
        recover: Lost | None = None,
        tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        """Train only these fragments (None: all), if each has separate rounds. Call before `take_up`.

        `handlers`: of messages about pipeline stages. `recover`: recovers a fragment that no reachable peer has, if possible.
        `tasks`: run from `take_up` until the departure.
        """
        self._held, self._recover, self._tasks = fragments, recover, tasks
        for topic, handler in handlers.items():
            self.presence.attach(topic, handler)

    async def take_up(
        self,
        layout: Layout,
        theta: Floats,
        *,
        read: Read,
        write: ParameterWrite,
        work: Work,
        joins: bool,
        beside: Work | None = None,
        on_commit: Callable[[], None] = lambda: None,
        device: torch.device = HOST,
    ) -> None:
        """Become a member with the state of our own checkpoint or of the swarm, whichever is newer.

        `theta`: first parameters, the same on every peer (derived from the manifest's seed), unless the founder was given
        others. `beside`: like `work`, while that trains. `on_commit`: see SessionContext. `device` has the parameters. Raises
        ManifestMismatch if the model here is not the swarm's, ManifestError if the model is too large for the manifest's
        codec, or cannot be held in parts, WeightsError if the first parameters of a founder are not finite, or the manifest
        names others.
        """
        named = self.manifest.first_weights
        given = not named or await work(partial(digest_of, theta)) == named
        self.layout = layout
        broken = await self._make_replica(theta, work, joins, device)
        del theta  # The replica has a copy; this one would remain in memory for the whole join.
        await self._restore(work, joins)
        if not joins and not given and not self.replica.round:
            raise missing_weights(named)
        if broken and not joins and not self.replica.round:
            raise weights_not_finite(broken)
        self.known_peers.founds = not joins
        votes = {number: self._votes(number) for number, _, _ in self.replica.each(layout)}
        forks = [] if joins else await self._forks(votes, work)
        method = method_of(self.manifest)
        self.session = method.session(self._session_context(votes, joins, on_commit), self.replica)
        self.presence.attach(Topic.ROUNDS, self.session)
        self.rounds = method.rounds(self.session, self.manifest, read=read, write=write, work=work, beside=beside)
        self.workload = Workload(
            self.manifest, self.identity.peer_id, replica=self.replica, session=self.session, rounds=self.rounds
        )
        self.ready = True
        for fork in forks:
            report(fork, self.emit)
        if joins:
            await self._enter(work, given)
        else:
            await work(lambda: self.replica.write_model(write))
            self.rounds.take_part()
        self.store_known_peers()
        for one in self._tasks:
            self.presence.attend(one())

    async def _make_replica(self, theta: Floats, work: Work, joins: bool, device: torch.device) -> str:
        """Make the replica; return the first parameter that is not finite, if any."""
        method, layout = method_of(self.manifest), self.layout
        codec, cut = fitted(self.manifest, layout)
        begin = partial(method.replica.begin, self.manifest, layout, codec, cut, theta, ())
        if self._held is not None:
            if not (method.partial and joins):
                raise ManifestError(
                    "a peer can hold some fragments only if fragments have separate rounds and other peers hold the others",
                    "begin the run with a peer that holds the whole model, and raise outer.overlap above steps / fragments",
                )
            begin = partial(begin, held=self._held)
        broken: str
        self.replica, broken = await work(partial(_begun, begin, theta, layout))
        await work(lambda: self.replica.keep_ledger(self.manifest))
        for _, replica, _ in self.replica.each(layout):
            replica.encode_on(device)
            replica.use_files(self.environment, self._directory.path)
        return broken

    async def _restore(self, work: Work, joins: bool) -> None:
        """Load the newest checkpoint. Raises an error if this peer needs one and has none."""
        try:
            self.private = await self.checkpointer.restore(self.replica, self.layout, work)
        except ManifestMismatch as error:
            if not joins:  # Rounds of this model would replace the checkpoints of the other one.
                raise
            self.emit("checkpoint", {"detail": str(error)})
        # Only a founder begins a run, and not beside peers that it could not reach.
        if (self._arrived or self.known_peers.cut_off) and self.checkpointer.digest is None:
            self.known_peers.returns = False
            if not joins:
                raise NoSwarm(
                    "no peer of the run was found, and no checkpoint of it can be read",
                    "start again when other peers can be reached, or restore the run's folder",
                )
        # Rounds from the first weights would follow, and replace what is left.
        unreadable = self.checkpointer.unreadable
        if not joins and unreadable is not None:
            again = "" if unreadable.other_format else "; or remove it, and the run begins again at round 0"
            found = f"no checkpoint of the run can be read: {max(unreadable.remarks)}"
            advice = unreadable.advice(self._directory.checkpoints) + again
            if self.known_peers.others and not unreadable.other_format:
                raise NoSwarm(
                    f"{found}; no other peer of the run can be reached",
                    f"start another peer of the run, and this one takes its state; else {advice}",
                )
            raise CheckpointsLost(found, advice)

    async def _forks(self, votes: Mapping[int, VoteFile], work: Work) -> list[Fork]:
        """Return the forks with which this peer continues alone, see `continue_alone`."""
        forks: list[Fork] = []
        keyring, token = Keyring(self.identity, self.run_id, lambda peer: None), self.presence.roster.record.token
        for number, replica, _ in self.replica.each(self.layout):
            begin_alone = partial(continue_alone, replica, number, votes[number], keyring, token)
            if (fork := await work(begin_alone)) is not None:
                forks.append(fork)
        return forks

    def _session_context(
        self, votes: Mapping[int, VoteFile], joins: bool, on_commit: Callable[[], None]
    ) -> SessionContext:
        return SessionContext(
            identity=self.identity,
            manifest=self.manifest,
            run_id=self.run_id,
            presence=self.presence,
            now=self.environment.now,
            emit=self.emit,
            entered=not joins,
            patience=PATIENCE,
            votes=votes.__getitem__,
            on_commit=on_commit,
            founder=peer_id_of(self.admission.known.signed.author),
        )

    async def _enter(self, work: Work, given: bool) -> None:
        """Get the state of the swarm. given: the first parameters are those that the manifest names."""
        alone = int(SEARCH_SECONDS / PATIENCE)
        tries = OWN_STATE if self.replica.round else 0
        returns = self.known_peers.returns and given
        lost = partial(self.known_peers.found_again, self.session, work) if returns else self._recover
        if not await self.rounds.enter(tries=tries, alone=alone, lost=lost):
            raise NoSwarm("the swarm disappeared before it sent its state", self.known_peers.advice)

    def _votes(self, fragment: int) -> VoteFile:
        """Return the votes of a fragment; an alarm reports if they are lost."""
        path = self._directory.votes(fragment)

        def report(reason: str) -> None:
            detail = f"{path}: {reason}; this peer votes again when a round has made it a member"
            self.emit("alarm", {"detail": detail})

        return VoteFile(path, self.environment.disk, self.environment.rng, self.environment.wall, report)

    def save(self, private: PrivateState | None) -> SaveOutcome:
        """Write a checkpoint, see `Checkpointer.save`."""
        return self.checkpointer.save(self.replica, self.layout, private)

    # While it runs

    def invite(self) -> Invite | None:
        """Return an invite that names this peer first and then others.

        None if this peer cannot be dialled, or may not invite others.
        """
        own = self.presence.roster.record.addresses[:OWN_SEEDS]
        seeds = [Seed(address, self.identity.transport_public) for address in own]
        if self.ready:
            roster = self.session.roster
            seeds += [
                Seed(other.address, other.transport_key) for other in contacts_of(roster, roster.peers.view.peers)
            ]
        try:
            return self.admission.inviter.invite(Invite(self.run_id, tuple(seeds[:MAX_SEEDS]))) if seeds else None
        except TokenError:
            return None

    def _on_event(self, kind: str, fields: Mapping[str, object]) -> None:
        """Log an event, and store the bans or known peers that it changes.

        The first peers are stored when they join: the first round, after which all are stored, may take hours.
        """
        self.emit(kind, fields)
        if kind in ("banned", "pardoned", "revoked"):
            self.admission.save_bans()
        if kind == "joined" and self.ready and self.known_peers.few:
            self.store_known_peers()

    def store_known_peers(self) -> None:
        """Store the addresses of the other peers."""
        self.known_peers.store(self.session.roster, alone=self._alone, absent=self.admission.absent)

    @property
    def _alone(self) -> bool:
        return self.replica.alike and self.replica.members == (self.identity.peer_id,)

    @property
    def fragments(self) -> FragmentSessions:
        """Sessions of a run whose fragments have separate rounds."""
        assert isinstance(self.session, FragmentSessions)
        return self.session

    @property
    def running(self) -> asyncio.Task[None]:
        """Task of the presence; it ends only with an error of our own."""
        assert self.admission.running is not None
        return self.admission.running

    def announce(self, capabilities: int) -> None:
        """Announce our stage in our record, see swarm/identity/stage_claim.py."""
        self.presence.roster.announce(capabilities, self.environment.now())

    def seats(self, *, linked: bool = False) -> Seating:
        """Return the holders of each stage by the records of present peers; `linked`: only peers with a link."""
        roster, reach = self.presence.roster, self.presence.live | {self.identity.peer_id}
        peers = [peer for peer in roster.peers.view.peers if not linked or peer in reach]
        records = [record for peer in peers if (record := roster.peers.record_of(peer)) is not None]
        return seating(records, self.manifest.pipeline.stages)

    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received so far, including all overhead and those inside this machine."""
        (up, down), (up_here, down_here) = self.transport.totals(), self.transport.inside()
        return up + up_here, down + down_here

    async def leave(self) -> None:
        """Announce the departure and close everything."""
        if self.admission.running is None:
            return
        if self.ready:
            self.session.leave()
        if self.presence.duplicate.is_set():
            await self.admission.give_way()
        await self.presence.leave()
        await self.vanish()

    async def vanish(self) -> None:
        """Close everything without an announcement, like a killed process."""
        try:
            if self.ready:
                await self.rounds.rest()
        finally:
            await self.admission.close()

    def __repr__(self) -> str:
        return f"Peer({short(self.identity.peer_id)})"


def _begun(begin: Callable[[], Replica], theta: Floats, layout: Layout) -> tuple[Replica, str]:
    """Return the replica that begins with `theta`, and the first parameter that is not finite."""
    return begin(), not_finite(theta, layout)
