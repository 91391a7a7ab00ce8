"""Transitions of peers between states, caused by signed items and by our own probes.

A record with a higher sequence makes suspected, dead and departed peers alive again, but never banned ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection

from thinwire.swarm import evidence
from thinwire.swarm.identity.identity import Identity, short
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership import eviction, gossip_items
from thinwire.swarm.membership.broadcast_queue import UNLIMITED, BroadcastQueue
from thinwire.swarm.membership.exclusions import REVOKED, Exclusions
from thinwire.swarm.membership.gossip_items import Accusation, Departure
from thinwire.swarm.membership.peer_table import Event, PeerEntry, PeerTable
from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.membership.self_record import MAX_UNSEEN, YIELDED, OwnRecord
from thinwire.swarm.membership.suspicion import Awareness, Suspects
from thinwire.swarm.messages.registry import Evidence, PeerId

FIRST_TABLE_SENDS = 3
"""Maximum number of times that a peer sends a record from the first table that it gets.

More than one, because the receiver may be unreachable.
"""

MAX_PEERS = 4096
"""Maximum number of peers in a table, departed ones included.

Larger swarms would need another protocol.
"""


class Transitions:
    """Rules that change the states in the `table`, and issue a new record of ours where one is needed.

    `stale_receivers`: peers that have an old record of ours.
    """

    def __init__(
        self,
        identity: Identity,
        record: PeerRecord,
        preset: Preset,
        queue: BroadcastQueue,
        awareness: Awareness,
        wall: Callable[[], int],
        rng: random.Random,
    ) -> None:
        self.table = PeerTable(identity.peer_id, OwnRecord(identity, record, preset.refute_period, wall))
        self.stale_receivers: dict[PeerId, None] = {}
        self.exclusions = Exclusions(record.run_id)
        self.protected: Collection[PeerId] = ()
        """Peers whose entry is never removed for a newcomer."""
        self.failed: Collection[PeerId] = ()
        """Peers on trial whose place any other newcomer may take, and that take the place of none."""
        self.inform_dead_until = -math.inf
        """Time until which some dead peers get messages that they are considered dead."""
        self.events: list[Event] = []
        self._identity, self._preset, self._queue, self._awareness = identity, preset, queue, awareness
        self._suspects, self._rng = Suspects(preset), rng

    # --- items of a peer about itself

    def accept(
        self,
        record: PeerRecord,
        now: float,
        *,
        authenticated: bool = False,
        source: str = "",
        first_table: bool = False,
    ) -> bool:
        """Process a validated record. Returns True if its peer is new in the view.

        authenticated: the peer itself has sent it, and proved its keys. Only such a peer evicts another one from a full table.
        source: IP address from which it has come to our gate. first_table: it comes from the first table that we get, see
        `_spread`.
        """
        peer, table = record.peer_id, self.table
        if peer == table.me:
            self._accept_own(record, now)
            return False
        entry = table.entries.get(peer)
        network = eviction.network_of(record, source, authenticated=authenticated)
        if entry is not None and entry.network and not source:
            network = entry.network
        if self.exclusions.refusal(record):
            return False
        if entry is not None and source and entry.live and not entry.linked:
            if not self._make_room(record, network, authenticated=True):
                self._evict(peer, "forgotten: its network has no place")  # others have reported another network
                return False
            entry.network = network
        if entry is None:
            if not self._make_room(record, network, authenticated=authenticated):
                return False
            if peer in self.exclusions.ban_items:
                entry = table.add(record, "dead", now)
                self._ban(entry, self.exclusions.gossip_item(peer), self.exclusions.reason(peer), now)
                return False
            table.add(record, "alive", now, authenticated=authenticated, network=network)
            return self._joined(record, first_table)
        entry.authenticated = entry.authenticated or authenticated
        if entry.state == "banned":
            return False
        if record.sequence == entry.record.sequence and record.wire != entry.record.wire:
            self._ban_for_records(entry, record, now)
        if record.sequence <= max(entry.void_sequence, entry.record.sequence):
            return False
        was, moved = entry.state, record.addresses != entry.record.addresses
        if was in ("dead", "left"):
            if not self._make_room(record, network, authenticated=authenticated):
                self._remove(peer)
                return False
            entry.network = network
        table.known_items.discard(entry.record.item)
        self._suspects.end(peer, now, refuted=True)
        entry.record, entry.state_item = record, b""
        if was != "alive":
            table.set_state(entry, "alive", now)
        if was in ("dead", "left"):
            return self._joined(record, first_table)
        self._spread(record, first_table)
        if was == "suspect":
            self.events.append(Event("refuted", peer))
        if moved:
            self.events.append(Event("updated", peer, ", ".join(record.addresses)))
        return False

    def _make_room(self, record: PeerRecord, network: str, *, authenticated: bool) -> bool:
        """Return whether a peer may have an entry. An authenticated one may evict another peer."""
        table, authenticated = self.table, authenticated and record.peer_id not in self.failed
        rivals = eviction.rivals(table.entries, record, network, self.exclusions.policy, self.protected)
        if rivals:
            evicted = eviction.evicted_rival(table.entries, rivals, self.failed, self._rng) if authenticated else None
            if evicted is None:
                return False
            failed = table.entries[evicted].linked
            self._evict(evicted, "forgotten: it has failed on trial" if failed else "forgotten: it has not connected")
        if record.peer_id not in table.entries and len(table.entries) >= MAX_PEERS:
            evicted = eviction.evicted_from_full_table(table.entries, self.protected) if authenticated else None
            if evicted is None:
                return False
            self._evict(evicted, "forgotten: the table is full")
        return True

    def _evict(self, peer: PeerId, detail: str) -> None:
        self._suspects.end(peer, self.table.entries[peer].since, refuted=False)
        self._remove(peer)
        self.events.append(Event("dead", peer, detail))

    def _remove(self, peer: PeerId) -> None:
        self.table.remove(peer)
        self._queue.forget(("record", peer, peer))

    def _joined(self, record: PeerRecord, first_table: bool) -> bool:
        self._spread(record, first_table)
        self.events.append(Event("joined", record.peer_id, ", ".join(record.addresses)))
        return True

    def _spread(self, record: PeerRecord, first_table: bool = False) -> None:
        """Spread a record.

        Other peers usually know the records in the first table that we get, so we send each of them to a few peers only. A
        peer that does not know such a record spreads it further.
        """
        item = record.item
        self.table.known_items.add(item)
        self._queue.add(
            ("record", record.peer_id, record.peer_id), item, FIRST_TABLE_SENDS if first_table else UNLIMITED
        )

    def depart(self, departure: Departure, item: bytes, now: float) -> None:
        """Process a validated departure."""
        entry = self.table.entries[departure.peer]
        self._suspects.end(departure.peer, now, refuted=False)
        self.table.set_state(entry, "left", now)
        entry.void_sequence, entry.state_item = departure.sequence, item
        self._queue.add(("record", departure.peer, departure.peer), item)
        self.events.append(Event("left", departure.peer))

    def _ban_for_records(self, entry: PeerEntry, other: PeerRecord, now: float) -> None:
        """Ban a peer that signed two records with the same sequence, until the proof is purged, and spread it."""
        if entry.state != "banned" or not entry.state_item:
            item = gossip_items.proof_item(entry.record, other)
            self.table.known_items.add(item)
            self._ban(entry, item, f"two records with sequence {other.sequence}", now)

    def _by_proof(self, peer: PeerId, entry: PeerEntry) -> bool:
        """Return True if a peer is banned by a proof only."""
        return gossip_items.is_proof(entry.state_item) and peer not in self.exclusions.ban_items

    def _ban(self, entry: PeerEntry, item: bytes, reason: str, now: float) -> None:
        peer = entry.record.peer_id
        self._suspects.end(peer, now, refuted=False)
        self.table.set_state(entry, "banned", now)
        entry.state_item, entry.reason = item, reason
        if item:
            self._queue.add(("record", peer, peer), item)
        self.events.append(Event("banned", peer, reason))

    def ban_by_evidence(self, found: Evidence, now: float) -> None:
        """Process valid evidence against a peer, known or not; one piece for each peer is stored and spread."""
        self.ban_by_item(evidence.signer(found), gossip_items.evidence_item(found), now)

    def ban_by_item(self, peer: PeerId, item: bytes, now: float) -> None:
        """Ban a peer, known or not, because of valid evidence or a verdict."""
        if not self.exclusions.store(peer, item, (self.table.entries, self.protected)):
            return
        entry = self.table.entries.get(peer)
        if peer == self.table.me:
            self.events.append(Event("banned", peer, self.exclusions.reason(peer)))
        elif entry is not None and (entry.state != "banned" or not entry.state_item):
            self._ban(entry, self.exclusions.gossip_item(peer), self.exclusions.reason(peer), now)

    def end_verdict(self, peer: PeerId) -> None:
        """End the ban of a verdict. The entry of a known peer is removed: its record brings it back.

        Evidence, proofs and revocations do not expire: a peer with such an item stays banned.
        """
        if not self.exclusions.by_verdict(peer):
            return
        del self.exclusions.ban_items[peer]
        entry = self.table.entries.get(peer)
        if entry is not None and entry.state == "banned":
            if entry.state_item:
                return
            self._remove(peer)
        self.events.append(Event("pardoned", peer))

    def revoke(self, target: bytes, item: bytes, now: float) -> None:
        """Process a validated revocation: ban the peers that it excludes, and spread it."""
        if not self.exclusions.revoke(target, item):
            return
        self._queue.add(("revocation", target, target), item)
        self.events.append(Event("revoked", target))
        if self.exclusions.is_revoked(self.table.own.record.token, self.table.me, target):
            self.events.append(Event("banned", self.table.me, REVOKED))
        for peer, entry in self.table.entries.items():
            if entry.state != "banned" and self.exclusions.is_revoked(entry.record.token, peer, target):
                self._ban(entry, item, REVOKED, now)

    def ban_by_proof(self, one: PeerRecord, other: PeerRecord, now: float) -> None:
        """Process a validated proof against a known peer.

        One against an unknown peer is ignored, because keys are free; a table brings it again once the peer is known.
        """
        entry = self.table.entries.get(one.peer_id)
        if entry is not None and (entry.state != "banned" or not entry.state_item):
            self.table.known_items.discard(entry.record.item)
            entry.record = one
            self._ban_for_records(entry, other, now)

    # --- items of and about this peer

    def publish(self, now: float) -> None:
        """Issue a new record of ours if one is due, or if the current one is not acceptable to others."""
        own = self.table.own
        if own.invalid_now and not own.due:
            own.schedule(now, above=0)
        if now >= own.publish_at and own.publish(now):
            self._spread(own.record)

    def _refute(self, now: float, *, above: int = 0) -> None:
        """Refute an accusation as soon as the rate limit allows."""
        self.table.own.schedule(now, above=above)
        self.publish(now)

    def update(self, now: float, addresses: tuple[str, ...] | None = None, capabilities: int | None = None) -> None:
        """Publish a new record of ours now, with new addresses or capabilities if they are given."""
        self.table.own.renew(now, self.table.own.record.addresses if addresses is None else addresses, capabilities)
        self._spread(self.table.own.record)

    def _accept_own(self, record: PeerRecord, now: float) -> None:
        source = self.table.own.classify(record)
        if source in ("earlier", "yielded"):
            self._refute(now, above=record.sequence + MAX_UNSEEN)
        if source == "yielded":
            self.events.append(Event("yielded", self.table.me, YIELDED))
        elif source == "rival":
            self.table.own.yield_to(record, now)
            self._spread(self.table.own.record)
            self.events.append(Event("duplicate", self.table.me, f"our key is in use at {', '.join(record.addresses)}"))

    # --- items about others

    def exceed(self, record: PeerRecord, now: float) -> None:
        """Issue a record above one that an earlier process of ours issued while its clock was wrong.

        A peer whose clock was wrong, too, may have accepted it; it ignores all of ours with lower sequences.
        """
        if record.sequence > self.table.own.record.sequence:
            self._refute(now, above=record.sequence + MAX_UNSEEN)

    def is_relevant(self, accusation: Accusation, source: PeerId, now: float) -> bool:
        """Return True if an accusation from `source`, provided that its signature is valid, changes anything."""
        if accusation.target == self.table.me:
            if accusation.sequence < self.table.own.record.sequence:
                self.stale_receivers[source] = None
            return accusation.sequence == self.table.own.record.sequence and not self.table.own.due
        entry = self.table.entries.get(accusation.target)
        if entry is None or not entry.live or accusation.sequence != entry.record.sequence:
            return False
        if accusation.accuser in (accusation.target, self.table.me):
            return False
        return self._suspects.admits(accusation.target, accusation.accuser, now)

    def accuse(self, accusation: Accusation, item: bytes, now: float) -> None:
        """Process a validated and relevant accusation."""
        if accusation.target == self.table.me:
            self._awareness.add(1)
            self._refute(now)
            return
        entry = self.table.entries[accusation.target]
        self._suspect(entry, now)
        self._suspects.accuse(accusation.target, accusation.accuser)
        self._queue.add(("accusation", accusation.accuser, accusation.target), item)
        entry.state_item = item

    def state_item_for(self, entry: PeerEntry) -> bytes:
        """Return the item that explains the state of a peer, for this peer itself.

        An accusation in it is ours: the accused peer may not know another accuser, and would not refute what it cannot check.
        """
        stated = gossip_items.read(entry.state_item)
        if not isinstance(stated, Accusation) or stated.accuser == self.table.me:
            return entry.state_item
        ours = Accusation(entry.state == "dead", self.table.me, entry.record.peer_id, entry.record.sequence)
        return gossip_items.sign(ours, self._identity, self.table.own.record.run_id)

    def _suspect(self, entry: PeerEntry, now: float) -> None:
        peer = entry.record.peer_id
        if self._suspects.begin(peer, self.table.live.size, now):
            self.table.set_state(entry, "suspect", now)
            self.events.append(Event("suspect", peer))

    def on_probe_failed(self, peer: PeerId, now: float) -> None:
        """Handle the failure of our own probe of a peer."""
        entry = self.table.entries.get(peer)
        if entry is None or not entry.live:
            return
        self._suspect(entry, now)
        self._suspects.on_probe_failed(peer, now)
        accusation = Accusation(False, self.table.me, peer, entry.record.sequence)
        item = gossip_items.sign(accusation, self._identity, self.table.own.record.run_id)
        entry.state_item = item
        if self._suspects.admits(peer, self.table.me, now):
            self.accuse(accusation, item, now)

    def on_answer(self, peer: PeerId, now: float) -> None:
        """Handle an answer of a peer: clear our own evidence against it.

        If a final probe was to decide the suspicion, the answer ends it.
        """
        if self._suspects.on_answer(peer):
            entry = self.table.entries[peer]
            self._suspects.end(peer, now, refuted=False)
            self.table.set_state(entry, "alive", now)
            entry.state_item = b""
            self.events.append(Event("refuted", peer, "answered"))

    def expire(self, now: float) -> list[PeerId]:
        """End suspicions that have timed out. Returns peers to probe now because evidence is missing."""
        dead, doubtful = self._suspects.due(now)
        for peer in dead:
            self._declare_dead(self.table.entries[peer], now)
        return doubtful

    def _declare_dead(self, entry: PeerEntry, now: float) -> None:
        peer = entry.record.peer_id
        suspicion = self._suspects.end(peer, now, refuted=False)
        assert suspicion is not None
        detail = f"accused by {', '.join(short(accuser) for accuser in suspicion.accusers) or 'no other peer'}"
        if suspicion.has_own_evidence(now):
            detail = f"own probe failed; {detail}"
            accusation = Accusation(True, self.table.me, peer, entry.record.sequence)
            entry.state_item = gossip_items.sign(accusation, self._identity, self.table.own.record.run_id)
            self._queue.add(("accusation", self.table.me, peer), entry.state_item)
        self.table.set_state(entry, "dead", now)
        self.inform_dead_until = now + self._preset.gossip_to_dead
        self._queue.forget(("record", peer, peer))
        self.events.append(Event("dead", peer, detail))

    @property
    def any_suspected(self) -> bool:
        """True if a peer is under suspicion."""
        return bool(self._suspects)

    # --- time

    def deadline(self) -> float:
        return min(self.table.own.publish_at, self._suspects.deadline())

    def shift(self, lag: float, now: float) -> None:
        """Exclude the last `lag` seconds, in which we did not listen, from the time of suspicions."""
        self._suspects.shift(lag, now)

    def purge(self, now: float) -> list[PeerId]:
        """Forget peers that departed, or were banned by a proof, `preset.tombstone` seconds ago. Returns them.

        Proofs expire with the records in them, so newcomers do not accept older ones. Other bans have no end.
        """
        old = [
            peer
            for peer, entry in self.table.entries.items()
            if (entry.state in ("dead", "left") or self._by_proof(peer, entry))
            and now - entry.since > self._preset.tombstone
        ]
        for peer in old:
            if self.table.entries[peer].state == "banned":
                self.events.append(Event("pardoned", peer, "the proof has expired"))
            self.table.remove(peer)
        return old
