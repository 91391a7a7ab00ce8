"""Who has a stage, as far as records say."""

from __future__ import annotations

from thinwire.swarm.protocol import PeerId

from ..peer import Peer


def holders(peer: Peer, stage: int) -> set[PeerId]:
    """Members that hold a stage, or the whole model, or are about to; `peer` itself among them where it does."""
    roster, found = peer.presence.roster, set[PeerId]()
    for one in roster.view.peers:
        record = roster.record_of(one)
        if record is not None and record.capabilities & 0xFF in (0, stage + 1):
            found.add(one)
    return found
