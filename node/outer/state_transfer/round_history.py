"""Past rounds: their results while a peer needs them, and their commits.

A commit is small and proves itself to the members of that round, so it is stored for longer. A single peer with it can
prevent cut-off peers from deciding the round again when no other peer is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from thinwire.collectives.rounds.round import Round
from thinwire.collectives.state_sync.offer_search import LAST_ROUND
from thinwire.swarm.messages.registry import Commit, PeerId

MOST_ROUNDS = 32
"""Maximum number of stored rounds."""

SPARE = 8
"""Part of the limit, as a divisor, that rounds may take while no peer needs them."""

MOST_COMMITS = 64
"""Maximum number of stored commits."""

HURRY = 0.5
"""Part of the limits of stored rounds beyond which a peer that reads or follows has no pauses."""

GAIN = 2
"""Number of rounds that a peer may follow with pauses for each round that it comes nearer."""

FOLLOWED_SECONDS = 15.0
"""Seconds for which a peer counts as following after its last question about a past round."""


class RoundHistory:
    """Last rounds of one peer, which serve their commits and results, and the peers that follow them.

    The last round is stored until all peers that were ready for it have continued. Peers that return with an older state, or
    read one while rounds continue, apply the results of older rounds instead of fetching a newer state. `limit`: most bytes of
    stored results while a peer follows or reads; at other times a SPARE-th of it.
    """

    def __init__(self, limit: int, now: Callable[[], float]) -> None:
        self._limit, self._now = limit, now
        self._rounds: dict[int, Round] = {}
        self.continued = 0
        """Round up to which all peers have continued, so that nothing is pending."""
        self._sizes: dict[int, int] = {}
        self._followers: dict[PeerId, float] = {}
        self._asked: dict[PeerId, tuple[int, int, int]] = {}
        """Per follower: its distance in rounds at its first question, and the rounds of its first and last."""
        self._hurried: set[PeerId] = set()
        self._commits: dict[int, Commit] = {}

    def __len__(self) -> int:
        return len(self._rounds)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored results."""
        return sum(self._sizes[number] for number in self._rounds)

    def add(self, done: Round) -> None:
        """Add a committed and applied round."""
        announced = sum(len(ready.hashes) for ready in done.agreement.ready.values())
        self._rounds[done.round], self._sizes[done.round] = done, done.nbytes + announced
        commit = done.agreement.commit
        if commit is not None:
            self._commits[done.round] = commit
            self._commits.pop(done.round - MOST_COMMITS, None)

    @property
    def replay(self) -> tuple[int, int]:
        """Number of consecutive rounds up to the last one that are here, and the bytes of their results."""
        count = size = 0
        for number in sorted(self._rounds, reverse=True):
            if number + count != max(self._rounds):
                break
            count, size = count + 1, size + self._sizes[number]
        return count, size

    def used_part(self, round: int) -> float:
        """Return the part of the limits that the rounds after `round` take; 1 if some are not stored."""
        if self._rounds and round + 1 < min(self._rounds):
            return 1.0
        after = [size for number, size in self._sizes.items() if number > round]
        return max(len(after) / MOST_ROUNDS, sum(after) / max(1, self._limit))

    def get(self, round: int) -> Round | None:
        return self._rounds.get(round)

    def commit_of(self, round: int, peer: PeerId) -> Commit | None:
        """Return the commit of a recent round for a peer that was a member of it.

        It proves nothing to other peers: a newcomer needs the answer that it is behind, so that it does not wait for
        results.
        """
        before = self._commits.get(round - 1)
        return self._commits.get(round) if before is None or peer in before.proposal.members else None

    def clear(self) -> None:
        """Drop all rounds: our state does not continue them."""
        self._rounds.clear()
        self._sizes.clear()
        self._commits.clear()
        self.continued = 0

    def follow(self, peer: PeerId, round: int | None = None) -> None:
        """Note that a peer asks about a past round, or (None) that answers to it wait to be sent."""
        self._followers[peer] = self._now()
        if round is not None:
            self._asked[peer] = *self._asked.get(peer, (self._behind(round), round))[:2], round

    def done(self, peer: PeerId) -> None:
        """Note that a peer has caught up or departed."""
        for book in (self._followers, self._asked):
            book.pop(peer, None)
        self._hurried.discard(peer)

    @property
    def followers(self) -> list[PeerId]:
        """Peers that have asked about past rounds lately."""
        return list(self._followers)

    def hurried(self, peer: PeerId) -> bool:
        """Return True if a peer that has asked for results gets them without pauses, until it has caught up.

        Either it follows, with pauses, less than GAIN / (GAIN - 1) times as fast as the swarm decides rounds, or some of
        the rounds that it needs would soon be dropped.
        """
        first, since, round = self._asked.get(peer, (0, LAST_ROUND, LAST_ROUND))
        if self._behind(round) > max(0, first - (round - since) // GAIN) or self.used_part(round) > HURRY:
            self._hurried.add(peer)
        return peer in self._hurried

    def _behind(self, round: int) -> int:
        return max(0, max(self._rounds, default=0) - round)

    def on_link_down(self, peer: PeerId) -> None:
        """Let past rounds handle a lost link: their leader may not have informed all peers."""
        for one in self._pending():
            one.on_link_down(peer)

    def pump(self) -> None:
        """Let the past rounds send what is pending."""
        for one in self._pending():
            one.pump()

    def _pending(self) -> list[Round]:
        return [one for number, one in self._rounds.items() if number > self.continued]

    def prune(self, current: Round, live: Collection[PeerId], *, read: bool) -> None:
        """Drop what no peer needs. `read`: a peer reads a state that one of these rounds continues."""
        if not self._rounds:
            return
        if self._followers:
            since = self._now() - FOLLOWED_SECONDS
            self._followers = {peer: at for peer, at in self._followers.items() if at >= since}
            self._asked = {peer: self._asked[peer] for peer in self._followers if peer in self._asked}
            self._hurried &= self._followers.keys()
        wanted = read or bool(self._followers)
        last, limit = self._rounds.get(current.round - 1), self._limit
        if not wanted:
            over = last is not None and _superseded(last, current, live)
            self.continued, limit = max(self.continued, current.round - (1 if over else 2)), limit // SPARE
        for number in sorted(self._rounds):
            unneeded = number <= self.continued or number < current.round - 1
            if unneeded and (len(self._rounds) > MOST_ROUNDS or self.nbytes > limit):
                del self._rounds[number]
        self._sizes = {number: self._sizes[number] for number in self._rounds}


def _superseded(last: Round, current: Round, live: Collection[PeerId]) -> bool:
    """Return True if all live participants of the last round have its state."""
    commit, agreement = last.agreement.commit, current.agreement
    if commit is None or len(agreement.ready) < len(commit.proposal.alive):
        return False
    same = {peer for peer, ready in agreement.ready.items() if ready.base == agreement.terms.base}
    late = set(last.agreement.ready) & set(live)
    return same.issuperset({*commit.proposal.alive, *late})
