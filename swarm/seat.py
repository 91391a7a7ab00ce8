"""What a peer's record says of its part in a model that some hold together: which stage, and in whose group.

It is in the record's `capabilities`: the lowest byte is the stage plus one, the three above it the first bytes of the id of the
group's origin, the peer that holds stage 0. 0: this peer holds the whole model, or does not know yet what it will hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .identity import short
from .protocol import MAX_HOPS, PeerId
from .record import PeerRecord

TAG_BYTES = 3

WAITING = 0xFF
"""The code of who is too small for the whole model and has no stage yet."""


class Seat(NamedTuple):
    """Stage `stage` of the group of `origin`. In a record only the first bytes of the id are said."""

    stage: int
    origin: PeerId

    def code(self) -> int:
        """As it stands in a record. Raises ValueError for a stage that there cannot be."""
        if not 0 <= self.stage < MAX_HOPS:
            raise ValueError(f"stage {self.stage}")
        return (self.stage + 1) | int.from_bytes(self.origin[:TAG_BYTES], "big") << 8


@dataclass(frozen=True, slots=True)
class Seating:
    """Who holds what. `groups`: by origin, for every stage after the first, its peers; `orphans`: by stage, those whose origin
    is not there; `waiting`: those that have no stage yet; all in ascending order.
    """

    groups: Mapping[PeerId, Mapping[int, tuple[PeerId, ...]]] = field(default_factory=dict)
    orphans: Mapping[int, tuple[PeerId, ...]] = field(default_factory=dict)
    waiting: tuple[PeerId, ...] = ()

    def of(self, peer: PeerId) -> Seat | None:
        """A peer's seat; None for one that holds all of the model, waits, or has lost its origin."""
        for origin, stages in self.groups.items():
            if peer == origin:
                return Seat(0, origin)
            for stage, peers in stages.items():
                if peer in peers:
                    return Seat(stage, origin)
        return None

    def told(self, peer: PeerId) -> str:
        """A peer's seat, for people; empty for one that holds all of the model."""
        seat = self.of(peer)
        if seat is not None:
            return f"stage {seat.stage} of group {short(seat.origin)}"
        lone = next((stage for stage, peers in self.orphans.items() if peer in peers), None)
        return f"stage {lone} without a group" if lone is not None else "no stage yet" if peer in self.waiting else ""


def seating(records: Iterable[PeerRecord], stages: int) -> Seating:
    """What the records of those who are here say, of a model of so many stages. What makes no sense is left out.

    Of two origins whose ids begin alike the lesser one has the hosts of both.
    """
    origins: dict[bytes, PeerId] = {}
    hosts: list[tuple[PeerId, int, bytes]] = []
    waiting: list[PeerId] = []
    for record in sorted(records, key=lambda one: one.peer_id):
        stage, tag = (record.capabilities & 0xFF) - 1, (record.capabilities >> 8).to_bytes(TAG_BYTES, "big")
        if record.capabilities == WAITING:
            waiting.append(record.peer_id)
        elif stage == 0 and tag == record.peer_id[:TAG_BYTES]:
            origins.setdefault(tag, record.peer_id)
        elif 0 < stage < stages:
            hosts.append((record.peer_id, stage, tag))
    groups: dict[PeerId, dict[int, tuple[PeerId, ...]]] = {
        origin: dict.fromkeys(range(1, stages), ()) for origin in sorted(origins.values())
    }
    orphans: dict[int, tuple[PeerId, ...]] = {}
    for peer, stage, tag in hosts:
        held = groups[origins[tag]] if tag in origins else orphans
        held[stage] = (*held.get(stage, ()), peer)
    return Seating(groups, orphans, tuple(waiting))
