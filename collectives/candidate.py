"""One peer's attempts to lead a round: what it asks, what it proposes, and how long it rests in between."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from thinwire.collectives.complaints import Complaints
from thinwire.collectives.electorate import Electorate
from thinwire.collectives.proposal import GONE, adopt, fit, name_of, propose, sound
from thinwire.swarm.protocol import Ballot, Blame, Commit, Digest, Open, PeerId, Promise, Proof, Ready, Vote

FORSAKEN = 10
"""Patiences for which a silent member is waited for that may know of a verdict by the votes of dead ones."""

BALLOTS = 4
"""Ballots of one round that may follow each other at once: for deaths and complaints of an ordinary bad moment."""

GROWTH = 4.0
"""What the waiting for a stuck leader grows to, when ballot after ballot comes to nothing; it doubles from ballot to ballot."""

REST = 8.0
"""Patiences that a leader waits at most between two of its own ballots; a quarter of one at first, and twice that each time."""


class Candidate:
    """See the module. `ballot` is the one that we lead or prepare, None while another leads."""

    def __init__(self, electorate: Electorate, ready: Mapping[PeerId, Ready]) -> None:
        self.ballot: Ballot | None = None
        self.urged = False
        """Whether something has happened that calls for a new ballot."""
        self.complaints = Complaints()
        self._electorate, self._ready, self._terms = electorate, ready, electorate.terms
        self._promises: dict[PeerId, Promise] | None = None
        self._votes: dict[PeerId, tuple[Digest, bytes]] = {}
        self._asked: set[PeerId] = set()
        self._guests: set[PeerId] = set()
        self._ballots = 0
        self._rested = 0.0
        self._since = 0.0
        self._doubted_since: float | None = None

    @property
    def preparing(self) -> bool:
        """Whether we have asked for promises and not opened yet."""
        return self._promises is not None

    @property
    def growth(self) -> float:
        """How much longer than usual a stuck leader is waited for."""
        return min(GROWTH, 2.0**self._many)

    @property
    def _many(self) -> int:
        """Ballots of this round beyond the ordinary, no more than count: a round may see thousands, and powers grow."""
        return max(0, min(self._ballots - BALLOTS, 16))

    def leads(self, opened: Open | None) -> bool:
        """Whether the open ballot is ours, and we have not begun another."""
        return opened is not None and opened.ballot == self.ballot

    def seen(self) -> None:
        """Another peer has begun a ballot."""
        self._ballots += 1
        self.yield_to_others()

    def yield_to_others(self) -> None:
        """Step back: another leads, or nobody has answered."""
        self.ballot, self._promises, self.urged = None, None, False

    def void(self) -> None:
        """What was committed cannot be had: begin anew."""
        self.yield_to_others()
        self._votes = {}

    def first(self, promise: Promise) -> None:
        """Lead the first ballot, which needs no promises but our own."""
        self.ballot, self._promises = promise.ballot, {self._electorate.me: promise}

    def rests(self, now: float) -> bool:
        """Whether it is too early for another ballot of ours."""
        return now < self._rested

    def prepare(self, promise: Promise, now: float) -> None:
        """Begin a ballot, with our own promise."""
        self._ballots += 1
        rest = min(REST, 0.125 * 2.0**self._many) if self._many else 0.0
        self._rested = now + rest * self._terms.patience
        self.first(promise)
        self.urged, self._since = False, now
        self._asked, self._guests = self._electorate.live - {self._electorate.me}, set()

    def hear_promise(self, sender: PeerId, message: Promise, *, counts: bool) -> None:
        """Take an answer to our Prepare; `counts` when the sender has a say."""
        voted = message.voted
        if self._promises is None or message.ballot != self.ballot or (voted is None) != (message.digest is None):
            return
        if voted is not None and not (sound(voted, self._terms) and voted.ballot < message.ballot):
            return
        self._asked.discard(sender)
        if counts:
            self._promises[sender] = message
        elif sender in self._ready:
            self._guests.add(sender)

    def hear_vote(self, sender: PeerId, message: Vote, signature: bytes, opened: Open) -> tuple[bool, Commit | None]:
        """Count a vote for the open ballot: whether it counts, and the verdict when a quorum agrees."""
        if self.ballot != message.ballot or opened.ballot != message.ballot:
            return False, None
        if sender not in opened.alive or message.opened != name_of(opened):
            return False, None
        self._votes[sender] = (message.digest, signature)
        same = {peer for peer, (digest, _) in self._votes.items() if digest == message.digest}
        if not self._electorate.suffice(same, opened):
            return True, None
        return True, Commit(opened, message.digest, tuple(Proof(peer, self._votes[peer][1]) for peer in sorted(same)))

    def hear_blame(self, sender: PeerId, message: Blame, opened: Open) -> None:
        """Take a complaint about a ballot of ours."""
        if opened.ballot.leader == self._electorate.me and message.ballot == opened.ballot:
            news = self.complaints.hear(sender, message, opened, lambda peers: self._electorate.suffice(peers, opened))
            self.urged |= news and self.leads(opened)

    def propose(self, before: Open | None, now: float) -> Open | None:
        """What to open, as soon as those have answered who must. Steps back when no quorum answers in time."""
        ballot, promises, electorate = self.ballot, self._promises, self._electorate
        assert ballot is not None and promises is not None
        present = set(self._ready)
        if ballot.term > 1:
            # After a loss even those who are not ready are asked: the swarm may have gone on without us, and they would know.
            awaited = (self._asked & electorate.live) - electorate.gone
            late = now >= self._since + self._terms.patience
            if awaited and not late:
                return None
            if not electorate.here(promises, now) or not self._vouched(promises, now):
                if late:
                    self.yield_to_others()
                return None
            present = {*promises, *self._guests}
        opened = self._proposal(ballot, present & electorate.live, promises, before)
        if opened is not None:
            self._promises, self._votes = None, {}
        return opened

    def _vouched(self, promises: Collection[PeerId], now: float) -> bool:
        """Whether one of these would know of any verdict there is: the gone may have voted for one that a silent peer has.

        So more than half of all members must have answered, or all that are left; after FORSAKEN patiences any quorum will do.
        """
        left = set(self._terms.members) - self._electorate.gone - set(promises)
        if not left or self._electorate.enough(promises, ()):
            return True
        if self._doubted_since is None:
            self._doubted_since = now
        return now >= self._doubted_since + FORSAKEN * self._terms.patience

    def _may_be_chosen(self, adopted: Open, promises: Mapping[PeerId, Promise]) -> bool:
        """Whether a verdict on a voted value is possible: those who report a vote for it, and those who say nothing, a quorum.

        If it is not, the choice is free: one voter whose results nobody can use must not hold the round for ever.
        """
        voters = {p for p, m in promises.items() if m.voted is not None and m.digest == adopted.adopted}
        possible, present = voters | (set(self._terms.members) - set(promises)), tuple(self._electorate.live)
        return self._electorate.enough(possible, (), present) or self._electorate.enough(possible, None, present)

    def _proposal(
        self, ballot: Ballot, present: set[PeerId], promises: dict[PeerId, Promise], before: Open | None
    ) -> Open | None:
        terms, live, gone = self._terms, self._electorate.live, self._electorate.gone
        able, unable = fit(terms, present, self._ready)
        if before is not None and not self._electorate.enough(set(able) & set(before.group), None, tuple(live)):
            before = None  # only who takes part can vote: of that group there are too few
        excluded = dict.fromkeys(gone & set(terms.members), GONE) | unable
        rejected, idle = self.complaints.rejected, self.complaints.idle
        idle |= set(before.idle) if before is not None else set()
        if idle.issuperset(able):
            idle.clear()  # they may be better by now
        adopted = adopt(ballot, terms, able, promises, excluded, idle=idle)
        if adopted is not None and self._may_be_chosen(adopted, promises):
            return adopted
        known = {*able, *excluded, *rejected}
        for peer in before.group if before is not None else terms.members:
            if peer not in known:
                excluded[peer] = "late" if peer in live else "silent"
        return propose(ballot, terms, able, self._ready, excluded, rejected=rejected, idle=idle, before=before)
