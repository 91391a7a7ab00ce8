"""Holders of a stage, according to peer records."""

from __future__ import annotations

from thinwire.node.peer.peer import Peer
from thinwire.swarm.messages.registry import PeerId


def holders(peer: Peer, stage: int) -> set[PeerId]:
    """Return the members that hold a stage or the whole model, or are about to; including `peer` itself."""
    roster, found = peer.presence.roster, set[PeerId]()
    for one in roster.peers.view.peers:
        record = roster.peers.record_of(one)
        if record is not None and record.capabilities & 0xFF in (0, stage + 1):
            found.add(one)
    return found
