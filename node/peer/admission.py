"""Admission of a peer to its run, and of strangers that knock at this peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from thinwire.collectives.transport.interface import Contact, Transport
from thinwire.node.membership.ban_file import BanFile, StoredBans
from thinwire.node.membership.join import NoSwarm, Refused, knock, welcome
from thinwire.node.membership.known_peers_file import replace_file
from thinwire.node.membership.lost_peers import LostPeers, contacts_of
from thinwire.node.membership.presence import Presence
from thinwire.node.membership.reachability import Reachability
from thinwire.node.methods.registry import check_codec
from thinwire.node.peer.known_peers import BACK_SECONDS, KnownPeers
from thinwire.node.runtime.directories import RunDirectory
from thinwire.node.runtime.environment import Environment, OpenTransport
from thinwire.node.runtime.event_log import Emit
from thinwire.node.state.checkpoint_store import LATEST
from thinwire.swarm.identity.address import is_ip
from thinwire.swarm.identity.admission_token import AdmissionPolicy, Inviter, expiry, preferred, token_of
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.invite import Invite
from thinwire.swarm.identity.peer_record import SKEW, PeerRecord, RecordError
from thinwire.swarm.manifest.manifest import Manifest, ManifestError, ManifestMismatch
from thinwire.swarm.manifest.parser import MAX_TOML, SignedManifest
from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.membership.swim import Roster
from thinwire.swarm.messages.registry import MAX_TOKEN, VERSION, Hello, Refuse, Welcome

LAST_VISITS, LAST_SECONDS = 4, 3.0
"""Peers that get the last record of a process whose key another one uses, and the time for it."""


@dataclass(frozen=True, slots=True)
class RunTerms:
    """Manifest of the run, as its author signed it, and the rule of admission that follows from it."""

    signed: SignedManifest
    manifest: Manifest
    policy: AdmissionPolicy


class Admission:
    """Transport, presence and manifest of one peer, from its admission to the run until `close`.

    Call `found` (the run's first peer) or `arrive` (with an invite). From then on strangers can knock here. While these
    calls search for the swarm, only peers of our last process are admitted, and only if the manifest is known. `site`:
    name of this peer's site. `name`: shown to the other peers. `emit` receives the events of the presence, too.
    """

    transport: Transport
    presence: Presence
    reachability: Reachability

    def __init__(
        self,
        identity: Identity,
        run_id: bytes,
        environment: Environment,
        directory: RunDirectory,
        known_peers: KnownPeers,
        preset: Preset,
        emit: Emit,
        site: str,
        name: str = "",
    ) -> None:
        self._identity, self._run_id, self._environment, self._emit = identity, run_id, environment, emit
        self._files, self._token_file = (directory.manifest, directory.signature), directory.token
        self._known_peers, self._preset, self.site = known_peers, preset, site
        self._saved = directory.checkpoints
        self._name = name
        self._stored_bans = StoredBans(
            BanFile(directory.bans, environment.disk),
            present=lambda: self.presence.roster.ban_items,
            attend=lambda work: self.presence.attend(work),
            emit=emit,
        )
        self._revocations = BanFile(directory.revocations, environment.disk)
        self._token = b""
        self._former: set[bytes] = set()
        self._claims = frozenset[Contact]()
        """Absent peers that our Welcome has named."""
        self._lost_peers = LostPeers(
            lambda: self.presence, preset, environment, self._dial, own_key=identity.transport_public
        )
        self._searching = True
        """True until `found` or `arrive` has found the swarm, or founds the run."""
        self.terms: RunTerms | None = None
        """None until the manifest is known: at once if this peer founds or returns, else when it is admitted."""
        self.running: asyncio.Task[None] | None = None
        """Task of the presence, None before it is open; it ends only with an error of our own."""

    async def found(self, signed: SignedManifest, open_transport: OpenTransport) -> bool:
        """Found a run, or return to it, see `KnownPeers.come_back`. Raises NoSwarm, Refused."""
        self.terms = self._accepted(signed)
        await self._open(open_transport)
        joins = await self._known_peers.come_back(self._knock, continues=self._continues)
        self._searching = False
        self._seek(())
        return joins

    async def arrive(self, invite: Invite, open_transport: OpenTransport, search: float) -> bool:
        """Find the swarm of an invite within `search` seconds; return True if another peer runs it.

        A peer that returns with a checkpoint continues without others if it finds none, like one that has lost all links; after
        BACK_SECONDS if it was the only member, or rounds are those of pairs.
        Raises NoSwarm, Refused, ManifestMismatch, TokenError.
        """
        offered, wall = token_of(invite, self._identity), self._environment.wall()
        self._token = preferred(self._read(self._token_file, MAX_TOKEN), offered, self._identity.peer_id, wall)
        self.terms = self._stored_terms()
        await self._open(open_transport)
        seeds = [Contact(seed.address, seed.transport_key) for seed in invite.seeds]
        contacts = tuple(dict.fromkeys((*seeds, *self._known_peers.known(), *self._known_peers.absent())))
        continues = self._continues
        if continues and self._known_peers.return_alone(self.known.manifest):
            search = min(search, BACK_SECONDS)
        refusal = await self._knock(contacts, search, (), least=search if continues else 0.0)
        if isinstance(refusal, Refused) and await self._enters_without_token(contacts):
            refusal = None
        absent = isinstance(refusal, NoSwarm) or (isinstance(refusal, Refused) and refusal.absent)
        if refusal is not None and not (continues and absent):
            raise refusal
        self._searching = False
        self._store(self._token_file, self._token)
        self._seek(seeds)
        return refusal is None

    async def _enters_without_token(self, contacts: Sequence[Contact]) -> bool:
        """Knock once more without our token if it may have expired; return True if admitted.

        An open run needs no token. A member that is refused keeps it: it comes back with an expired one, too.
        """
        token = self._token
        if not 0 < expiry(token) < self._environment.wall() + SKEW:
            return False
        self._use_token(b"")
        if await self._knock(contacts, 0.0, ()) is not None:
            self._use_token(token)
            return False
        self._emit("alarm", {"detail": "the invite has expired, so this peer joins as one without an invite"})
        return True

    def _use_token(self, token: bytes) -> None:
        self._token = token
        self.presence.roster.use_token(token, self._environment.now())
        self.transport.learn(self.presence.roster.record)

    @property
    def _continues(self) -> bool:
        """True if this peer returns with a state, and may continue the run alone.

        Not with a stage of a pipeline, nor with others left if the manifest forbids lineages.
        """
        if self.terms is None or LATEST not in self._environment.disk.names(self._saved):
            return False
        manifest = self.terms.manifest
        lineages = manifest.outer.gossip or manifest.exchange.orphan > 0 or self._known_peers.alone
        return lineages and not manifest.pipeline.stages

    def _stored_terms(self) -> RunTerms | None:
        """Return the terms of the run from our last process; None if there are none, or they are damaged."""
        toml, signature = (self._read(path, MAX_TOML) for path in self._files)
        try:
            return self._checked(SignedManifest(toml, signature[:32], signature[32:]))
        except ManifestMismatch:
            return None

    def _read(self, path: Path, nbytes: int) -> bytes:
        try:
            return self._environment.disk.read(path, nbytes)
        except OSError:
            return b""

    def _store(self, path: Path, data: bytes) -> None:
        try:
            replace_file(path, self._environment.disk, data)
        except OSError as error:
            self._emit("alarm", {"detail": f"cannot write {path}: {error.strerror}"})

    @property
    def absent(self) -> list[Contact]:
        """Peers of the run that cannot be reached, see LostPeers."""
        return self._lost_peers.absent

    def _seek(self, seeds: Sequence[Contact]) -> None:
        """Continue to dial `seeds` (of our invite), our last process' peers, and those of our Welcome."""
        ours = (*seeds, *self._known_peers.known(), *self._known_peers.absent())
        self._lost_peers.seek(ours, sorted(self._claims, key=attrgetter("transport_key")))

    async def dial(self, contacts: Sequence[Contact]) -> None:
        """Dial peers of the run once each, and learn those that admit us."""
        await asyncio.gather(*map(self._dial, contacts))

    async def _dial(self, contact: Contact) -> None:
        await self._knock([contact], 0.0, (), enter=self._learn)

    async def _open(self, open_transport: OpenTransport) -> None:
        self.transport = await open_transport(self._admit)
        record = PeerRecord.create(
            self._identity,
            run_id=self._run_id,
            addresses=self.transport.addresses()[:8],
            sequence=int(self._environment.wall() * 1000),
            issued=int(self._environment.wall()),
            token=self._token,
            name=self._name,
        )
        self.transport.learn(record)
        roster = Roster(
            self._identity,
            record,
            run_id=self._run_id,
            preset=self._preset,
            rng=self._environment.rng,
            now=self._environment.now(),
            wall=lambda: int(self._environment.wall()),
        )
        environment = self._environment
        self.presence = Presence(
            self.transport,
            roster,
            now=environment.now,
            emit=self._emit,
            site=self.site,
            aside=environment.aside,
            wall=environment.wall,
        )
        former = (*self._known_peers.known(), *self._known_peers.absent())
        self._former = {contact.transport_key for contact in former}
        roster.set_policy(None)
        if self.terms is not None:
            self._judge(self.terms)
        self.reachability = Reachability(self.transport, roster, now=environment.now, emit=self._emit)
        self.running = asyncio.create_task(self.presence.run(self.reachability.watch))

    def _judge(self, terms: RunTerms) -> None:
        """Judge records of others by the manifest's rule from now on, and by stored evidence and revocations."""
        self.presence.roster.set_policy(terms.policy)
        self._convict(self._stored_bans.load())

    @property
    def known(self) -> RunTerms:
        """Terms of the run; only once its manifest is known."""
        assert self.terms is not None
        return self.terms

    @property
    def inviter(self) -> Inviter:
        """This peer as one that may invite others, once the manifest is known."""
        return Inviter(self._identity, self._token, self.known.policy, self._environment.wall())

    def take_revocations(self) -> None:
        """Process the revocations of `thinwire revoke`; those that are known have no effect."""
        if self.terms is not None and self.running is not None:
            self._convict(self._revocations.load())

    def _convict(self, items: tuple[bytes, ...]) -> None:
        self.presence.roster.apply_ban_items(items, self._environment.now())

    async def _knock(
        self,
        contacts: Sequence[Contact],
        seconds: float,
        lasting: Sequence[str],
        least: float = 0.0,
        *,
        enter: Callable[[Welcome], None] | None = None,
    ) -> HintedError | None:
        def hello() -> Hello:
            return Hello(VERSION, self._run_id, self.presence.roster.record.wire)

        return await knock(
            contacts,
            hello,
            enter or self._welcome,
            self.transport,
            self._environment,
            seconds=seconds,
            lasting=lasting,
            met=self._met,
            least=least,
            report=self._report_search,
        )

    def _report_search(self, reason: str) -> None:
        if self._searching:  # not for one dial among others, whose failure changes nothing
            self._emit("waiting", {"detail": f"for a peer of the run that admits this one; {reason}"})

    def _met(self) -> bool:
        """Return True if a peer that our last process knew has connected to our gate (it may be undialable)."""
        roster = self.presence.roster
        records = (roster.peers.record_of(peer) for peer in roster.peers.others if roster.peers.authenticated(peer))
        return any(one is not None and one.transport_key in self._former for one in records)

    def _welcome(self, welcome: Welcome) -> None:
        self.terms = self._accepted(SignedManifest(welcome.manifest, welcome.author, welcome.manifest_signature))
        self._judge(self.terms)
        self._learn(welcome)
        self._claims = frozenset(Contact(address, key) for address, key in welcome.absent if is_ip(address))

    def _learn(self, welcome: Welcome) -> None:
        """Learn the records of the peer that admits us, and of others that it knows."""
        for wire in (welcome.record, *welcome.records):
            try:
                record = PeerRecord.parse(wire, run_id=self._run_id, now=int(self._environment.wall()))
                here = wire == welcome.record
                self.presence.roster.learn(record, self._environment.now(), authenticated=here, admits=here)
            except RecordError as error:
                self._emit("refused", {"peer": "", "detail": f"a record in the welcome: {error}"})

    def _accepted(self, signed: SignedManifest) -> RunTerms:
        """Return the checked terms of the run, and store them for our next process and for tools.

        Raises ManifestMismatch.
        """
        terms = self._checked(signed)
        for path, data in zip(self._files, (signed.toml, signed.author + signed.signature), strict=True):
            self._store(path, data)
        return terms

    def _checked(self, signed: SignedManifest) -> RunTerms:
        """Return the terms of a manifest, which is that of the run and usable here. Raises ManifestMismatch."""
        manifest = signed.verify(self._run_id)
        try:
            check_codec(manifest, "the swarm's manifest")
        except ManifestError as error:  # The author's version allowed what this version refuses.
            raise ManifestMismatch(str(error), "the swarm may run another version of thinwire") from None
        if self.terms is None:
            for warning in manifest.warnings():
                self._emit("alarm", {"detail": warning})
        return RunTerms(signed, manifest, manifest.admission.policy(self._run_id, signed.author))

    def _admit(self, hello: Hello, record: PeerRecord, source: str) -> Welcome | Refuse:
        """Decide on the admission of a stranger whose record has been checked. `source`: see Admit."""
        former = record.transport_key in self._former
        if self.terms is None or (self._searching and not former):
            return Refuse("busy", "still looking for the swarm; knock again")
        roster = self.presence.roster
        if reason := roster.peers.ban_reason(record.peer_id):
            return Refuse("banned", reason)
        reason = roster.refusal(record)
        # The expiry limits the time in which a token brings a peer in. Those that were here, also in our last process, may
        # come back.
        known = former or roster.peers.record_of(record.peer_id) is not None
        if not reason and not known and 0 < expiry(record.token) < self._environment.wall():
            reason = "the invite has expired"
        if reason:
            return Refuse("token", reason)
        roster.learn(record, self._environment.now(), authenticated=True, source=source)
        if not record.addresses:
            return Refuse("busy", "another process uses this key now")
        if reason := roster.peers.ban_reason(record.peer_id):
            return Refuse("banned", reason)
        if roster.peers.record_of(record.peer_id) is None:
            return Refuse("full", "all places of peers on trial are taken, or those of this network")
        return welcome(self.terms.signed, roster, record, self._environment.rng, self.absent)

    async def give_way(self) -> None:
        """Bring our last record (see OwnRecord) to some peers.

        Our links to them belong to the later process now.
        """
        roster, hello = self.presence.roster, Hello(VERSION, self._run_id, self.presence.roster.record.wire)
        others = roster.peers.others
        chosen = contacts_of(roster, self._environment.rng.sample(others, min(LAST_VISITS, len(others))))
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_SECONDS):
                await asyncio.gather(*(self.transport.meet(contact, hello) for contact in chosen))

    def save_bans(self) -> None:
        """Store the evidence against banned peers, and the revocations, if they have changed (`StoredBans`)."""
        self._stored_bans.save()

    async def close(self) -> None:
        """Close presence and transport without an announcement."""
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
            self._stored_bans.write()
            await self.presence.close()
