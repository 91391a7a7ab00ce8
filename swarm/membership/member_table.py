"""Table of members: the state of each peer, from signed items by it and about it.

A record with a higher sequence makes suspected, dead and departed peers alive again, but never banned ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection

from thinwire.swarm import evidence
from thinwire.swarm.identity.identity import Identity, short
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership import gossip_items
from thinwire.swarm.membership.broadcast_queue import UNLIMITED, Broadcast
from thinwire.swarm.membership.exclusions import REVOKED, Exclusions
from thinwire.swarm.membership.gossip_items import Accusation, Departure
from thinwire.swarm.membership.member import Event, Member
from thinwire.swarm.membership.places import displaced, forgettable, rivals
from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.membership.self_record import MISSED, YIELDED, OwnRecord
from thinwire.swarm.membership.suspicion import Awareness, Suspects
from thinwire.swarm.membership.view import LivePeers
from thinwire.swarm.messages.registry import Evidence, PeerId

FEW = 3
"""Most times that a peer sends a record from the first table that it gets.

More than one, because the receiver may be unreachable.
"""

MAX_MEMBERS = 4096
"""Maximum number of peers in a table, departed ones included.

Larger swarms would need another protocol.
"""


class Members:
    """All known other peers, in `table`, and our `own` record.

    `behind`: peers that have an old one of ours.
    """

    def __init__(
        self,
        identity: Identity,
        record: PeerRecord,
        preset: Preset,
        broadcast: Broadcast,
        awareness: Awareness,
        wall: Callable[[], int],
        rng: random.Random,
    ) -> None:
        self.me = identity.peer_id
        self.own = OwnRecord(identity, record, preset.refute_period, wall)
        self.table: dict[PeerId, Member] = {}
        self.live = LivePeers(self.me)
        """The peers of the table that are in the view."""
        self.items: set[bytes] = set()
        """Items that spread the records that we already have."""
        self.behind: dict[PeerId, None] = {}
        self.banned: dict[PeerId, None] = {}
        """Peers whose state is "banned", in the order of their bans."""
        self.excluded = Exclusions(record.run_id)
        self.kept: Collection[PeerId] = ()
        """Peers whose place no newcomer takes."""
        self.told_until = -math.inf
        """Time until which some dead peers are told that they are considered dead."""
        self.events: list[Event] = []
        self._identity, self._preset, self._broadcast, self._awareness = identity, preset, broadcast, awareness
        self._suspects, self._rng = Suspects(preset), rng

    # --- items of a peer about itself

    def accept(self, record: PeerRecord, now: float, *, met: bool = False, told: bool = False) -> bool:
        """Process a validated record. Returns True if its peer is new in the view.

        met: the peer itself has shown it here. Only such a peer takes the place of another one in a full table.
        told: it comes from the first table that we get, see `_spread`.
        """
        peer = record.peer_id
        if peer == self.me:
            self._accept_own(record, now)
            return False
        member = self.table.get(peer)
        if self.excluded.refusal(record):
            return False
        if member is None:
            if not self._find_place(record, met=met):
                return False
            if peer in self.excluded.convicted:
                self.table[peer] = Member(record, "dead", now)
                self._ban(self.table[peer], self.excluded.note(peer), self.excluded.reason(peer), now)
                return False
            self.table[peer] = Member(record, "alive", now, met=met)
            return self._welcome(record, told)
        member.met = member.met or met
        if member.state == "banned":
            return False
        if record.sequence == member.record.sequence and record.wire != member.record.wire:
            self.ban(member, record, now)
        if record.sequence <= max(member.void, member.record.sequence):
            return False
        was, moved = member.state, record.addresses != member.record.addresses
        self.items.discard(member.record.item)
        self._suspects.end(peer, now, refuted=True)
        member.record, member.note = record, b""
        if was != "alive":
            member.state, member.since = "alive", now
        if was in ("dead", "left"):
            return self._welcome(record, told)
        self._spread(record, told)
        if was == "suspect":
            self.events.append(Event("refuted", peer))
        if moved:
            self.events.append(Event("updated", peer, ", ".join(record.addresses)))
        return False

    def _find_place(self, record: PeerRecord, *, met: bool) -> bool:
        """Return whether there is a place for a new peer. If it is met, another peer may have lost its place."""
        taken = rivals(self.table, record, self.excluded.policy, self.kept)
        if taken:
            loser = displaced(self.table, taken, self._rng) if met else None
            if loser is None:
                return False
            self._push_out(loser, "forgotten: it has not connected")
        if len(self.table) >= MAX_MEMBERS:
            loser = forgettable(self.table, self.kept) if met else None
            if loser is None:
                return False
            self._push_out(loser, "forgotten: the table is full of peers that are only told of")
        return True

    def _push_out(self, peer: PeerId, detail: str) -> None:
        member = self.table[peer]
        self._suspects.end(peer, member.since, refuted=False)
        if member.live:
            self.live.remove(peer)
        self._forget(peer)
        self.events.append(Event("dead", peer, detail))

    def _welcome(self, record: PeerRecord, told: bool) -> bool:
        self._spread(record, told)
        self.live.add(record.peer_id)
        self.events.append(Event("joined", record.peer_id, ", ".join(record.addresses)))
        return True

    def _spread(self, record: PeerRecord, told: bool = False) -> None:
        """Spread a record.

        As a rule all know the records of a newcomer's first table. If they do not, one of the few that get one from us
        spreads it.
        """
        item = record.item
        self.items.add(item)
        self._broadcast.add(("record", record.peer_id, record.peer_id), item, FEW if told else UNLIMITED)

    def depart(self, departure: Departure, item: bytes, now: float) -> None:
        """Process a validated departure."""
        member = self.table[departure.peer]
        self._suspects.end(departure.peer, now, refuted=False)
        was_live, member.state, member.since = member.live, "left", now
        member.void, member.note = departure.sequence, item
        self._broadcast.add(("record", departure.peer, departure.peer), item)
        if was_live:
            self.live.remove(departure.peer)
        self.events.append(Event("left", departure.peer))

    def ban(self, member: Member, other: PeerRecord, now: float) -> None:
        """Ban a peer that signed two records with the same sequence, permanently, and spread the proof."""
        if member.state != "banned" or not member.note:
            self.items.add(other.item)
            note = gossip_items.prove(member.record, other)
            self._ban(member, note, f"two records with sequence {other.sequence}", now)

    def _ban(self, member: Member, note: bytes, reason: str, now: float) -> None:
        peer = member.record.peer_id
        self._suspects.end(peer, now, refuted=False)
        was_live, member.state, member.since = member.live, "banned", now
        member.note, member.reason = note, reason
        if note:
            self._broadcast.add(("record", peer, peer), note)
        self.banned[peer] = None
        if was_live:
            self.live.remove(peer)
        self.events.append(Event("banned", peer, reason))

    def convict_voter(self, found: Evidence, now: float) -> None:
        """Process valid evidence against a peer, known or not; one piece for each peer is stored and spread."""
        self.expel(evidence.convicted(found), gossip_items.spread(found), now)

    def expel(self, peer: PeerId, item: bytes, now: float) -> None:
        """Ban a peer, known or not, because of valid evidence or a verdict."""
        if not self.excluded.convict(peer, item, self.table):
            return
        member = self.table.get(peer)
        if peer == self.me:
            self.events.append(Event("banned", peer, self.excluded.reason(peer)))
        elif member is not None and (member.state != "banned" or not member.note):
            self._ban(member, self.excluded.note(peer), self.excluded.reason(peer), now)

    def lift_verdict(self, peer: PeerId) -> None:
        """Remove the ban of a verdict. A known peer is forgotten: its record brings it back.

        Evidence, proofs and revocations do not expire: a peer with such a note stays banned.
        """
        if not self.excluded.judged(peer):
            return
        del self.excluded.convicted[peer]
        if peer in self.banned and self.table[peer].note:
            return
        if peer in self.banned:
            self._forget(peer)
        self.events.append(Event("pardoned", peer))

    def _forget(self, peer: PeerId) -> None:
        """Remove a peer from the table."""
        self.items.discard(self.table[peer].record.item)
        self._broadcast.forget(("record", peer, peer))
        self.banned.pop(peer, None)
        del self.table[peer]

    def revoke(self, target: bytes, item: bytes, now: float) -> None:
        """Process a validated revocation: exclude the peers that it touches, and spread it."""
        if not self.excluded.revoke(target, item):
            return
        self._broadcast.add(("revocation", target, target), item)
        self.events.append(Event("revoked", target))
        if self.excluded.touched(self.own.record.token, self.me, target):
            self.events.append(Event("banned", self.me, REVOKED))
        for peer, member in self.table.items():
            if member.state != "banned" and self.excluded.touched(member.record.token, peer, target):
                self._ban(member, item, REVOKED, now)

    def convict(self, one: PeerRecord, other: PeerRecord, now: float) -> None:
        """Process a validated proof against a peer, known or not."""
        if one.peer_id not in self.table:
            self.accept(one, now)
        member = self.table.get(one.peer_id)
        if member is not None and (member.state != "banned" or not member.note):
            member.record = one
            self.ban(member, other, now)

    # --- items of and about this peer

    def publish(self, now: float) -> None:
        """Issue a new record of ours if one is due, or if the current one is not acceptable to others."""
        own = self.own
        if own.unbelievable and not own.due:
            own.answer(now, 0)
        if now >= own.publish_at and own.publish(now):
            self._spread(own.record)

    def _answer(self, now: float, *, above: int = 0) -> None:
        """Refute an accusation as soon as the rate limit allows."""
        self.own.answer(now, above)
        self.publish(now)

    def update(self, now: float, addresses: tuple[str, ...] | None = None, capabilities: int | None = None) -> None:
        """Publish a new record of ours now, with new addresses or capabilities if they are given."""
        self.own.renew(now, self.own.record.addresses if addresses is None else addresses, capabilities)
        self._spread(self.own.record)

    def _accept_own(self, record: PeerRecord, now: float) -> None:
        verdict = self.own.judge(record)
        if verdict in ("earlier", "yielded"):
            self._answer(now, above=record.sequence + MISSED)
        if verdict == "yielded":
            self.events.append(Event("yielded", self.me, YIELDED))
        elif verdict == "rival":
            self.own.yield_to(record, now)
            self._spread(self.own.record)
            self.events.append(Event("duplicate", self.me, f"our key is in use at {', '.join(record.addresses)}"))

    # --- items about others

    def counts(self, accusation: Accusation, source: PeerId, now: float) -> bool:
        """Return True if an accusation from `source`, provided that its signature is valid, changes anything."""
        if accusation.target == self.me:
            if accusation.sequence < self.own.record.sequence:
                self.behind[source] = None
            return accusation.sequence == self.own.record.sequence and not self.own.due
        member = self.table.get(accusation.target)
        if member is None or not member.live or accusation.sequence != member.record.sequence:
            return False
        if accusation.accuser in (accusation.target, self.me):
            return False
        return self._suspects.admits(accusation.target, accusation.accuser, now)

    def accuse(self, accusation: Accusation, item: bytes, now: float) -> None:
        """Process a validated accusation that counts."""
        if accusation.target == self.me:
            self._awareness.add(1)
            self._answer(now)
            return
        member = self.table[accusation.target]
        self._suspect(member, now)
        self._suspects.accuse(accusation.target, accusation.accuser)
        self._broadcast.add(("accusation", accusation.accuser, accusation.target), item)
        member.note = item

    def note_for(self, member: Member) -> bytes:
        """Return the note of a member for that member itself.

        An accusation in it is ours: the accused peer may not know another accuser, and would not refute what it cannot check.
        """
        stated = gossip_items.read(member.note)
        if not isinstance(stated, Accusation) or stated.accuser == self.me:
            return member.note
        ours = Accusation(member.state == "dead", self.me, member.record.peer_id, member.record.sequence)
        return gossip_items.sign(ours, self._identity, self.own.record.run_id)

    def _suspect(self, member: Member, now: float) -> None:
        peer = member.record.peer_id
        if self._suspects.begin(peer, self.live.size, now):
            member.state, member.since = "suspect", now
            self.events.append(Event("suspect", peer))

    def failed(self, peer: PeerId, now: float) -> None:
        """Handle the failure of our own probe of a peer."""
        member = self.table.get(peer)
        if member is None or not member.live:
            return
        self._suspect(member, now)
        self._suspects.failed(peer, now)
        accusation = Accusation(False, self.me, peer, member.record.sequence)
        item = gossip_items.sign(accusation, self._identity, self.own.record.run_id)
        member.note = item
        if self._suspects.admits(peer, self.me, now):
            self.accuse(accusation, item, now)

    def reached(self, peer: PeerId, now: float) -> None:
        """Handle an answer of a peer: clear our own evidence against it.

        If a final probe was to decide the suspicion, the answer ends it.
        """
        if self._suspects.answered(peer):
            member = self.table[peer]
            self._suspects.end(peer, now, refuted=False)
            member.state, member.since, member.note = "alive", now, b""
            self.events.append(Event("refuted", peer, "answered"))

    def expire(self, now: float) -> list[PeerId]:
        """End suspicions that have timed out. Returns peers to probe now because evidence is missing."""
        dead, doubtful = self._suspects.due(now)
        for peer in dead:
            self._bury(self.table[peer], now)
        return doubtful

    def _bury(self, member: Member, now: float) -> None:
        peer = member.record.peer_id
        suspicion = self._suspects.end(peer, now, refuted=False)
        assert suspicion is not None
        detail = f"accused by {', '.join(short(accuser) for accuser in suspicion.accusers) or 'nobody else'}"
        if suspicion.evident(now):
            detail = f"own probe failed; {detail}"
            verdict = Accusation(True, self.me, peer, member.record.sequence)
            member.note = gossip_items.sign(verdict, self._identity, self.own.record.run_id)
            self._broadcast.add(("accusation", self.me, peer), member.note)
        member.state, member.since = "dead", now
        self.told_until = now + self._preset.gossip_to_dead
        self._broadcast.forget(("record", peer, peer))
        self.live.remove(peer)
        self.events.append(Event("dead", peer, detail))

    @property
    def suspicious(self) -> bool:
        """True if a peer is under suspicion."""
        return bool(self._suspects)

    # --- time

    def deadline(self) -> float:
        return min(self.own.publish_at, self._suspects.deadline())

    def shift(self, lag: float, now: float) -> None:
        """Give suspects the time that they were suspected in the last `lag` seconds, as we did not listen."""
        self._suspects.shift(lag, now)

    def purge(self, now: float) -> list[PeerId]:
        """Forget peers that departed more than `preset.tombstone` seconds ago. Returns them."""
        old = [
            peer
            for peer, member in self.table.items()
            if member.state in ("dead", "left") and now - member.since > self._preset.tombstone
        ]
        for peer in old:
            self.items.discard(self.table.pop(peer).record.item)
        return old
