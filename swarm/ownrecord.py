"""Our own record: when to issue the next one, and whether another process issues records in our name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from .identity import Identity
from .record import SKEW, PeerRecord

FOREIGN_LIMIT = 3
"""Records in our name, from our address but not by us, before we believe that somebody else uses our key."""

MISSED = 1000
"""Records that an earlier life of ours may have issued after one that we hear of. No two of all lives may have one sequence."""


class OwnRecord:
    """`record` is the current one; `publish_at` when a new one is due (infinity: not). `period`: least seconds between two.

    `superseded`: somebody else uses our key and its record is newer, so we publish no more.
    """

    def __init__(self, identity: Identity, record: PeerRecord, period: float, wall: Callable[[], int]) -> None:
        self.record = record
        self.publish_at = math.inf
        self.superseded = False
        self._identity, self._period, self._wall = identity, period, wall
        self._floor = record.sequence
        self._published = -math.inf
        self._foreign = 0

    @property
    def due(self) -> bool:
        """A new record is on its way."""
        return self.publish_at < math.inf

    @property
    def unbelievable(self) -> bool:
        """Whether others cannot believe it when their clocks are as ours: it was issued while our clock was wrong."""
        age = self._wall() - self.record.issued
        return not -SKEW <= age <= self.record.ttl + SKEW

    def answer(self, now: float, above: int) -> None:
        """A record with a sequence above `above` and all before shall follow, as soon as the rate allows."""
        self._floor = max(self._floor, above)
        self.publish_at = min(self.publish_at, max(now, self._published + self._period))

    def publish(self, now: float) -> bool:
        """Issue the record that is due, if one is; True when so."""
        if now < self.publish_at or self.superseded:
            return False
        self.renew(now, self.record.addresses)
        return True

    def renew(self, now: float, addresses: tuple[str, ...], capabilities: int | None = None) -> None:
        """Issue a record now; `capabilities` None: those of the last one."""
        old = self.record
        self._floor += 1
        self.record = PeerRecord.create(
            self._identity,
            run_id=old.run_id,
            addresses=addresses,
            capabilities=old.capabilities if capabilities is None else capabilities,
            sequence=self._floor,
            issued=self._wall(),
            ttl=old.ttl,
        )
        self._published, self.publish_at = now, math.inf

    def judge(self, record: PeerRecord) -> Literal["known", "earlier", "rival"]:
        """What a checked record in our name is: not news, from an earlier life of ours, or from another process.

        What we issue is never above our current sequence, so whatever is has another source. Another process is one with
        another address, or one that comes again and again.
        """
        if self.superseded or record.sequence < self.record.sequence or record.wire == self.record.wire:
            return "known"
        self._foreign += 1
        if record.addresses == self.record.addresses and self._foreign < FOREIGN_LIMIT:
            return "earlier"
        self.superseded = True
        return "rival"
