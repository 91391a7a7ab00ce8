"""Rounds that are over: their results while somebody wants them, who missed some or follows from an older state, and verdicts.

A verdict is small and proves itself to those who were members before that round, so it is kept for longer: one peer that
has it keeps others, which were cut off, from deciding that round anew when nobody else is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from thinwire.collectives.rounds.round import Round
from thinwire.swarm.messages.registry import Commit, PeerId

MOST_ROUNDS = 8
"""Rounds that are kept at most. Who needs longer for one round than the swarm for this many would not keep up anyway."""

MOST_VERDICTS = 64
"""Verdicts that are kept at most."""

FOLLOWED_SECONDS = 15.0
"""How long somebody counts as following after the last question about a round that is over."""


class RoundHistory:
    """The last rounds of one peer, as servers of their verdicts and results.

    The last one is kept until all who were ready for it have gone on. Older ones are kept only while somebody reads a state
    that they continue, or follows; `limit` bounds the bytes of their results.
    """

    def __init__(self, limit: int, now: Callable[[], float]) -> None:
        self._limit, self._now = limit, now
        self._rounds: dict[int, Round] = {}
        self._sizes: dict[int, int] = {}
        self._followers: dict[PeerId, float] = {}
        self._verdicts: dict[int, Commit] = {}

    def __len__(self) -> int:
        return len(self._rounds)

    @property
    def nbytes(self) -> int:
        """Bytes of all results that are kept."""
        return sum(self._sizes[number] for number in self._rounds)

    def add(self, done: Round) -> None:
        """A round has been committed and applied."""
        self._rounds[done.round], self._sizes[done.round] = done, done.nbytes
        if done.agreement.commit is not None:
            self._verdicts[done.round] = done.agreement.commit
            self._verdicts.pop(done.round - MOST_VERDICTS, None)

    def get(self, round: int) -> Round | None:
        """The round with this number, if it is kept."""
        return self._rounds.get(round)

    def verdict(self, round: int, peer: PeerId) -> Commit | None:
        """How a round ended that is not too long over, for a peer that had a say in it. To others it proves nothing; a newcomer
        is better off with the word that it is behind: then it does not wait for results that nobody has any more.
        """
        before = self._verdicts.get(round - 1)
        return self._verdicts.get(round) if before is None or peer in before.opened.members else None

    def clear(self) -> None:
        """Our state does not come of these rounds any more."""
        self._rounds.clear()
        self._sizes.clear()
        self._verdicts.clear()

    def follow(self, peer: PeerId) -> None:
        """A peer asks about a round that is over."""
        self._followers[peer] = self._now()

    def done(self, peer: PeerId) -> None:
        """A peer is where we are, or gone."""
        self._followers.pop(peer, None)

    def on_link_down(self, peer: PeerId, *, gone: bool) -> None:
        """The link to `peer` broke: how a round ended that it led, not all may have heard."""
        for one in self._rounds.values():
            one.on_link_down(peer, gone=gone)

    def pump(self) -> None:
        """Let the rounds say what they have to say."""
        for one in self._rounds.values():
            one.pump()

    def prune(self, current: Round, live: Collection[PeerId], *, read: bool) -> None:
        """Forget what nobody wants. `read`: somebody reads a state that one of these rounds continues."""
        if not self._rounds:
            return
        if self._followers:
            since = self._now() - FOLLOWED_SECONDS
            self._followers = {peer: at for peer, at in self._followers.items() if at >= since}
        wanted = read or bool(self._followers)
        last = self._rounds.get(current.round - 1)
        if not wanted:
            self._rounds = {last.round: last} if last is not None and not _superseded(last, current, live) else {}
        for number in sorted(self._rounds)[:-1]:
            if len(self._rounds) > MOST_ROUNDS or self.nbytes > self._limit:
                del self._rounds[number]
        self._sizes = {number: self._sizes[number] for number in self._rounds}


def _superseded(last: Round, current: Round, live: Collection[PeerId]) -> bool:
    """Whether all who took part in the last round, or wanted to and are here, have the state that came of it."""
    commit, agreement = last.agreement.commit, current.agreement
    if commit is None or len(agreement.ready) < len(commit.opened.alive):
        return False
    same = {peer for peer, ready in agreement.ready.items() if ready.base == agreement.terms.base}
    late = set(last.agreement.ready) & set(live)
    return same.issuperset({*commit.opened.alive, *late})
