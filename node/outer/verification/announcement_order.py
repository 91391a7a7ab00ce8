"""Order in which the announcements of contributions came."""

from __future__ import annotations

from itertools import count

import blake3
from thinwire.swarm.messages.registry import PeerId, Ready

MOST_ANNOUNCED = 8
"""Announcements of one peer to one round whose order is stored."""


class AnnouncementOrder:
    """Place of each announcement by sender, round and hashes; a repeated announcement is no later one."""

    def __init__(self) -> None:
        self._places: dict[tuple[PeerId, int], dict[bytes, int]] = {}
        self._count = count(1)

    def add(self, peer: PeerId, ready: Ready) -> None:
        """Note an announcement that has come now."""
        known = self._places.setdefault((peer, ready.round), {})
        if len(known) < MOST_ANNOUNCED:
            known.setdefault(blake3.blake3(ready.hashes).digest(), next(self._count))

    def of(self, peer: PeerId, ready: Ready) -> int:
        """Return the place of an announcement; 0 if it is not stored."""
        return self._places.get((peer, ready.round), {}).get(blake3.blake3(ready.hashes).digest(), 0)

    def forget(self, round: int) -> None:
        """Forget the announcements to rounds up to this one."""
        self._places = {key: places for key, places in self._places.items() if key[1] > round}
