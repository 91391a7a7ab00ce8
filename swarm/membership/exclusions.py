"""Exclusions of a run: rule of admission, revocations, evidence, verdicts, and the bans that follow."""

from __future__ import annotations

from collections.abc import Container, Sequence

from thinwire.swarm import evidence
from thinwire.swarm.identity.admission_token import AdmissionPolicy, is_revoked
from thinwire.swarm.identity.identity import peer_id_of
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership import gossip_items
from thinwire.swarm.membership.broadcast_queue import BroadcastQueue
from thinwire.swarm.membership.peer_table import MembershipEvent, PeerEntry, PeerTable
from thinwire.swarm.membership.suspicion import Suspects
from thinwire.swarm.messages.registry import Evidence, PeerId

MAX_BAN_ITEMS = 4096
"""Maximum number of peers against which evidence is stored, as many as a table of peers has."""

MAX_REVOCATIONS = 4096
"""Maximum number of revocations; only the author of the run makes them."""

REVOKED = "the author of the run has revoked its admission"


class Exclusions:
    """Reasons why peers, known or not, do not belong to the run `run_id`."""

    def __init__(self, run_id: bytes) -> None:
        self.policy: AdmissionPolicy | None = AdmissionPolicy(run_id, b"")
        """Rule of admission; the initial one admits all. None while it is unknown: all records are ignored."""
        self.ban_items: dict[PeerId, bytes] = {}
        """Evidence against peers, known or not, as the item that spreads it, or a verdict as it is stored."""
        self.revoked: dict[bytes, bytes] = {}
        """Revocations by the author, by id or start of an id, as the item that spreads them."""

    def refusal(self, record: PeerRecord) -> str:
        """Return why the peer of a validated record is not admitted; empty if it is."""
        if self.policy is None:
            return "the manifest is unknown"
        if self.revokes(record.token, record.peer_id):
            return REVOKED
        return self.policy.refusal(record.token, record.peer_id)

    def revokes(self, token: bytes, peer: PeerId) -> bool:
        """Return True if one of the revocations excludes a peer with this token."""
        return bool(self.revoked) and any(self.is_revoked(token, peer, target) for target in self.revoked)

    def is_revoked(self, token: bytes, peer: PeerId, target: bytes) -> bool:
        """Return True if a revocation excludes a peer.

        It never excludes the author, even if it has come back by an invite.
        """
        author = self.policy is not None and self.policy.author and peer == peer_id_of(self.policy.author)
        return not author and is_revoked(token, peer, target)

    def revoke(self, target: bytes, item: bytes) -> bool:
        """Store a validated revocation. Returns False if it is known, or if there is no room."""
        if target in self.revoked or len(self.revoked) >= MAX_REVOCATIONS:
            return False
        self.revoked[target] = item
        return True

    def store(self, peer: PeerId, item: bytes, groups: Sequence[Container[PeerId]]) -> bool:
        """Store evidence or a verdict against a peer, one item for each. Returns False if it is not stored.

        groups: of peers, the most important group last. If there is no room, evidence against a peer in a group replaces that
        against a peer outside, whose identity may have been made for this purpose.
        """
        if peer in self.ban_items:
            if not self.by_verdict(peer) or gossip_items.read_verdict(item) is not None:
                return False
            self.ban_items[peer] = item  # Evidence is valid forever, a verdict only in its lineage.
            return True
        if len(self.ban_items) >= MAX_BAN_ITEMS:
            lesser = [one for group in groups if peer in group for one in self.ban_items if one not in group]
            if not lesser:
                return False
            del self.ban_items[lesser[0]]
        self.ban_items[peer] = item
        return True

    def by_verdict(self, peer: PeerId) -> bool:
        """Return True if a verdict, which may end, is stored against a peer, not evidence."""
        return gossip_items.read_verdict(self.ban_items.get(peer, b"")) is not None

    def reason(self, peer: PeerId) -> str:
        """Return the reason for the ban of a peer: the content of its evidence or verdict."""
        verdict = gossip_items.read_verdict(self.ban_items[peer])
        if verdict is not None:
            return f"a false result of chunk {verdict.index} in round {verdict.round}"
        found = gossip_items.read_evidence(self.ban_items[peer])
        return evidence.describe(found) if found is not None else ""

    def gossip_item(self, peer: PeerId) -> bytes:
        """Return the evidence against a peer, to be spread; empty for a verdict, which others cannot check."""
        item = self.ban_items[peer]
        return b"" if gossip_items.read_verdict(item) is not None else item

    def gossip_items_on_unknown(self, known: Container[PeerId]) -> list[bytes]:
        """Return the evidence against peers that are not `known`, to be spread."""
        return [item for peer in self.ban_items if peer not in known and (item := self.gossip_item(peer))]


