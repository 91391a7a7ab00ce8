"""Claims of other peers to be ahead. A claim makes this peer ask for the proof, see `Head`."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.swarm.messages.registry import PeerId

ASKED = 8
"""Peers ahead of us that are asked how our round ended, when it begins."""


class ProgressClaims:
    """Claims about later rounds, by peer.

    A peer that is ahead is asked how our round ended. It answers with the commit while it has the results, and we
    follow round by round; otherwise it answers that we are behind. The state is fetched only if a chain proves that, and
    no peer has sent the commit for one patience.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._seen: dict[PeerId, int] = {}
        self._claims: dict[PeerId, int] = {}
        self._asked: dict[PeerId, float] = {}
        self._questioned: dict[PeerId, float] = {}
        self._since: float | None = None

    def begin(self, round: int) -> list[PeerId]:
        """Begin our next round; return the peers to ask how it ended."""
        self._claims.clear()
        self._asked.clear()
        self._questioned.clear()
        self._since = None
        self._seen = {peer: seen for peer, seen in self._seen.items() if seen > round}
        return sorted(self._seen)[:ASKED]

    def seen(self, peer: PeerId, round: int, patience: float) -> bool:
        """Note a message of a later round; return True if it is time to ask the peer about ours."""
        self._seen[peer] = max(round, self._seen.get(peer, 0))
        if self._now() < self._asked.get(peer, -patience) + patience / 4:
            return False
        self._asked[peer] = self._now()
        return True

    def claimed(self, peer: PeerId, round: int) -> None:
        """Note the claim of a peer that it has committed `round`."""
        self._claims[peer] = round

    def past(self, round: int) -> set[PeerId]:
        """Return the peers that claim to have committed a later round."""
        return {peer for peer, claim in self._claims.items() if claim > round}

    def further(self, round: int) -> set[PeerId]:
        """Return the peers that have committed a later round, by their claims or by their messages."""
        return self.past(round) | {peer for peer, seen in self._seen.items() if seen > round + 1}

    def unproved(self, round: int, moved: float, patience: float, *, waits: bool) -> list[PeerId]:
        """Return the peers whose proof is to be asked for now: each once in a patience, and ASKED at most.

        These are the peers that say that we are behind, unless this peer `waits` only for results; and the others that are
        ahead if there was no progress in our round for a patience, since the time `moved`.
        """
        now, further = self._now(), self.further(round)
        if now < moved + patience:
            further = set() if waits else self.past(round)
        due = [peer for peer in sorted(further) if now >= self._questioned.get(peer, -patience) + patience][:ASKED]
        self._questioned |= dict.fromkeys(due, now)
        return due

    def on_link_down(self, peer: PeerId) -> None:
        for what in (self._seen, self._claims, self._asked, self._questioned):
            what.pop(peer, None)

    def beyond_reach(self, proved: bool, moved: float, patience: float) -> bool:
        """Return True if peers have `proved` that they are ahead, and none has helped us for a patience.

        moved: time of the last progress in our round.
        """
        if not proved:
            self._since = None
            return False
        if self._since is None:
            self._since = self._now()
        return self._now() >= max(self._since, moved) + patience
