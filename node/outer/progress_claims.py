"""Claims of other peers to be ahead; no single claim makes this peer drop its state."""

from __future__ import annotations

from collections.abc import Callable, Collection

from thinwire.swarm.messages.registry import PeerId

ASKED = 8
"""Peers ahead of us that are asked how our round ended, when it begins."""


class ProgressClaims:
    """Claims about later rounds, by peer.

    A peer that is ahead is asked how our round ended. It answers with the commit while it has the results, and we
    follow round by round; otherwise it answers that we are behind. The state is fetched only if most peers answer so,
    and none has sent the commit for one patience.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._seen: dict[PeerId, int] = {}
        self._claims: dict[PeerId, int] = {}
        self._asked: dict[PeerId, float] = {}
        self._since: float | None = None
        self._inquired = 0.0

    @property
    def silent(self) -> bool:
        """True if no present peer has claimed a later round."""
        if self._claims or self._seen:
            return False
        self._since = None
        return True

    def begin(self, round: int) -> list[PeerId]:
        """Begin our next round; return the peers to ask how it ended."""
        self._claims.clear()
        self._asked.clear()
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

    def inquire(self, round: int, voices: Collection[PeerId], moved: float, patience: float) -> bool:
        """Return True if all `voices` should be asked: one is past `round`, and a patience is over."""
        if not self.further(round).intersection(voices) or self._now() < max(moved, self._inquired) + patience:
            return False
        self._inquired = self._now()
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

    def on_link_down(self, peer: PeerId) -> None:
        for what in (self._seen, self._claims, self._asked):
            what.pop(peer, None)

    def beyond_reach(
        self,
        round: int,
        voices: Collection[PeerId],
        moved: float,
        patience: float,
        able: Callable[[Collection[PeerId]], bool] = lambda without: True,
    ) -> bool:
        """Return True if the swarm is past `round`, our last, and no peer has helped us for a patience.

        This holds if most of `voices` claim so, or if the others cannot commit a round without them, as reported by
        `able`. Otherwise half of a swarm would wait endlessly for the other half.
        """
        past = self.past(round)
        most = 2 * sum(peer in past for peer in voices) > len(voices)
        if not most and (not past or able(past)):
            self._since = None
            return False
        if self._since is None:
            self._since = self._now()
        return self._now() >= max(self._since, moved) + patience
