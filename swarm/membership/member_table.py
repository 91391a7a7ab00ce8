"""Table of members: the state of each peer, from signed items by it and about it.

A record with a higher sequence makes suspected, dead and departed peers alive again, but never banned ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection

from thinwire.swarm import evidence
from thinwire.swarm.identity.identity import Identity, short
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership import gossip_items
from thinwire.swarm.membership.broadcast_queue import Broadcast
from thinwire.swarm.membership.exclusions import REVOKED, Exclusions
from thinwire.swarm.membership.gossip_items import Accusation, Departure
from thinwire.swarm.membership.member import Event, Member
from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.membership.self_record import MISSED, YIELDED, OwnRecord
from thinwire.swarm.membership.suspicion import Awareness, Docket, Suspicion
from thinwire.swarm.membership.trial_places import crowded
from thinwire.swarm.membership.view import View
from thinwire.swarm.messages.registry import Evidence, PeerId

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
    ) -> None:
        self.me = identity.peer_id
        self.own = OwnRecord(identity, record, preset.refute_period, wall)
        self.table: dict[PeerId, Member] = {}
        self.items: set[bytes] = set()
        """Items that spread the records that we already have."""
        self.behind: dict[PeerId, None] = {}
        self.banned: dict[PeerId, None] = {}
        """Peers whose state is "banned", in the order of their bans."""
        self.excluded = Exclusions(record.run_id)
        self.kept: Collection[PeerId] = ()
        """Peers whose place no newcomer takes."""
        self.events: list[Event] = []
        self._identity, self._preset, self._broadcast, self._awareness = identity, preset, broadcast, awareness
        self._docket = Docket(preset)
        self._view: View | None = View.of(0, [record.peer_id])
        self._others: list[PeerId] = []
        self._views = 0
        self._suspects: dict[PeerId, Member] = {}

    def live(self) -> list[PeerId]:
        """Return the other peers in the view, sorted."""
        return list(self._others)

    @property
    def size(self) -> int:
        """Number of peers in the view, this one included."""
        return len(self._others) + 1

    @property
    def alone(self) -> bool:
        """True if no other peer is in the view."""
        return not self._others

    def view(self) -> View:
        if self._view is None:
            # Built on demand, because many joins may happen between two calls.
            self._view = View.of(self._views, [self.me, *self._others])
        return self._view

    def _enter(self, peer: PeerId) -> None:
        """Add a peer to the view."""
        insort(self._others, peer)
        self._views += 1
        self._view = None

    def _exit(self, peer: PeerId) -> None:
        """Remove a peer from the view."""
        del self._others[bisect_left(self._others, peer)]
        self._views += 1
        self._view = None

    # --- items of a peer about itself

    def accept(self, record: PeerRecord, now: float, *, met: bool = False) -> bool:
        """Process a validated record. Returns True if its peer is new in the view.

        met: the peer itself has shown it here. Only such a peer takes the place of another one in a full table.
        """
        peer = record.peer_id
        if peer == self.me:
            self._accept_own(record, now)
            return False
        member = self.table.get(peer)
        if self.excluded.refusal(record):
            return False
        if member is None:
            if crowded(self.table, record, self.excluded.policy, self.kept):
                return False
            if len(self.table) >= MAX_MEMBERS and not (met and self._make_room()):
                return False
            if peer in self.excluded.convicted:
                self.table[peer] = Member(record, "dead", now)
                self._ban(self.table[peer], self.excluded.note(peer), self.excluded.reason(peer), now)
                return False
            self.table[peer] = Member(record, "alive", now, met=met)
            return self._welcome(record)
        member.met = member.met or met
        if member.state == "banned":
            return False
        if record.sequence == member.record.sequence and record.wire != member.record.wire:
            self.ban(member, record, now)
        if record.sequence <= max(member.void, member.record.sequence):
            return False
        was, moved = member.state, record.addresses != member.record.addresses
        self.items.discard(gossip_items.announce(member.record))
        self._end_suspicion(member, now, refuted=True)
        member.record, member.note = record, b""
        if was != "alive":
            member.state, member.since = "alive", now
        if was in ("dead", "left"):
            return self._welcome(record)
        self._spread(record)
        if was == "suspect":
            self.events.append(Event("refuted", peer))
        if moved:
            self.events.append(Event("updated", peer, ", ".join(record.addresses)))
        return False

    def _make_room(self) -> bool:
        """Forget a peer that we only know from others; False if there is none.

        Identities are free, so a table that told records could fill would keep out peers that come in person, and one that
        forgot any peer for a new one would lose members.
        """
        for peer, member in self.table.items():
            if peer not in self.kept and (not member.met or member.state in ("dead", "left")):
                self._end_suspicion(member, member.since, refuted=False)
                if member.live:
                    self._exit(peer)
                self._forget(peer)
                self.events.append(Event("dead", peer, "forgotten: the table is full of peers that are only told of"))
                return True
        return False

    def _welcome(self, record: PeerRecord) -> bool:
        self._spread(record)
        self._enter(record.peer_id)
        self.events.append(Event("joined", record.peer_id, ", ".join(record.addresses)))
        return True

    def _spread(self, record: PeerRecord) -> None:
        item = gossip_items.announce(record)
        self.items.add(item)
        self._broadcast.add(("record", record.peer_id, record.peer_id), item)

    def depart(self, departure: Departure, item: bytes, now: float) -> None:
        """Process a validated departure."""
        member = self.table[departure.peer]
        self._end_suspicion(member, now, refuted=False)
        was_live, member.state, member.since = member.live, "left", now
        member.void, member.note = departure.sequence, item
        self._broadcast.add(("record", departure.peer, departure.peer), item)
        if was_live:
            self._exit(departure.peer)
        self.events.append(Event("left", departure.peer))

    def ban(self, member: Member, other: PeerRecord, now: float) -> None:
        """Ban a peer that signed two records with the same sequence, permanently, and spread the proof."""
        if member.state != "banned" or not member.note:
            self.items.add(gossip_items.announce(other))
            note = gossip_items.prove(member.record, other)
            self._ban(member, note, f"two records with sequence {other.sequence}", now)

    def _ban(self, member: Member, note: bytes, reason: str, now: float) -> None:
        peer = member.record.peer_id
        self._end_suspicion(member, now, refuted=False)
        was_live, member.state, member.since = member.live, "banned", now
        member.note, member.reason = note, reason
        if note:
            self._broadcast.add(("record", peer, peer), note)
        self.banned[peer] = None
        if was_live:
            self._exit(peer)
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

    def pardon(self, peer: PeerId) -> None:
        """Drop the verdict against a peer. A known peer is forgotten: its record brings it back.

        Evidence, proofs and revocations are valid for ever: a peer with such a note stays banned.
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
        self.items.discard(gossip_items.announce(self.table[peer].record))
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
        if self.own.unbelievable and not self.own.due:
            self.own.answer(now, 0)
        if self.own.publish(now):
            self._spread(self.own.record)

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
        return self._room(member, accusation.accuser) and self._docket.admits(accusation.accuser, now)

    def _room(self, member: Member, accuser: PeerId) -> bool:
        suspicion = member.suspicion
        if suspicion is None:
            return True
        return accuser not in suspicion.accusers and len(suspicion.accusers) < self._preset.confirmations

    def accuse(self, accusation: Accusation, item: bytes, now: float) -> None:
        """Process a validated accusation that counts."""
        if accusation.target == self.me:
            self._awareness.add(1)
            self._answer(now)
            return
        member = self.table[accusation.target]
        suspicion = self._suspect(member, now)
        suspicion.accusers[accusation.accuser] = None
        self._docket.open(accusation.accuser)
        self._broadcast.add(("accusation", accusation.accuser, accusation.target), item)
        member.note = item

    def _suspect(self, member: Member, now: float) -> Suspicion:
        if member.suspicion is None:
            member.suspicion = Suspicion.begin(self._preset, self.size, now)
            member.state, member.since = "suspect", now
            self._suspects[member.record.peer_id] = member
            self.events.append(Event("suspect", member.record.peer_id))
        return member.suspicion

    def failed(self, peer: PeerId, now: float) -> None:
        """Handle the failure of our own probe of a peer."""
        member = self.table.get(peer)
        if member is None or not member.live:
            return
        self._suspect(member, now).failed_at = now
        accusation = Accusation(False, self.me, peer, member.record.sequence)
        item = gossip_items.sign(accusation, self._identity, self.own.record.run_id)
        member.note = item
        if self._room(member, self.me) and self._docket.admits(self.me, now):
            self.accuse(accusation, item, now)

    def reached(self, peer: PeerId, now: float) -> None:
        """Handle an answer of a peer: clear our own evidence against it.

        If a final probe was to decide the suspicion, the answer ends it.
        """
        member = self.table.get(peer)
        if member is not None and member.suspicion is not None:
            member.suspicion.failed_at = -math.inf
            if member.suspicion.asked:
                self._end_suspicion(member, now, refuted=False)
                member.state, member.since, member.note = "alive", now, b""
                self.events.append(Event("refuted", peer, "answered"))

    def expire(self, now: float) -> list[PeerId]:
        """End suspicions that have timed out. Returns peers to probe now because evidence is missing.

        Every peer probes each suspect once more before the shortest time is over. This makes up for refutations that
        were lost in transit, and for missing accusers.
        """
        doubtful = []
        for peer, member in list(self._suspects.items()):
            suspicion = member.suspicion
            assert suspicion is not None
            if suspicion.deadline <= now:
                if suspicion.evident(now) or suspicion.confirmed:
                    self._bury(member, now)
                elif not suspicion.asked:
                    suspicion.asked = True
                    doubtful.append(peer)
            elif not suspicion.checked and suspicion.check_at <= now:
                suspicion.checked = True
                doubtful.append(peer)
        return doubtful

    def _bury(self, member: Member, now: float) -> None:
        peer, suspicion = member.record.peer_id, member.suspicion
        assert suspicion is not None
        detail = f"accused by {', '.join(short(accuser) for accuser in suspicion.accusers) or 'nobody else'}"
        if suspicion.evident(now):
            detail = f"own probe failed; {detail}"
            verdict = Accusation(True, self.me, peer, member.record.sequence)
            member.note = gossip_items.sign(verdict, self._identity, self.own.record.run_id)
            self._broadcast.add(("accusation", self.me, peer), member.note)
        self._end_suspicion(member, now, refuted=False)
        member.state, member.since = "dead", now
        self._broadcast.forget(("record", peer, peer))
        self._exit(peer)
        self.events.append(Event("dead", peer, detail))

    def _end_suspicion(self, member: Member, now: float, *, refuted: bool) -> None:
        if member.suspicion is not None:
            self._docket.close(member.suspicion, refuted=refuted, now=now)
            member.suspicion = None
            del self._suspects[member.record.peer_id]

    # --- time

    def deadline(self) -> float:
        times = [member.suspicion.next_step for member in self._suspects.values() if member.suspicion is not None]
        return min([self.own.publish_at, *times])

    def shift(self, lag: float, now: float) -> None:
        """Give suspects the time that they were suspected in the last `lag` seconds, as we did not listen."""
        for member in self._suspects.values():
            if member.suspicion is not None:
                # Accusations that waited meanwhile may have been handled just before.
                member.suspicion.start = min(member.suspicion.start + lag, now)

    def purge(self, now: float) -> list[PeerId]:
        """Forget peers that departed more than `preset.tombstone` seconds ago. Returns them."""
        old = [
            peer
            for peer, member in self.table.items()
            if member.state in ("dead", "left") and now - member.since > self._preset.tombstone
        ]
        for peer in old:
            self.items.discard(gossip_items.announce(self.table.pop(peer).record))
        return old
