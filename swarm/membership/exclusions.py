"""Exclusions of a run: rule of admission, revocations, evidence against voters, verdicts on owners."""

from __future__ import annotations

from collections.abc import Container, Sequence

from thinwire.swarm import evidence
from thinwire.swarm.identity.admission_token import AdmissionPolicy, is_revoked
from thinwire.swarm.identity.identity import peer_id_of
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.membership import gossip_items
from thinwire.swarm.messages.registry import PeerId

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
        if self.revoked and any(self.is_revoked(record.token, record.peer_id, target) for target in self.revoked):
            return REVOKED
        return self.policy.refusal(record.token, record.peer_id)

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
