"""One peer's attempts to lead a round: what it asks, what it proposes, and how long it rests in between."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from thinwire.collectives.consensus.acceptor import BALLOTS, LAST_TERM, rest
from thinwire.collectives.consensus.blame import BlameBook
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.proposal import GONE, AcceptedValue, adopt, choices, fit, name_of, propose, sound
from thinwire.swarm.messages.registry import Ballot, Blame, Commit, Digest, Open, PeerId, Promise, Proof, Ready, Vote

FORSAKEN = 10
"""Patiences for which a silent member is waited for that may know of a verdict by the votes of dead ones."""

GROWTH = 4.0
"""What the waiting for a stuck leader grows to, when ballot after ballot comes to nothing; it doubles from ballot to ballot."""


class Proposer:
    """See the module. `ballot` is the one that we lead or prepare, None while another leads."""

    def __init__(
        self,
        electorate: Electorate,
        ready: Mapping[PeerId, Ready],
        idle: Collection[PeerId] = (),
        barred: Collection[PeerId] = (),
    ) -> None:
        self.ballot: Ballot | None = None
        self.urged = False
        """Whether something has happened that calls for a new ballot."""
        self.blame_book = BlameBook(idle, barred)
        self.past: set[PeerId] = set()
        """Who says that this round is over."""
        self._electorate, self._ready, self._terms = electorate, ready, electorate.terms
        self._promises: dict[PeerId, Promise] | None = None
        self._votes: dict[PeerId, tuple[Digest, bytes]] = {}
        self._asked: set[PeerId] = set()
        self._guests: set[PeerId] = set()
        self._ballots = 0
        self._rested = 0.0
        self._since = 0.0
        self._doubted_since: float | None = None
        self._tried: set[Digest] = set()

    @property
    def preparing(self) -> bool:
        """Whether we have asked for promises and not opened yet."""
        return self._promises is not None

    @property
    def growth(self) -> float:
        """How much longer than usual a stuck leader is waited for."""
        return min(GROWTH, 2.0 ** max(0, min(self._ballots - BALLOTS, 16)))

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

    def next(self, promised: Ballot, now: float) -> Ballot | None:
        """The ballot to begin after the one that we have promised; None when it is too early, or numbers have run out."""
        term = max(promised.term, 1) + 1
        return Ballot(term, self._electorate.me) if now >= self._rested and term <= LAST_TERM else None

    def prepare(self, promise: Promise, now: float) -> None:
        """Begin a ballot, with our own promise."""
        self._ballots += 1
        self._rested = now + rest(self._ballots) * self._terms.patience
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

    def excuse(self, peer: PeerId) -> None:
        """Wait no longer for a peer that knows nothing of this round. Not so for a member, which may have forgotten, in a life
        before, what it voted.
        """
        if peer not in self._terms.members:
            self._asked.discard(peer)

    def hear_vote(self, sender: PeerId, message: Vote, signature: bytes, opened: Open) -> tuple[bool, Commit | None]:
        """Count a vote for the open ballot: whether it is a new one, and the verdict when a quorum agrees."""
        if self.ballot != message.ballot or opened.ballot != message.ballot:
            return False, None
        if sender not in opened.alive or message.opened != name_of(opened):
            return False, None
        news = sender not in self._votes
        self._votes[sender] = (message.digest, signature)
        same = {peer for peer, (digest, _) in self._votes.items() if digest == message.digest}
        if not self._electorate.suffice(same, opened):
            return news, None
        return news, Commit(opened, message.digest, tuple(Proof(peer, self._votes[peer][1]) for peer in sorted(same)))

    def hear_blame(self, sender: PeerId, message: Blame, opened: Open) -> None:
        """Take a complaint about a ballot of ours."""
        if opened.ballot.leader == self._electorate.me and message.ballot == opened.ballot:
            news = self.blame_book.on_message(
                sender, message, opened, lambda peers: self._electorate.suffice(peers, opened)
            )
            self.urged |= news and self.leads(opened)

    def hear_again(self, sender: PeerId) -> None:
        """A peer has announced another contribution."""
        left = [
            peer for peer, ready in self._ready.items() if ready.weight > 0 and peer not in self.blame_book.rejected
        ]
        if len(left) < self._terms.min_peers:
            self.blame_book.pardon()
        else:
            self.blame_book.forgive(sender)

    def propose(self, before: Open | None, now: float) -> Open | None:
        """What to open, as soon as those have answered who must. Steps back when no quorum answers in time."""
        ballot, promises, electorate = self.ballot, self._promises, self._electorate
        assert ballot is not None and promises is not None
        present, late = set(self._ready), False
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
        elif late:
            self.yield_to_others()  # others may be here by now
        return opened

    def _vouched(self, promises: Collection[PeerId], now: float) -> bool:
        """Whether one of these would know of any verdict there is: the gone may have voted for one that a silent peer has.

        So more than half of all members must have answered, or all that are left; after FORSAKEN patiences any quorum will do,
        but while a member is here that says that it is past this round: to be stuck until it helps is better than to part.
        """
        left = set(self._terms.members) - self._electorate.gone - set(promises)
        if not left or self._electorate.enough(promises, ()):
            self._doubted_since = None
            return True
        if self._doubted_since is None:
            self._doubted_since = now
        return (
            now >= self._doubted_since + FORSAKEN * self._terms.patience
            and not left & self.past & self._electorate.live
        )

    def _bound(self, found: Sequence[AcceptedValue], promises: Collection[PeerId]) -> AcceptedValue | None:
        """The choice that we must make: of what was voted for the latest on which a verdict is possible.

        That is, those who report a vote for it, and those who say nothing, would be a quorum. Was there a verdict, then all
        later ballots were about the same, and this finds it. If none is possible the choice is free: one voter whose
        results nobody can use must not hold the round for ever.
        """
        silent, present = set(self._terms.members) - set(promises), tuple(self._electorate.live)
        for choice in found:
            possible = silent.union(choice.voters)
            if self._electorate.enough(possible, (), present) or self._electorate.enough(possible, None, present):
                return choice
        return None

    def _untried(self, found: Sequence[AcceptedValue]) -> AcceptedValue | None:
        """When the choice is free, but votes differ about the results of the same contributors: what most have voted for.

        An owner has told them different results, and would again; so they fetch those of some. Each is tried once.
        """
        for choice in sorted(found, key=lambda c: -len(c.voters)):
            same = {other.digest for other in found if other.opened.contributors == choice.opened.contributors}
            if len(same) > 1 and choice.digest not in self._tried:
                self._tried.add(choice.digest)
                return choice
        return None

    def _proposal(
        self, ballot: Ballot, present: set[PeerId], promises: dict[PeerId, Promise], before: Open | None
    ) -> Open | None:
        terms, live, gone = self._terms, self._electorate.live, self._electorate.gone
        able, unable = fit(terms, present, self._ready)
        if before is not None and not self._electorate.enough(set(able) & set(before.group), None, tuple(live)):
            before = None  # only who takes part can vote: of that group there are too few
        excluded = dict.fromkeys(gone & set(terms.members), GONE) | unable
        rejected, idle = self.blame_book.rejected, self.blame_book.idle
        idle |= set(before.idle) if before is not None else set()
        if idle.issuperset(able):
            idle.clear()  # they may be better by now
        fresh = set(able) - set(terms.members)
        if 2 * len(fresh) <= len(able) and not (idle | fresh).issuperset(able):
            idle |= fresh  # whether they do what they should is not known yet
        found = choices(promises)
        choice = self._bound(found, promises) or self._untried(found)
        if choice is not None:
            return adopt(ballot, terms, able, choice, excluded, idle=idle)
        known = {*able, *excluded, *rejected}
        for peer in before.group if before is not None else terms.members:
            if peer not in known:
                excluded[peer] = "late" if peer in live else "silent"
        straight = self.blame_book.straight
        for old in (before, None):
            opened = propose(
                ballot, terms, able, self._ready, excluded, rejected=rejected, idle=idle, before=old, straight=straight
            )
            if opened is not None:
                return opened
        self.blame_book.pardon()  # too few are left who contribute, of that group and of all
        return None
