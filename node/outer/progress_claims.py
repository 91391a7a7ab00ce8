"""Whether the swarm has gone on without us, as far as others say: nobody's word alone makes us drop our state."""

from __future__ import annotations

from collections.abc import Callable, Collection

from thinwire.swarm.messages.registry import PeerId

ASKED = 8
"""Peers that are ahead and are asked at once how our round ended, when one begins."""


class ProgressClaims:
    """Who has said what about later rounds.

    Who is ahead is asked how our round ended. It answers with the verdict when it still keeps the results, and we follow round
    by round; else that we are behind. Only when most say so, and none has told us the verdict for a patience, must the
    state be fetched.
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
        """Whether nobody who is here has said anything of later rounds."""
        if self._claims or self._seen:
            return False
        self._since = None
        return True

    def begin(self, round: int) -> list[PeerId]:
        """Our next round begins; the peers to ask how it ended, because they are beyond it."""
        self._claims.clear()
        self._asked.clear()
        self._since = None
        self._seen = {peer: seen for peer, seen in self._seen.items() if seen > round}
        return sorted(self._seen)[:ASKED]

    def seen(self, peer: PeerId, round: int, patience: float) -> bool:
        """A peer has sent something of a later round than ours; True when it is time to ask it about ours."""
        self._seen[peer] = max(round, self._seen.get(peer, 0))
        if self._now() < self._asked.get(peer, -patience) + patience / 4:
            return False
        self._asked[peer] = self._now()
        return True

    def inquire(self, round: int, voices: Collection[PeerId], moved: float, patience: float) -> bool:
        """Whether to ask all voices, because one of them is past `round`, our last, and nothing has come for a patience."""
        if not self.further(round).intersection(voices) or self._now() < max(moved, self._inquired) + patience:
            return False
        self._inquired = self._now()
        return True

    def claimed(self, peer: PeerId, round: int) -> None:
        """A peer says that it has committed `round`, and nothing more of ours."""
        self._claims[peer] = round

    def past(self, round: int) -> set[PeerId]:
        """Who says that it has committed a later round than this."""
        return {peer for peer, claim in self._claims.items() if claim > round}

    def further(self, round: int) -> set[PeerId]:
        """Who has committed a later round than this, as it says or as what it sends of later ones shows."""
        return self.past(round) | {peer for peer, seen in self._seen.items() if seen > round + 1}

    def on_link_down(self, peer: PeerId) -> None:
        """A peer is not here any more."""
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
        """Whether the swarm is past `round`, our last, and nobody has helped us on since.

        It is when most of `voices` say so, or when those who do not say so can commit nothing without those who do: whether
        they can, `able` tells. Else half of a swarm would wait for ever for the half that has gone on, and so would all for
        the one that was left of a quorum.
        """
        past = self.past(round)
        most = 2 * sum(peer in past for peer in voices) > len(voices)
        if not most and (not past or able(past)):
            self._since = None
            return False
        if self._since is None:
            self._since = self._now()
        return self._now() >= max(self._since, moved) + patience
