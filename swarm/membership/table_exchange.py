"""Exchange of whole tables (push-pull): when to ask which peer, and which requests to answer."""

from __future__ import annotations

import math
import random

from thinwire.swarm.membership.gossip_intake import VERIFY_BURST
from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.membership.view import LivePeers
from thinwire.swarm.messages.registry import PeerId


class TableExchange:
    """Plan of the table exchanges of one peer. Times are in monotonic seconds."""

    def __init__(self, preset: Preset, rng: random.Random, now: float) -> None:
        self._preset, self._rng = preset, rng
        self.due = now + rng.random() * preset.push_pull_period
        """Time of the next request of ours."""
        self._requested_at = -math.inf
        self._other_part: PeerId | None = None
        """Peer to ask next, because it is in another part of the swarm."""
        self._answered_at: dict[PeerId, float] = {}

    def on_first_peer(self, now: float) -> None:
        """Ask at once: this peer was alone and has found another one."""
        self.due = self._requested_at = now

    def on_admission(self, peer: PeerId, now: float) -> None:
        """Ask a peer that is new in the view and has admitted us: it is in another part of the swarm.

        A newcomer is alone when it is admitted. In a mass restart many peers admit this one at once, so a request in the
        last probe period is enough.
        """
        if now >= self._requested_at + self._preset.probe_period:
            self.due, self._other_part = now, peer

    def request_rest(self, now: float) -> None:
        """Ask again soon: the last table had more records than were checked."""
        self.due = min(self.due, now + VERIFY_BURST)

    def begin(self, live: LivePeers, now: float) -> PeerId | None:
        """Return the peer to ask now, a random one as a rule; None if there is none. Plan the next request."""
        self.due = now + self._preset.push_pull(live.size)
        self._requested_at = now
        self._answered_at.clear()
        other, self._other_part = self._other_part, None
        if other is not None and live.has(other):
            return other
        return next(iter(self._rng.sample(live.sorted, min(1, len(live.sorted)))), None)

    def admits(self, peer: PeerId, now: float) -> bool:
        """Note a request of this peer; return True if it is to be answered: one in a probe period."""
        if now - self._answered_at.get(peer, -math.inf) < self._preset.probe_period:
            return False
        self._answered_at[peer] = now
        return True
