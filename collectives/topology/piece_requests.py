"""Requests for pieces of an all-gather that do not arrive.

A piece that a helper relays is first left to the helper's stand-in, which asks the contributor and passes it on. After
that, and at once if no helper was to send it, every peer asks any other one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

from thinwire.collectives.topology.chunk_requests import ChunkRequests
from thinwire.collectives.topology.relay_plan import RelayPlan, stand_in
from thinwire.swarm.messages.registry import PeerId, Proposal

SOON, LATE = 0.1, 0.5
"""Patiences after which to ask others for the payload of an unreachable peer, and of a slow one."""


class MissingPiece(NamedTuple):
    """Piece with a known hash that is not here.

    slot: its number among the results. piece: its number in the payload of its contributor `source`. helper: the peer
    that should send it here in place of its contributor, or None.
    """

    slot: int
    piece: int
    source: PeerId
    helper: PeerId | None


class PieceRequests:
    """Requests of the peer that has this relay plan. Times and patiences are in seconds."""

    def __init__(self, plan: RelayPlan) -> None:
        self._relay_plan = plan
        self._requests = ChunkRequests()
        self._again = math.inf
        """Time from which pieces that were left to a stand-in are late."""

    def due(self, now: float, patience: float) -> bool:
        """Return True unless pieces were requested a moment ago."""
        return now >= self._requests.at + SOON * patience

    def plan(
        self,
        proposal: Proposal,
        pieces: Iterable[MissingPiece],
        live: Collection[PeerId],
        *,
        progressed_at: float,
        now: float,
        patience: float,
    ) -> dict[PeerId, list[int]]:
        """Return which peer to ask for which slots.

        live: peers with a link. progressed_at: time when useful data last arrived. A piece is requested if it is late, or if
        the peer that should send it has no link.
        """
        late = now >= progressed_at + LATE * patience and now >= min(self._again, self._requests.at + LATE * patience)
        parts: dict[PeerId, list[int]] = {}
        missing, again = [], math.inf
        for slot, piece, source, helper in pieces:
            if not late and (helper or source) in live:
                continue
            if (
                helper is None
                or source not in live
                or not self._relay_plan.note_late(slot, helper, linked=helper in live)
            ):
                missing.append(slot)
                continue
            again = now + 2 * SOON * patience
            if stand_in(proposal, source, helper, piece) == self._relay_plan.me:
                parts.setdefault(source, []).append(slot)
        others = [peer for peer in proposal.alive if peer != self._relay_plan.me and peer in live]
        if missing and others:
            for peer, part in self._requests.plan(missing, others, now).items():
                parts.setdefault(peer, []).extend(part)
        if missing or again < math.inf:
            self._requests.at, self._again = now, again
        return parts
