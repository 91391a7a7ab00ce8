"""Claims of other peers to be ahead. A claim makes this peer ask for the proof, see `Head`."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.swarm.messages.registry import PeerId

ASKED = 8
"""Peers ahead of us that are asked how our round ended, when it begins."""


class ProgressClaims:
    """Claims about later rounds, by peer: explicit ones, and those that the messages of a peer imply.

    A peer that is ahead is asked how our round ended. It answers with the commit while it has the results, and we
    follow round by round; otherwise it answers that we are behind. Only a chain proves that, so it is asked for, too.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._seen: dict[PeerId, int] = {}
        """Latest rounds of which the peers have sent messages."""
        self._claims: dict[PeerId, int] = {}
        """Rounds that the peers claim to have committed."""
        self._asked: dict[PeerId, float] = {}
        """Times at which they were asked about our round because of a message."""
        self._questioned: dict[PeerId, float] = {}
        """Times at which they were asked for a proof."""

    def begin(self, round: int) -> list[PeerId]:
        """Begin our next round; return the peers to ask how it ended."""
        self._claims.clear()
        self._asked.clear()
        self._questioned.clear()
        self._seen = {peer: seen for peer, seen in self._seen.items() if seen > round}
        return sorted(self._seen)[:ASKED]

    def seen(self, peer: PeerId, round: int) -> None:
        """Note a message of a later round."""
        self._seen[peer] = max(round, self._seen.get(peer, 0))

    def asks(self, peer: PeerId, patience: float) -> bool:
        """Return True if it is time to ask a peer about our round, and note that it is asked."""
        if self._now() < self._asked.get(peer, -patience) + patience / 4:
            return False
        self._asked[peer] = self._now()
        return True

    def claimed(self, peer: PeerId, round: int) -> None:
        """Note the claim of a peer that it has committed `round`."""
        self._claims[peer] = round

    def past(self, round: int) -> set[PeerId]:
        """Return the peers that claim to have committed `round`, or send messages of a later one."""
        later = {peer for peer, seen in self._seen.items() if seen > round}
        return later | {peer for peer, claimed in self._claims.items() if claimed >= round}

    def unproved(self, round: int, progressed_at: float, patience: float, *, waits: bool) -> list[PeerId]:
        """Return the peers to ask for a proof now: each once in a patience, at most ASKED at a time.

        `round`: the last one that we have. `progressed_at`: time of the last progress of our round. These are the peers that
        claim to have committed a later round, unless this peer `waits` only for results; after a patience without progress
        they are all peers that seem to be ahead.
        """
        now, still = self._now(), self._now() >= progressed_at + patience
        claim = {peer for peer, claimed in self._claims.items() if claimed > round and (still or not waits)}
        imply = {peer for peer, seen in self._seen.items() if seen > round + 1 and still}
        due = [peer for peer in sorted(claim | imply) if now >= self._questioned.get(peer, -patience) + patience]
        self._questioned |= dict.fromkeys(due[:ASKED], now)
        return due[:ASKED]

    def on_link_down(self, peer: PeerId) -> None:
        for memory in (self._seen, self._claims, self._asked, self._questioned):
            memory.pop(peer, None)
