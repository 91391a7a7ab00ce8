"""What participants tell the leader of a round about each other, and what follows: chunks move first, people last.

A word against another cannot be checked by a third: their link may be cut, or either may lie. So the first word against a
contributor costs both of them only the chunks they own (they stay in the round, and their contributions in the mean); the
chunk in question goes to an owner that can tell, and only a second owner's word, or what the leader has seen itself, puts the
contribution out. A new contribution is judged anew, once: who is out again stays out, or it could go on like that for ever,
and the round with it. Who lacks results is brought up to date by those who have them once the round has committed; only when
it cannot commit without those who complain are the chunks moved to other owners.

In a ring nobody can tell who is at fault: what comes from a neighbour has gone through many hands, and where one stops all
do. So one word ends the ring for the round, and nobody is blamed; with owners it shows who does not do what it should.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from thinwire.collectives.consensus.proposal import FAULTS, WITHHELD
from thinwire.swarm.messages.registry import Ballot, Blame, Open, PeerId

UNSERVED = ("result", "result missing")
"""Reasons of a Blame against an owner of chunks: its result is wrong, or it did not come."""

BROKEN = "ring"
"""Reason of a Blame in a ring: what comes from there is wrong, or does not come."""
SUBTOTAL, UNSUMMED = "subtotal", "subtotal missing"
"""Reasons of a Blame against a relay: the value of its group is wrong, or it did not come."""


class BlameBook:
    """One round's, at one peer, which counts them when it leads. Bounded by the square of the group.

    `idle`: peers that are to own no chunks from the start. `barred`: peers whose contributions are out from the start.
    """

    def __init__(self, idle: Collection[PeerId] = (), barred: Collection[PeerId] = ()) -> None:
        self.rejected: dict[PeerId, str] = dict.fromkeys(barred, WITHHELD)
        """Contributions that are out, each with its reason."""
        self.idle: set[PeerId] = set(idle)
        """Peers that are to own no chunks."""
        self.straight = False
        """Whether a ring has come to nothing."""
        self._words: dict[PeerId, set[PeerId]] = {}
        self._unserved: dict[PeerId, set[PeerId]] = {}
        self._ballot: Ballot | None = None
        self._forgiven: set[PeerId] = set()

    def forgive(self, peer: PeerId) -> None:
        """A peer contributes anew: what was said against it is forgotten, but only once."""
        if self.rejected.get(peer) == WITHHELD:
            return  # another announcement brings no data
        if peer not in self._forgiven and (peer in self.rejected or peer in self._words):
            self._forgiven.add(peer)
            self.rejected.pop(peer, None)
            self._words.pop(peer, None)

    def pardon(self) -> None:
        """So many are out that no round could be: whatever was said of contributions is forgotten."""
        self.rejected.clear()
        self._words.clear()
        self._forgiven.clear()

    def on_message(
        self, accuser: PeerId, blame: Blame, opened: Open, suffice: Callable[[Collection[PeerId]], bool]
    ) -> bool:
        """Take a complaint about a ballot that we lead; True when the next ballot would be another one because of it.

        `suffice` tells whether these peers can commit the round alone.
        """
        if accuser not in opened.alive:
            return False
        if blame.reason == BROKEN:
            news = bool(opened.order) and not self.straight
            self.straight |= news
            return news
        if blame.reason in UNSERVED:
            return self._lacks(accuser, blame.peer, opened, suffice)
        if blame.reason in (SUBTOTAL, UNSUMMED):
            return self._bypass(accuser, blame.peer, opened)
        contributes = any(entry.peer == blame.peer for entry in opened.contributors)
        if blame.reason not in FAULTS or not contributes or blame.peer in self.rejected:
            return False
        if accuser == blame.peer:
            return opened.adopted is None and self._reject(blame)
        owners = set(opened.alive) - set(opened.idle)
        if accuser not in owners:
            return False  # it has nothing to do with anybody's chunks
        words = self._words.setdefault(blame.peer, set())
        words.add(accuser)
        others = owners - self.idle - {accuser}
        if opened.adopted is None and (accuser == opened.ballot.leader or len(words) > 1 or not others):
            return self._reject(blame)
        return self._relieve(accuser, blame.peer, others)

    def _bypass(self, owner: PeerId, relay: PeerId, opened: Open) -> bool:
        """An owner has no value of a group from its relay. The leader knows what it sees; else both give up their chunks."""
        working = set(opened.alive) - set(opened.idle)
        if relay in self.idle or relay == owner or not {owner, relay} <= working:
            return False
        if owner == opened.ballot.leader:
            self.idle.add(relay)
            return True
        return self._relieve(owner, relay, working - self.idle - {owner})

    def _relieve(self, accuser: PeerId, accused: PeerId, others: set[PeerId]) -> bool:
        """Take the chunks from both, unless nobody else of `others` would be left; True when that is news.

        Who has lost its own has said what it had to say: else one that accuses everybody would take all chunks from all.
        """
        if accuser in self.idle:
            return False
        before = set(self.idle)
        self.idle.add(accuser)
        if others - {accused}:
            self.idle.add(accused)
        return self.idle != before

    def _lacks(
        self, accuser: PeerId, owner: PeerId, opened: Open, suffice: Callable[[Collection[PeerId]], bool]
    ) -> bool:
        if opened.ballot != self._ballot:
            self._ballot, self._unserved = opened.ballot, {}
        if owner not in opened.alive or owner in opened.idle or owner == accuser:
            return False
        self._unserved.setdefault(owner, set()).add(accuser)
        if suffice(set(opened.alive).difference(*self._unserved.values())):
            return False
        most = max(len(words) for words in self._unserved.values())
        before = set(self.idle)
        self.idle |= {peer for peer, words in self._unserved.items() if len(words) == most}
        return self.idle != before

    def _reject(self, blame: Blame) -> bool:
        self.rejected[blame.peer] = blame.reason
        return True
