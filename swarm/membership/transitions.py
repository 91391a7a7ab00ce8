"""Transitions of peers between states, caused by signed items and by our own probes.

A record with a higher sequence makes suspected, dead and departed peers alive again, but never banned ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from thinwire.swarm.identity.identity import Identity, short
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership import eviction, gossip_items
from thinwire.swarm.membership.broadcast_queue import UNLIMITED, BroadcastQueue
from thinwire.swarm.membership.exclusions import Bans, Exclusions
from thinwire.swarm.membership.gossip_items import Accusation, Departure
from thinwire.swarm.membership.peer_table import MembershipEvent, PeerEntry, PeerTable
from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.membership.self_record import MAX_UNSEEN, YIELDED, OwnRecord
from thinwire.swarm.membership.suspicion import Awareness, Suspects
from thinwire.swarm.messages.registry import PeerId

FIRST_TABLE_SENDS = 3
"""Maximum number of times that a peer sends a record from the first table that it gets.

More than one, because the receiver may be unreachable.
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
        self.inform_dead_until = -math.inf
        """Time until which some dead peers get messages that they are considered dead."""
        self.events: list[MembershipEvent] = []
        self._identity, self._preset, self._queue, self._awareness = identity, preset, queue, awareness
        self._suspects, self._rng = Suspects(preset), rng
        self.bans = Bans(self.exclusions, self.table, self._suspects, queue, self.events)

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

        authenticated: the peer itself has sent it, and proved its keys. Only such a peer takes the place of another one.
        source: IP address from which it has come to our gate. first_table: it comes from the first table that we get, see
        `_spread`.
        """
        peer, table = record.peer_id, self.table
        if peer == table.me:
            self._accept_own(record, now)
            return False
        if self.exclusions.refusal(record):
            return False
        entry = table.entries.get(peer)
        if entry is None or eviction.needs_place(entry, record, source):
            policy = self.exclusions.policy
            place = eviction.find_place(table, record, policy, self._rng, source=source, authenticated=authenticated)
            if place is None:
                self._refuse(peer, now)
                return False
            if place.evicted is not None:
                self._evict(place.evicted, place.reason, now)
            if entry is None:
                return self._add(record, place.network, now, authenticated=authenticated, first_table=first_table)
            entry.network = place.network
        entry.authenticated = entry.authenticated or authenticated
        return self._renew(entry, record, now, first_table)

    def _refuse(self, peer: PeerId, now: float) -> None:
        """Forget a peer for which there is no place, if it is known."""
        entry = self.table.entries.get(peer)
        if entry is not None and entry.live:
            self._evict(peer, "forgotten: its network has no place", now)  # others have reported another network
        elif entry is not None:
            self._remove(peer)

    def _evict(self, peer: PeerId, detail: str, now: float) -> None:
        self._suspects.end(peer, now, refuted=False)
        self._remove(peer)
        self.events.append(MembershipEvent("dead", peer, detail))

    def _remove(self, peer: PeerId) -> None:
        self.table.remove(peer)
        self._queue.forget(("record", peer, peer))

    def _add(self, record: PeerRecord, network: str, now: float, *, authenticated: bool, first_table: bool) -> bool:
        """Add an unknown peer. Returns True if it is in the view.

        It is not if there is evidence or a verdict against it.
        """
        if record.peer_id in self.exclusions.ban_items:
            self.bans.apply_item(self.table.add(record, "dead", now), now)
            return False
        self.table.add(record, "alive", now, authenticated=authenticated, network=network)
        return self._joined(record, first_table)

    def _renew(self, entry: PeerEntry, record: PeerRecord, now: float, first_table: bool) -> bool:
        """Process the record of a known peer. Returns True if the peer comes back into the view."""
        if entry.state == "banned":
            return False
        if record.sequence == entry.record.sequence and record.wire != entry.record.wire:
            self.bans.ban_for_records(entry, record, now)
        if not entry.is_older_than(record):
            return False
        peer, was, readdressed = record.peer_id, entry.state, record.addresses != entry.record.addresses
        self.table.known_items.discard(entry.record.item)
        self._suspects.end(peer, now, refuted=True)
        entry.record, entry.state_item = record, b""
        if was != "alive":
            self.table.set_state(entry, "alive", now)
        if was in ("dead", "left"):
            return self._joined(record, first_table)
        self._spread(record, first_table)
        if was == "suspect":
            self.events.append(MembershipEvent("refuted", peer))
        if readdressed:
            self.events.append(MembershipEvent("updated", peer, ", ".join(record.addresses)))
        return False

    def _joined(self, record: PeerRecord, first_table: bool) -> bool:
        self._spread(record, first_table)
        self.events.append(MembershipEvent("joined", record.peer_id, ", ".join(record.addresses)))
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
        self.events.append(MembershipEvent("left", departure.peer))

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

    def update(
        self,
        now: float,
        addresses: tuple[str, ...] | None = None,
        capabilities: int | None = None,
        token: bytes | None = None,
    ) -> None:
        """Publish a new record of ours now, with new addresses, capabilities or token if they are given."""
        own = self.table.own
        own.renew(now, own.record.addresses if addresses is None else addresses, capabilities, token)
        self._spread(self.table.own.record)

    def _accept_own(self, record: PeerRecord, now: float) -> None:
        source = self.table.own.classify(record)
        if source in ("earlier", "yielded"):
            self._refute(now, above=record.sequence + MAX_UNSEEN)
        if source == "yielded":
            self.events.append(MembershipEvent("yielded", self.table.me, YIELDED))
        elif source == "rival":
            self.table.own.yield_to(record, now)
            self._spread(self.table.own.record)
            self.events.append(
                MembershipEvent("duplicate", self.table.me, f"our key is in use at {', '.join(record.addresses)}")
            )

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
            self.events.append(MembershipEvent("suspect", peer))

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

    def on_answer(self, peer: PeerId, now: float) -> bool:
        """Handle an answer of a peer: clear our own evidence against it.

        If a final probe was to decide the suspicion, the answer ends it. Returns True then.
        """
        if ended := self._suspects.on_answer(peer):
            entry = self.table.entries[peer]
            self._suspects.end(peer, now, refuted=False)
            self.table.set_state(entry, "alive", now)
            entry.state_item = b""
            self.events.append(MembershipEvent("refuted", peer, "answered"))
        return ended

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
        others = [short(accuser) for accuser in suspicion.accusers if accuser != self.table.me]
        detail = f"accused by {', '.join(others) or 'no other peer'}"
        if suspicion.has_own_evidence(now):
            detail = f"own probe failed; {detail}"
            accusation = Accusation(True, self.table.me, peer, entry.record.sequence)
            entry.state_item = gossip_items.sign(accusation, self._identity, self.table.own.record.run_id)
            self._queue.add(("accusation", self.table.me, peer), entry.state_item)
        self.table.set_state(entry, "dead", now)
        self.inform_dead_until = now + self._preset.gossip_to_dead
        self._queue.forget(("record", peer, peer))
        self.events.append(MembershipEvent("dead", peer, detail))

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
        """Forget peers whose departure, or ban that expires, is `preset.tombstone` seconds ago. Returns them."""
        old = [
            peer
            for peer, entry in self.table.absent_entries()
            if (entry.state in ("dead", "left") or self.bans.expires(entry))
            and now - entry.since > self._preset.tombstone
        ]
        for peer in old:
            if self.table.entries[peer].state == "banned":
                self.events.append(MembershipEvent("pardoned", peer, "the proof has expired"))
            self.table.remove(peer)
        return old
