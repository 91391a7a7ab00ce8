"""What comes in: gossip items, each believed on the strength of its own signature, within a budget of signature checks."""

from __future__ import annotations

from collections.abc import Callable

from . import rumor
from .member import Member
from .members import Members
from .protocol import PeerId
from .record import PeerRecord, RecordError
from .rumor import Accusation, Departure
from .suspicion import Bucket

VERIFY_RATE = 500.0
"""Signatures of gossip items checked per second, and of those at most so many from one sender:"""
VERIFY_RATE_SOURCE = 50.0
VERIFY_BURST = 4.0
"""Seconds of either rate that may be saved up, for the tables a joiner gets."""


class Intake:
    """Judges items and hands the sound ones to the members; passes over what is malformed, stale, forged or too much.

    Whatever can be ruled out without checking a signature is, so that a storm costs little.
    """

    def __init__(self, members: Members, run_id: bytes, wall: Callable[[], int], now: float) -> None:
        self._members, self._run_id, self._wall = members, run_id, wall
        self._budget = Bucket(VERIFY_RATE, VERIFY_RATE * VERIFY_BURST, VERIFY_RATE * VERIFY_BURST, now)
        self._budgets: dict[PeerId, Bucket] = {}

    def take(self, source: PeerId, items: tuple[bytes, ...], now: float) -> list[PeerId]:
        """Take in items that came from `source`. Returns the peers that are new in the view."""
        joined: list[PeerId] = []
        for item in items:
            kind = item[0] if item else 0
            if kind == rumor.RECORD:
                record = self._record(source, item, now)
                if record is not None and self._members.accept(record, now):
                    joined.append(record.peer_id)
            elif kind == rumor.PROOF:
                self._proof(source, item, now)
            else:
                self._statement(source, item, now)
        return joined

    def forget(self) -> None:
        """Start the budgets of all senders afresh."""
        self._budgets.clear()

    def _affordable(self, source: PeerId, now: float) -> bool:
        if source not in self._budgets:
            depth = VERIFY_RATE_SOURCE * VERIFY_BURST
            self._budgets[source] = Bucket(VERIFY_RATE_SOURCE, depth, depth, now)
        return self._budgets[source].take(now) and self._budget.take(now)

    def _record(self, source: PeerId, item: bytes, now: float) -> PeerRecord | None:
        if item in self._members.items or not self._affordable(source, now):
            return None
        try:
            return PeerRecord.parse(item[1:], run_id=self._run_id, now=self._wall())
        except RecordError:
            return None

    def _proof(self, source: PeerId, item: bytes, now: float) -> None:
        if any(member.note == item for member in self._members.table.values()) or not self._affordable(source, now):
            return
        pair = rumor.read_proof(item, self._run_id, self._wall())
        if pair is not None and pair[0].peer_id != self._members.me:
            self._members.convict(*pair, now)

    def _statement(self, source: PeerId, item: bytes, now: float) -> None:
        statement = rumor.read(item)
        if isinstance(statement, Departure):
            member = self._members.table.get(statement.peer)
            if member is not None and _departs(member, statement):
                if self._affordable(source, now) and rumor.signed(item, member.record.public_key, self._run_id):
                    self._members.depart(statement, item, now)
        elif isinstance(statement, Accusation):
            key = self._key(statement)
            if key is not None and self._members.counts(statement, source, now):
                if self._affordable(source, now) and rumor.signed(item, key, self._run_id):
                    self._members.accuse(statement, item, now)

    def _key(self, accusation: Accusation) -> bytes | None:
        """The public key of an accuser whose word counts: one in the view, or about us, any that is not banned.

        After a split, those that we hold for dead must be able to tell us that they hold us for dead.
        """
        member = self._members.table.get(accusation.accuser)
        if member is None or member.state == "banned" or not (member.live or accusation.target == self._members.me):
            return None
        return member.record.public_key


def _departs(member: Member, departure: Departure) -> bool:
    """Whether a departure, if its signature holds, changes anything."""
    return member.state not in ("left", "banned") and departure.sequence >= member.record.sequence
