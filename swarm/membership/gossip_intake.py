"""Intake of gossip items: each is judged by its own signature, within a budget of signature checks."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.swarm import evidence
from thinwire.swarm.identity.peer_record import PeerRecord, RecordError
from thinwire.swarm.membership import gossip_items
from thinwire.swarm.membership.gossip_items import Accusation, Departure
from thinwire.swarm.membership.peer_table import PeerEntry
from thinwire.swarm.membership.suspicion import TokenBucket
from thinwire.swarm.membership.transitions import Transitions
from thinwire.swarm.messages.registry import PeerId

VERIFY_RATE = 500.0
"""Maximum number of signatures of gossip items that are checked per second."""

VERIFY_RATE_SOURCE = 50.0
"""Maximum number of signatures of gossip items from one sender that are checked per second."""

VERIFY_BURST = 4.0
"""Unused checks that accumulate, in seconds of either rate."""

TABLE_RECORDS = 2000
"""Records of a requested table that are checked beyond these rates; the checks take about 0.2 s."""


class GossipIntake:
    """Filter of gossip items: valid ones cause transitions; malformed, forged or excess ones are ignored.

    Everything that can be ruled out without a signature check is ruled out first, so that a flood of items costs
    little.
    """

    def __init__(self, transitions: Transitions, run_id: bytes, wall: Callable[[], int], now: float) -> None:
        self._transitions, self._run_id, self._wall = transitions, run_id, wall
        self._table = transitions.table
        self._budget = TokenBucket(VERIFY_RATE, VERIFY_RATE * VERIFY_BURST, VERIFY_RATE * VERIFY_BURST, now)
        self._budgets: dict[PeerId, TokenBucket] = {}
        self._requested_from: PeerId | None = None
        self._unbudgeted = 0
        """Number of further records of the requested table that are checked without a budget."""
        self._is_first = False
        """True if the requested table is the first one, or its continuation.

        Other peers usually know its records.
        """
        self.incomplete = False
        """True if the requested table had more records than were checked."""

    def expect_table(self, source: PeerId) -> None:
        """Expect a table from `source`: TABLE_RECORDS of its records are checked without a budget.

        Resets the budgets of all senders.
        """
        self._is_first = self._requested_from is None or (self._is_first and self.incomplete)
        self._budgets.clear()
        self._requested_from, self._unbudgeted, self.incomplete = source, TABLE_RECORDS, False

    def take(self, source: PeerId, items: tuple[bytes, ...], now: float, *, table: bool = False) -> list[PeerId]:
        """Process items that came from `source`. Returns the peers that are new in the view.

        table: they are a part of its table.
        """
        joined: list[PeerId] = []
        wall = self._wall()
        known, first_table = self._table.known_items, table and source == self._requested_from and self._is_first
        for item in items:
            if item in known:
                continue
            kind = item[0] if item else 0
            if kind == gossip_items.RECORD:
                record = self._record(source, item, now, wall, table)
                if record is None:
                    continue
                own = record.peer_id == source
                if self._transitions.accept(record, now, authenticated=own, first_table=first_table):
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

    def take_own(self, items: tuple[bytes, ...], now: float) -> None:
        """Process evidence, revocations and verdicts that this peer has found or stored, without a budget."""
        for item in items:
            self._evidence(None, item, now)
            self._revocation(None, item, now)
            if (verdict := gossip_items.read_verdict(item)) is not None:
                self._transitions.bans.ban_by_item(verdict.owner, item, now)

    def _within_budget(self, source: PeerId | None, now: float) -> bool:
        if source is None:
            return True
        if source not in self._budgets:
            depth = VERIFY_RATE_SOURCE * VERIFY_BURST
            self._budgets[source] = TokenBucket(VERIFY_RATE_SOURCE, depth, depth, now)
        return self._budgets[source].take(now) and self._budget.take(now)

    def _record(self, source: PeerId, item: bytes, now: float, wall: int, table: bool) -> PeerRecord | None:
        if asked := table and source == self._requested_from and self._unbudgeted > 0:
            self._unbudgeted -= 1
            self.incomplete |= not self._unbudgeted
        if not asked and not self._within_budget(source, now):
            return None
        try:
            record = PeerRecord.parse(item[1:], run_id=self._run_id, now=None)
        except RecordError:
            return None
        try:
            record.check_time(wall)
        except RecordError:
            if record.peer_id == self._table.me:
                self._transitions.exceed(record, now)
            return None
        return record

    def _proof(self, source: PeerId, item: bytes, now: float) -> None:
        peer = gossip_items.accused(item)
        entry = self._table.entries.get(peer) if peer is not None else None
        if entry is None or entry.ban_is_proved or not self._within_budget(source, now):
            return
        pair = gossip_items.read_proof(item, self._run_id, self._wall())
        if pair is not None and pair[0].peer_id != self._table.me:
            self._transitions.bans.ban_by_proof(*pair, now)

    def _evidence(self, source: PeerId | None, item: bytes, now: float) -> None:
        found, exclusions = gossip_items.read_evidence(item), self._transitions.exclusions
        if found is None:
            return
        peer = evidence.signer(found)
        # Evidence takes the place of a verdict, which ends with its lineage.
        known = peer in exclusions.ban_items and not exclusions.by_verdict(peer)
        if known or not self._within_budget(source, now):
            return
        if evidence.is_valid(found, self._run_id):
            self._transitions.bans.ban_by_evidence(found, now)

    def _revocation(self, source: PeerId | None, item: bytes, now: float) -> None:
        policy = self._transitions.exclusions.policy
        if policy is None or item[:1] != bytes([gossip_items.REVOCATION]):
            return
        if item in self._transitions.exclusions.revoked.values() or not self._within_budget(source, now):
            return
        if target := policy.revocation(item[1:]):
            self._transitions.bans.revoke(target, item, now)

    def _statement(self, source: PeerId, item: bytes, now: float) -> None:
        statement = gossip_items.read(item)
        if isinstance(statement, Departure):
            entry = self._table.entries.get(statement.peer)
            if entry is not None and _departs(entry, statement):
                if self._within_budget(source, now) and gossip_items.is_signed(
                    item, entry.record.public_key, self._run_id
                ):
                    self._transitions.depart(statement, item, now)
        elif isinstance(statement, Accusation):
            key = self._key(statement)
            if key is not None and self._transitions.is_relevant(statement, source, now):
                if self._within_budget(source, now) and gossip_items.is_signed(item, key, self._run_id):
                    self._transitions.accuse(statement, item, now)

    def _key(self, accusation: Accusation) -> bytes | None:
        """Return the public key of an accuser if its accusations count, else None.

        Accusers in the view count. An accusation of this peer counts from any accuser that is not banned: after a
        partition, peers that we consider dead must be able to tell us that they consider us dead.
        """
        entry = self._table.entries.get(accusation.accuser)
        if entry is None or entry.state == "banned" or not (entry.live or accusation.target == self._table.me):
            return None
        return entry.record.public_key


def _departs(entry: PeerEntry, departure: Departure) -> bool:
    """Return True if a departure, provided that its signature is valid, changes anything."""
    return entry.state not in ("left", "banned") and departure.sequence >= entry.record.sequence
