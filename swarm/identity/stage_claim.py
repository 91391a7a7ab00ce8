"""Stage claims: the part of a record that states which stage of a pipeline a peer holds.

The claim is in the record's `capabilities`: the lowest byte is the stage plus one, the three bytes above it are the
first bytes of the id of the group's origin, the peer that holds stage 0. The value 0 means that the peer holds the
whole model, or does not know yet what it will hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.swarm.identity.identity import short
from thinwire.swarm.identity.peer_record import PeerRecord
from thinwire.swarm.messages.registry import MAX_HOPS, PeerId

TAG_BYTES = 3

WAITING = 0xFF
"""Claim of a peer that is too small for the whole model and has no stage yet."""


class Seat(NamedTuple):
    """Stage `stage` in the group of `origin`. A record contains only the first bytes of the origin's id."""

    stage: int
    origin: PeerId

    def code(self) -> int:
        """Return the value for a record's `capabilities`. Raises ValueError for an invalid stage."""
        if not 0 <= self.stage < MAX_HOPS:
            raise ValueError(f"stage {self.stage}")
        return (self.stage + 1) | int.from_bytes(self.origin[:TAG_BYTES], "big") << 8


@dataclass(frozen=True, slots=True)
class Seating:
    """Assignment of stages to peers; all in ascending order.

    groups: by origin, for every stage after the first, its hosts. orphans: by stage, the hosts whose origin is absent.
    waiting: peers that have no stage yet.
    """

    groups: Mapping[PeerId, Mapping[int, tuple[PeerId, ...]]] = field(default_factory=dict)
    orphans: Mapping[int, tuple[PeerId, ...]] = field(default_factory=dict)
    waiting: tuple[PeerId, ...] = ()

    def of(self, peer: PeerId) -> Seat | None:
        """Return a peer's seat, or None if it holds the whole model, waits, or has lost its origin."""
        for origin, stages in self.groups.items():
            if peer == origin:
                return Seat(0, origin)
            for stage, peers in stages.items():
                if peer in peers:
                    return Seat(stage, origin)
        return None

    def describe(self, peer: PeerId) -> str:
        """Describe a peer's seat for a user; empty for a peer that holds the whole model."""
        seat = self.of(peer)
        if seat is not None:
            return f"stage {seat.stage} of group {short(seat.origin)}"
        lone = next((stage for stage, peers in self.orphans.items() if peer in peers), None)
        return f"stage {lone} without a group" if lone is not None else "no stage yet" if peer in self.waiting else ""


def seating(records: Iterable[PeerRecord], stages: int) -> Seating:
    """Return the seating that the records of live peers claim, for a model of `stages` stages.

    Invalid claims are ignored. If the ids of two origins have the same first bytes, the lesser one gets the hosts of
    both.
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
