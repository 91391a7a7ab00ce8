"""Intake of gossip items: each is judged by its own signature, within a budget of signature checks."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.swarm import evidence
from thinwire.swarm.identity.peer_record import PeerRecord, RecordError
from thinwire.swarm.membership import gossip_items
from thinwire.swarm.membership.gossip_items import Accusation, Departure
from thinwire.swarm.membership.member import Member
from thinwire.swarm.membership.member_table import Members
from thinwire.swarm.membership.suspicion import Bucket
from thinwire.swarm.messages.registry import PeerId

VERIFY_RATE = 500.0
"""Signatures of gossip items checked per second, in total and (next constant) per sender."""
VERIFY_RATE_SOURCE = 50.0
VERIFY_BURST = 4.0
"""Unused checks that accumulate, in seconds of either rate."""

TABLE = 2000
"""Records of a requested table that are checked beyond these rates; it takes some 0.2 s."""


class Intake:
    """Filter that passes valid items to the members and ignores malformed, stale, forged or excess items.

    Everything that can be ruled out without a signature check is ruled out first, so that a flood of items costs
    little.
    """

    def __init__(self, members: Members, run_id: bytes, wall: Callable[[], int], now: float) -> None:
        self._members, self._run_id, self._wall = members, run_id, wall
        self._budget = Bucket(VERIFY_RATE, VERIFY_RATE * VERIFY_BURST, VERIFY_RATE * VERIFY_BURST, now)
        self._budgets: dict[PeerId, Bucket] = {}
        self._asked: PeerId | None = None
        self._rest = 0
        """Records that the table of the peer that we have asked may still have."""
        self._first = False
        """True if this table is the first one, or its continuation: as a rule all others know its records."""
        self.incomplete = False
        """True if that table had more records than were checked."""

    def ask(self, source: PeerId) -> None:
        """Expect a table from `source`: TABLE of its records are checked without a budget.

        Resets the budgets of all senders.
        """
        self._first = self._asked is None or (self._first and self.incomplete)
        self._budgets.clear()
        self._asked, self._rest, self.incomplete = source, TABLE, False

    def take(self, source: PeerId, items: tuple[bytes, ...], now: float, *, table: bool = False) -> list[PeerId]:
        """Process items that came from `source`. Returns the peers that are new in the view.

        table: they are a part of its table.
        """
        joined: list[PeerId] = []
        known, told = self._members.items, table and source == self._asked and self._first
        for item in items:
            if item in known:
                continue
            kind = item[0] if item else 0
            if kind == gossip_items.RECORD:
                record = self._record(source, item, now, table)
                if record is not None and self._members.accept(record, now, told=told):
                    joined.append(record.peer_id)
            elif kind == gossip_items.PROOF:
                self._proof(source, item, now)
            elif kind == gossip_items.EVIDENCE:
                self._evidence(source, item, now)
            elif kind == gossip_items.REVOCATION:
                self._revocation(source, item, now)
            else:
                self._statement(source, item, now)
        return joined

    def recall(self, items: tuple[bytes, ...], now: float) -> None:
        """Process evidence, revocations and verdicts that this peer has found or stored, without a budget."""
        for item in items:
            self._evidence(None, item, now)
            self._revocation(None, item, now)
            if (verdict := gossip_items.read_verdict(item)) is not None:
                self._members.expel(verdict.owner, item, now)

    def _affordable(self, source: PeerId | None, now: float) -> bool:
        if source is None:
            return True
        if source not in self._budgets:
            depth = VERIFY_RATE_SOURCE * VERIFY_BURST
            self._budgets[source] = Bucket(VERIFY_RATE_SOURCE, depth, depth, now)
        return self._budgets[source].take(now) and self._budget.take(now)

    def _record(self, source: PeerId, item: bytes, now: float, table: bool) -> PeerRecord | None:
        if asked := table and source == self._asked and self._rest > 0:
            self._rest -= 1
            self.incomplete |= not self._rest
        if not asked and not self._affordable(source, now):
            return None
        try:
            return PeerRecord.parse(item[1:], run_id=self._run_id, now=self._wall())
        except RecordError:
            return None

    def _proof(self, source: PeerId, item: bytes, now: float) -> None:
        if any(member.note == item for member in self._members.table.values()) or not self._affordable(source, now):
            return
        pair = gossip_items.read_proof(item, self._run_id, self._wall())
        if pair is not None and pair[0].peer_id != self._members.me:
            self._members.convict(*pair, now)

    def _evidence(self, source: PeerId | None, item: bytes, now: float) -> None:
        found, excluded = gossip_items.read_evidence(item), self._members.excluded
        if found is None:
            return
        peer = evidence.convicted(found)
        # Evidence takes the place of a verdict, which ends with its lineage.
        known = peer in excluded.convicted and not excluded.judged(peer)
        if known or not self._affordable(source, now):
            return
        if evidence.convicts(found, self._run_id):
            self._members.convict_voter(found, now)

    def _revocation(self, source: PeerId | None, item: bytes, now: float) -> None:
        policy = self._members.excluded.policy
        if policy is None or item[:1] != bytes([gossip_items.REVOCATION]):
            return
        if item in self._members.excluded.revoked.values() or not self._affordable(source, now):
            return
        if target := policy.revocation(item[1:]):
            self._members.revoke(target, item, now)

    def _statement(self, source: PeerId, item: bytes, now: float) -> None:
        statement = gossip_items.read(item)
        if isinstance(statement, Departure):
            member = self._members.table.get(statement.peer)
            if member is not None and _departs(member, statement):
                if self._affordable(source, now) and gossip_items.signed(item, member.record.public_key, self._run_id):
                    self._members.depart(statement, item, now)
        elif isinstance(statement, Accusation):
            key = self._key(statement)
            if key is not None and self._members.counts(statement, source, now):
                if self._affordable(source, now) and gossip_items.signed(item, key, self._run_id):
                    self._members.accuse(statement, item, now)

    def _key(self, accusation: Accusation) -> bytes | None:
        """Return the public key of an accuser if its accusations count, else None.

        Accusers in the view count. An accusation of this peer counts from any accuser that is not banned: after a
        partition, peers that we consider dead must be able to tell us that they consider us dead.
        """
        member = self._members.table.get(accusation.accuser)
        if member is None or member.state == "banned" or not (member.live or accusation.target == self._members.me):
            return None
        return member.record.public_key


def _departs(member: Member, departure: Departure) -> bool:
    """Return True if a departure, provided that its signature is valid, changes anything."""
    return member.state not in ("left", "banned") and departure.sequence >= member.record.sequence