class Bans:
    """Bans of peers in the `table`, for the reasons in `exclusions` or for two records with one sequence."""

    def __init__(
        self,
        exclusions: Exclusions,
        table: PeerTable,
        suspects: Suspects,
        queue: BroadcastQueue,
        events: list[MembershipEvent],
    ) -> None:
        self._exclusions, self._table = exclusions, table
        self._suspects, self._queue, self._events = suspects, queue, events

    def _ban(self, entry: PeerEntry, item: bytes, reason: str, now: float) -> None:
        peer = entry.record.peer_id
        self._suspects.end(peer, now, refuted=False)
        self._table.set_state(entry, "banned", now)
        entry.state_item, entry.reason = item, reason
        if item:
            self._queue.add(("record", peer, peer), item)
        self._events.append(MembershipEvent("banned", peer, reason))

    def apply_item(self, entry: PeerEntry, now: float) -> None:
        """Ban a known peer because of the evidence or the verdict that is stored against it."""
        peer = entry.record.peer_id
        self._ban(entry, self._exclusions.gossip_item(peer), self._exclusions.reason(peer), now)

    def ban_by_evidence(self, found: Evidence, now: float) -> None:
        """Process valid evidence against a peer, known or not; one piece for each peer is stored and spread."""
        self.ban_by_item(evidence.signer(found), gossip_items.evidence_item(found), now)

    def ban_by_item(self, peer: PeerId, item: bytes, now: float) -> None:
        """Ban a peer, known or not, because of valid evidence or a verdict."""
        if not self._exclusions.store(peer, item, (self._table.entries, self._table.protected)):
            return
        entry = self._table.entries.get(peer)
        if peer == self._table.me:
            self._events.append(MembershipEvent("banned", peer, self._exclusions.reason(peer)))
        elif entry is not None and not entry.ban_is_proved:
            self.apply_item(entry, now)

    def end_verdict(self, peer: PeerId) -> None:
        """End the ban of a verdict. The entry of a known peer is removed: its record brings it back.

        Evidence, proofs and revocations do not expire: a peer with such an item stays banned.
        """
        if not self._exclusions.by_verdict(peer):
            return
        del self._exclusions.ban_items[peer]
        entry = self._table.entries.get(peer)
        if entry is not None and entry.state == "banned":
            if entry.state_item:
                return
            self._table.remove(peer)
            self._queue.forget(("record", peer, peer))
        self._events.append(MembershipEvent("pardoned", peer))

    def revoke(self, target: bytes, item: bytes, now: float) -> None:
        """Process a validated revocation: ban the peers that it excludes, and spread it."""
        exclusions, table = self._exclusions, self._table
        if not exclusions.revoke(target, item):
            return
        self._queue.add(("revocation", target, target), item)
        self._events.append(MembershipEvent("revoked", target))
        if exclusions.is_revoked(table.own.record.token, table.me, target):
            self._events.append(MembershipEvent("banned", table.me, REVOKED))
        for peer, entry in table.entries.items():
            if entry.state != "banned" and exclusions.is_revoked(entry.record.token, peer, target):
                self._ban(entry, item, REVOKED, now)

    def ban_by_proof(self, one: PeerRecord, other: PeerRecord, now: float) -> None:
        """Process a validated proof against a known peer.

        One against an unknown peer is ignored, because keys are free; a table brings it again once the peer is known.
        """
        entry = self._table.entries.get(one.peer_id)
        if entry is not None and not entry.ban_is_proved:
            self._table.known_items.discard(entry.record.item)
            entry.record = one
            self.ban_for_records(entry, other, now)

    def ban_for_records(self, entry: PeerEntry, other: PeerRecord, now: float) -> None:
        """Ban a peer that signed two records with the same sequence, until the proof is purged, and spread it."""
        item = gossip_items.proof_item(entry.record, other)
        self._table.known_items.add(item)
        self._ban(entry, item, f"two records with sequence {other.sequence}", now)

    def expires(self, entry: PeerEntry) -> bool:
        """Return True if a peer is banned by a proof only.

        Proofs expire with the records in them, so newcomers do not accept older ones. Other bans have no end.
        """
        return gossip_items.is_proof(entry.state_item) and entry.record.peer_id not in self._exclusions.ban_items
