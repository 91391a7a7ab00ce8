"""Record of this peer: time of the next one, and detection of other processes that use our key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from thinwire.swarm.identity.identity import Identity
from thinwire.swarm.identity.peer_record import SKEW, PeerRecord

FOREIGN_LIMIT = 3
"""Number of records with our key and address, but of another process, that prove its existence."""

MAX_UNSEEN = 1000
"""Maximum number of records that another process with our key may have issued after the one received.

No two processes with one key may use the same sequence.
"""

YIELDED = "another process used our key and ended when this one came; if it ran elsewhere, the key was copied"
"""Message to the owner of the later process; the process that ends gets an error."""


class OwnRecord:
    """Current `record` of this peer, and the time of the next one.

    - `publish_at`: time at which a new record is due (infinity: none is).
    - `period`: minimum seconds between two records.
    - `superseded`: another process uses our key and its record is newer. So this process publishes one last record and no
      other. This last record has no address and a higher sequence than the record of the other process, which learns
      from it that its key was in use elsewhere.
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
        """True if a new record is due or scheduled."""
        return self.publish_at < math.inf

    @property
    def invalid_now(self) -> bool:
        """True if peers reject our record because it was issued while our clock was wrong."""
        age = self._wall() - self.record.issued
        return not -SKEW <= age <= self.record.ttl + SKEW

    def schedule(self, now: float, *, above: int) -> None:
        """Schedule a record with a sequence above `above` and all previous ones, as soon as the rate allows."""
        self._floor = max(self._floor, above)
        self.publish_at = min(self.publish_at, max(now, self._published + self._period))

    def publish(self, now: float) -> bool:
        """Issue the record that is due, if there is one. Returns True if so."""
        if now < self.publish_at or self.superseded:
            return False
        self.renew(now, self.record.addresses)
        return True

    def renew(
        self, now: float, addresses: tuple[str, ...], capabilities: int | None = None, token: bytes | None = None
    ) -> None:
        """Issue a record now, unless superseded.

        If `capabilities` or `token` is None, that of the last record is used.
        """
        if self.superseded:
            return
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
            token=old.token if token is None else token,
            name=old.name,
        )
        self._published, self.publish_at = now, math.inf

    def yield_to(self, rival: PeerRecord, now: float) -> None:
        """Issue the last record of this process: another one that uses our key started later.

        Its sequence is far above the other process's next ones, and differs between several processes that give way.
        """
        spread = int.from_bytes(self.record.wire[-4:]) % MAX_UNSEEN
        self._floor = max(self._floor, rival.sequence) + MAX_UNSEEN + spread
        self.renew(now, ())
        self.superseded = True

    def classify(self, record: PeerRecord) -> Literal["known", "earlier", "rival", "yielded"]:
        """Classify a validated record in our name.

        "known": not new; "earlier": from an earlier process with our key; "rival": from another process that runs now;
        "yielded": the last record of a process that ends because this one started later.
        Our own records never have a sequence above the current one, so a higher sequence means another source. A rival
        is a source without an address of ours, or one that issues records repeatedly.
        """
        if self.superseded or record.sequence < self.record.sequence or record.wire == self.record.wire:
            return "known"
        if not record.addresses:
            return "yielded"
        if record.sequence < self._floor:
            return "known"  # Our next record will be above it. Until then, many peers may send us the same one.
        self._foreign += 1
        if set(record.addresses).intersection(self.record.addresses) and self._foreign < FOREIGN_LIMIT:
            return "earlier"
        return "rival"
