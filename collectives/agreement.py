"""Agreement on one outer step: who contributes, and whether it commits. Sans-IO: (message, now) -> messages.

Results of a round are a pure function of its contributors and of what they announced (`Ready`), so peers need to agree on
one value only: the list of contributors. That is single-decree Paxos (Lamport 1998) with three departures: the first leader
is known beforehand (rendezvous ranking of the last round's members) and needs no first phase for term 1; an acceptor votes
only when it holds every result, so that a vote is also a promise to serve them; and members known to be gone leave the
quorum (see `quorum`).

    Ready      everyone -> everyone    what I will send, before I send it
    Open       leader -> everyone      these contribute; owners follow from (group, alive)
    Vote       everyone -> leader      I hold all results, their digest is D
    Commit     leader -> everyone      D, with the votes that prove it
    Prepare    candidate -> everyone   the leader is gone or stuck, or a peer must be left out: what did you vote for?
    Promise    everyone -> candidate   this, and nothing older from now on
    Blame      participant -> leader   I cannot get on because of that peer
    Ask        anyone -> anyone        I came late: what have you announced, or how did it end?

An acceptor must not forget, and others must not wait for one that did: a peer that restarted may have voted before, so it
passes `witness=False`, says so in its Ready, and neither votes, promises nor leads in that round; everyone counts it as gone.
Quorums intersect because whoever is counted as gone in a round never votes in it again, and because a candidate that counts
members as gone, who may have voted before, asks all others that are left (see `_vouched`).

When every member is gone the swarm is orphaned: nobody left had a say in the last round. After `ORPHANED` patiences those that
are here and hold its state go on, by a majority of themselves. Here alone a partition of the survivors could go two ways; the
comparison of digests then brings the smaller part back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from thinwire.collectives.complaints import Complaints
from thinwire.collectives.proposal import GONE, Terms, adopt, fit, gone_in, name_of, propose, sound
from thinwire.collectives.quorum import enough
from thinwire.swarm.protocol import (
    Ask,
    Ballot,
    Blame,
    Commit,
    Digest,
    Message,
    Open,
    PeerId,
    Prepare,
    Promise,
    Proof,
    Ready,
    Vote,
)

ORPHANED = 5
"""Patiences that pass before a swarm without members goes on by those that are left."""

LEAP = 10_000
"""Most terms that one ballot may be ahead of the last: numbers must not run out."""

FORSAKEN = 10
"""Patiences for which a silent member is waited for that may know of a verdict by the votes of dead ones."""

BALLOTS = 4
"""Ballots of one round that may follow each other at once: for deaths and complaints of an ordinary bad moment."""

GROWTH = 4.0
"""What the waiting for a stuck leader grows to, when ballot after ballot comes to nothing; it doubles from ballot to ballot."""

REST = 8.0
"""Patiences that a leader waits at most between two of its own ballots; a quarter of one at first, and twice that each time."""


class Agreement:
    """One peer's part in agreeing on one round of one fragment.

    Feed it `announce`, `hear`, `reach`, `lost`, `progress`, `complete`, `accuse` and `tick`; after each call send what `take`
    returns ((peer or None for everyone reachable, message) pairs) and look at `opened`, `commit` and `diverged`.
    `sign(message)` and `verify(peer, message, signature)` are the identity's.
    """

    def __init__(
        self,
        me: PeerId,
        terms: Terms,
        *,
        sign: Callable[[Message], bytes],
        verify: Callable[[PeerId, Message, bytes], bool],
        live: Collection[PeerId],
        gone: Collection[PeerId] = (),
        witness: bool = True,
    ) -> None:
        self.me, self.terms = me, terms
        self.opened: Open | None = None
        self.commit: Commit | None = None
        self.diverged = False
        """The swarm is ahead, or most ready members have another state digest than ours: fetch the state, then come again."""
        self.ready: dict[PeerId, Ready] = {}
        self.witness = witness
        self._sign, self._verify = sign, verify
        self._live = set(live) | {me}
        self._gone = set(gone)
        self._promised = Ballot(0, bytes(32))
        self._voted: tuple[Open, Digest] | None = None
        self._leading: Ballot | None = None
        self._promises: dict[PeerId, Promise] | None = None
        self._votes: dict[PeerId, tuple[Digest, bytes]] = {}
        self._complaints = Complaints()
        self._pending: tuple[Commit, set[PeerId]] | None = None
        self._asked: set[PeerId] = set()
        self._guests: set[PeerId] = set()
        self._voided: set[Digest] = set()
        self._quorum_since: float | None = None
        self._orphaned_since: float | None = None
        self._doubted_since: float | None = None
        self._moved = 0.0
        self._ballots = 0
        self._rested = 0.0
        self._urged = False
        self._out: list[tuple[PeerId | None, Message]] = []

    # --- what happens here

    def announce(self, ready: Ready, now: float) -> None:
        """Our own pseudo-gradient is encoded and may be counted in."""
        self._out.append((None, ready))
        self._hear_ready(self.me, ready, now)
        self.tick(now)

    def progress(self, now: float) -> None:
        """A chunk or a result arrived: patience starts again."""
        self._moved = max(self._moved, now)

    def complete(self, digest: Digest, now: float) -> None:
        """We hold every result of the open ballot; `digest` is blake3 over their hashes."""
        opened = self.opened
        if opened is None or self.commit is not None or not self.witness or opened.ballot < self._promised:
            return
        if self._voted is not None and self._voted[0].ballot == opened.ballot:
            return
        self._moved = now
        self._voted = (opened, digest)
        vote = Vote(self.terms.round, self.terms.fragment, opened.ballot, name_of(opened), digest)
        if opened.ballot.leader == self.me:
            self._hear_vote(self.me, vote, self._sign(vote), now)
        else:
            self._out.append((opened.ballot.leader, vote))

    def accuse(self, peer: PeerId, reason: str, now: float) -> None:
        """We cannot get on because of `peer`."""
        if self.opened is None or self.commit is not None:
            return
        blame = Blame(self.terms.round, self.terms.fragment, self.opened.ballot, peer, reason)
        if self.opened.ballot.leader == self.me:
            self._hear_blame(self.me, blame, now)
            self.tick(now)
        else:
            self._out.append((self.opened.ballot.leader, blame))

    def reach(self, peer: PeerId, now: float) -> None:
        """A link to `peer` is up."""
        if peer not in self._live:
            self._live.add(peer)
            mine = self.ready.get(self.me)
            if mine is not None and self.commit is None:
                self._out.append((peer, mine))

    def lost(self, peer: PeerId, now: float, *, gone: bool) -> None:
        """The link to `peer` broke; `gone` when its machine refuses connections now, or it said goodbye."""
        self._live.discard(peer)
        if gone:
            self._gone.add(peer)
        if self.commit is None and self._leads_open() and self.opened is not None and peer in self.opened.alive:
            self._urged = True
        self.tick(now)

    def overtaken(self) -> None:
        """The swarm has left this round behind: have no more part in it."""
        self.diverged = True

    def void(self, now: float) -> None:
        """Nobody who holds the results of the verdict is left, so nobody here can ever apply it: the round is open again.

        Whoever comes back with them will be the one whose state differs, and takes over ours.
        """
        assert self.commit is not None
        self._voided.add(self.commit.digest)
        self.commit = self.opened = self._voted = self._pending = None
        self._leading, self._promises, self._votes = None, None, {}
        self._moved = now

    def take(self) -> list[tuple[PeerId | None, Message]]:
        """Messages to send; None addresses everyone we can reach."""
        out, self._out = self._out, []
        return out

    # --- what others say

    def hear(self, sender: PeerId, message: Message, signature: bytes, now: float) -> None:
        """A checked message of this round and fragment from an authenticated peer."""
        if not self.terms.members:
            return  # we do not have the swarm's state yet, and no say
        counts = sender in self.terms.members or self._orphaned(now)
        if isinstance(message, Commit):
            self._hear_commit(message)
        elif isinstance(message, Open | Prepare) and not counts:
            return  # only members lead, or a stranger could stop every round
        elif self.commit is not None:
            if isinstance(message, Ready | Prepare | Blame | Ask):
                self._out.append((sender, self.commit))
        elif isinstance(message, Ready):
            self._hear_ready(sender, message, now)
        elif isinstance(message, Open):
            self._hear_open(sender, message, now)
        elif isinstance(message, Prepare):
            self._hear_prepare(sender, message, now)
        elif isinstance(message, Promise):
            self._hear_promise(sender, message, counts)
        elif isinstance(message, Vote):
            self._hear_vote(sender, message, signature, now)
        elif isinstance(message, Blame):
            self._hear_blame(sender, message, now)
        elif isinstance(message, Ask) and self.me in self.ready:
            self._out.append((sender, self.ready[self.me]))
        self.tick(now)

    def _hear_ready(self, sender: PeerId, message: Ready, now: float) -> None:
        known = self.ready.get(sender)
        if known is None or message.attempt > known.attempt:
            self.ready[sender] = message
            if known is not None:
                self._complaints.forgive(sender)
            if not message.witness and sender in self.terms.members:
                self._gone.add(sender)
        left = set(self.terms.members) - self._gone
        bases = Counter(self.ready[peer].base for peer in left & self.ready.keys())
        del bases[self.terms.base]
        self.diverged |= 2 * max(bases.values(), default=0) > len(left)

    def _hear_open(self, sender: PeerId, message: Open, now: float) -> None:
        term = message.ballot.term
        first = term < 1 or term > self._promised.term + LEAP or (term == 1 and sender != self.terms.members[0])
        if (
            sender != message.ballot.leader
            or message.ballot < self._promised
            or first
            or not sound(message, self.terms)
        ):
            return
        if self.opened is not None and message.ballot <= self.opened.ballot:
            return
        self._promised = message.ballot
        self._leading, self._promises, self._urged = None, None, False
        self.opened, self._moved = message, now

    def _hear_prepare(self, sender: PeerId, message: Prepare, now: float) -> None:
        far = message.ballot.term > self._promised.term + LEAP
        if sender != message.ballot.leader or message.ballot <= self._promised or far or not self.witness:
            return
        self._promised, self._moved = message.ballot, now
        self._ballots += 1
        self._leading, self._promises, self._urged = None, None, False
        mine = self.ready.get(self.me)
        if mine is not None:
            self._out.append((sender, mine))
        self._out.append((sender, self._promise(message.ballot)))

    def _hear_promise(self, sender: PeerId, message: Promise, counts: bool) -> None:
        voted = message.voted
        if self._promises is None or message.ballot != self._leading or (voted is None) != (message.digest is None):
            return
        if voted is not None and not (sound(voted, self.terms) and voted.ballot < message.ballot):
            return
        self._asked.discard(sender)
        if counts:
            self._promises[sender] = message
        elif sender in self.ready:
            self._guests.add(sender)

    def _hear_vote(self, sender: PeerId, message: Vote, signature: bytes, now: float) -> None:
        opened = self.opened
        if opened is None or self._leading != message.ballot or opened.ballot != message.ballot:
            return
        if sender not in opened.alive or message.opened != name_of(opened):
            return
        self._votes[sender] = (message.digest, signature)
        self._moved = now
        same = {peer for peer, (digest, _) in self._votes.items() if digest == message.digest}
        if self._suffice(same, opened):
            proofs = tuple(Proof(peer, self._votes[peer][1]) for peer in sorted(same))
            self.commit = Commit(opened, message.digest, proofs)
            self._out.append((None, self.commit))

    def _hear_blame(self, sender: PeerId, message: Blame, now: float) -> None:
        opened = self.opened
        if opened is None or opened.ballot.leader != self.me or message.ballot != opened.ballot:
            return
        news = self._complaints.hear(sender, message, opened, lambda peers: self._suffice(peers, opened))
        self._urged |= news and self._leads_open()

    def _hear_commit(self, message: Commit) -> None:
        """Accept a verdict when its votes are a quorum, as far as we can tell who is gone; else look again later."""
        opened, named = message.opened, [proof.peer for proof in message.votes]
        if self.commit is not None or message.digest in self._voided or not sound(opened, self.terms):
            return
        if named != sorted(set(named)) or not set(named) <= set(opened.alive):
            return
        if self._pending is None or len(named) > len(self._pending[1]):
            vote = Vote(self.terms.round, self.terms.fragment, opened.ballot, name_of(opened), message.digest)
            voters = {proof.peer for proof in message.votes if self._verify(proof.peer, vote, proof.signature)}
            if self._pending is None or len(voters) > len(self._pending[1]):
                self._pending = (message, voters)
        self._believe()

    def _believe(self) -> None:
        """Look at the verdict that waits: who is gone may have become clear."""
        if self._pending is None or self.commit is not None:
            return
        message, voters = self._pending
        believed = {peer for peer in gone_in(message.opened) if peer not in self._live or peer in self._gone}
        if self._enough(voters, believed, message.opened.alive):
            self.commit, self._pending = message, None

    # --- time

    def tick(self, now: float) -> None:
        """Let time pass: open when everyone is ready or grace is over, replace a leader that is gone or stuck."""
        self._believe()
        if self.commit is not None or self.diverged or not (self.witness or self._orphaned(now)):
            return
        if self._promises is not None and self._leading is not None:
            self._try_open(now)
            return
        if self._urged and self._leads_open():
            self._prepare(now)
            return
        due = self._due(now)
        if due is not None and now >= due:
            whole = not self._gone.intersection(self.terms.members)
            if whole and self.terms.members[0] == self.me and self._promised.term == 0:
                self._promised = self._leading = Ballot(1, self.me)
                self._promises = {self.me: self._promise(self._leading)}
                self._try_open(now)
            else:
                self._prepare(now)

    @property
    def reachable(self) -> set[PeerId]:
        """Peers with a live link, and ourselves."""
        return self._live

    def waiting_for(self) -> tuple[PeerId, ...]:
        """Members that we can reach and that are not ready yet (what a round waits for before it opens)."""
        absent = self._gone | set(self.ready)
        return tuple(peer for peer in self.terms.members if peer in self._live and peer not in absent)

    def _due(self, now: float) -> float | None:
        order = [peer for peer in self.terms.members if peer in self._live]
        leader = self._promised.leader
        if leader in self._live and leader != bytes(32):
            order = [leader, *(peer for peer in order if peer != leader)]
        turn = order.index(self.me) if self.me in order else len(order)
        if self.me not in order and not self._orphaned(now):
            return None
        patience = self.terms.patience
        if self.opened is not None or self._promised.term > 1:
            growth = min(GROWTH, 2.0 ** max(0, self._ballots - BALLOTS))
            stuck = self._moved + (2 + turn) * growth * patience
            return stuck if leader in self._live else min(stuck, self._moved + turn * patience)
        ready = {peer for peer in self.ready if peer in self._live}
        orphaned = self._orphaned(now)
        if orphaned:
            order = sorted(ready)
            if self.me not in order:
                return None
            turn = order.index(self.me)
        if not self._enough(ready, self._gone, tuple(self._live) if orphaned else ()):
            self._quorum_since = None
            return None
        if self._quorum_since is None:
            self._quorum_since = now
        wait = self.terms.grace if self.waiting_for() else 0.0
        return self._quorum_since + wait + turn * patience

    def _orphaned(self, now: float) -> bool:
        """Whether every member has been gone for so long that those who are left go on; they all vote then."""
        if not self.terms.members or not self._gone.issuperset(self.terms.members):
            self._orphaned_since = None
            return False
        if self._orphaned_since is None:
            self._orphaned_since = now
        if now < self._orphaned_since + ORPHANED * self.terms.patience:
            return False
        self.witness = True
        return True

    def _enough(self, agreeing: Collection[PeerId], gone: Collection[PeerId], present: Sequence[PeerId]) -> bool:
        """Whether a quorum agrees: of the members, or of those `present` when all members are gone."""
        members = self.terms.members
        if present and set(members) <= set(gone):
            members, gone = tuple(sorted(present)), ()
        return enough(agreeing, members, gone, fraction=self.terms.fraction)

    def _suffice(self, agreeing: Collection[PeerId], opened: Open) -> bool:
        """Whether these can commit a ballot alone."""
        return self._enough(agreeing, gone_in(opened), opened.alive)

    # --- leading

    def _leads_open(self) -> bool:
        return self.opened is not None and self.opened.ballot == self._leading

    def _promise(self, ballot: Ballot) -> Promise:
        voted, digest = self._voted if self._voted is not None else (None, None)
        return Promise(self.terms.round, self.terms.fragment, ballot, voted, digest)

    def _prepare(self, now: float) -> None:
        if not self.witness or now < self._rested:
            return
        self._ballots += 1
        more = self._ballots - BALLOTS
        self._rested = now + (min(REST, 0.125 * 2.0**more) * self.terms.patience if more > 0 else 0.0)
        self._urged = False
        ballot = Ballot(max(self._promised.term, 1) + 1, self.me)
        self._promised = self._leading = ballot
        self._promises = {self.me: self._promise(ballot)}
        self._asked, self._guests = set(self._live) - {self.me}, set()
        self._moved = now
        self._out.append((None, Prepare(self.terms.round, self.terms.fragment, ballot)))
        self._try_open(now)

    def _try_open(self, now: float) -> None:
        ballot, promises = self._leading, self._promises
        assert ballot is not None and promises is not None
        if ballot.term > 1:
            # After a loss even those who are not ready are asked: the swarm may have gone on without us, and they would know.
            awaited = (self._asked & self._live) - self._gone
            late = now >= self._moved + self.terms.patience
            if awaited and not late:
                return
            quorum = self._enough(promises, self._gone, tuple(self._live) if self._orphaned(now) else ())
            if not quorum or not self._vouched(promises, now):
                if late:
                    self._prepare_later(now)
                return
            present = {*promises, *self._guests}
        else:
            present = set(self.ready)
        opened = self._proposal(ballot, present & self._live, promises)
        if opened is None:
            return
        self.opened, self._promises, self._votes, self._moved = opened, None, {}, now
        self._out.append((None, opened))

    def _vouched(self, promises: Collection[PeerId], now: float) -> bool:
        """Whether one of these would know of any verdict there is: the gone may have voted for one that a silent peer has.

        So more than half of all members must have answered, or all that are left; after FORSAKEN patiences any quorum will do.
        """
        left = set(self.terms.members) - self._gone - set(promises)
        if not left or self._enough(promises, (), ()):
            return True
        if self._doubted_since is None:
            self._doubted_since = now
        return now >= self._doubted_since + FORSAKEN * self.terms.patience

    def _may_be_chosen(self, adopted: Open, promises: Mapping[PeerId, Promise]) -> bool:
        """Whether a verdict on a voted value is possible: those who report a vote for it, and those who say nothing, a quorum.

        If it is not, the choice is free: one voter whose results nobody can use must not hold the round for ever.
        """
        voters = {p for p, m in promises.items() if m.voted is not None and m.digest == adopted.adopted}
        silent = set(self.terms.members) - set(promises)
        present = tuple(self._live)
        return self._enough(voters | silent, (), present) or self._enough(voters | silent, self._gone, present)

    def _prepare_later(self, now: float) -> None:
        """No quorum answered: step back, so that another candidate or a later moment gets its turn."""
        self._leading, self._promises = None, None
        self._moved = now

    def _proposal(self, ballot: Ballot, present: set[PeerId], promises: dict[PeerId, Promise]) -> Open | None:
        terms, before, everyone = self.terms, self.opened, tuple(self._live)
        able, unable = fit(terms, present, self.ready)
        if before is not None and not self._enough(set(able) & set(before.group), self._gone, everyone):
            before = None  # only who takes part can vote: of that group there are too few
        excluded = dict.fromkeys(self._gone & set(terms.members), GONE) | unable
        rejected, idle = self._complaints.rejected, self._complaints.idle
        idle |= set(before.idle) if before is not None else set()
        if idle.issuperset(able):
            idle.clear()  # they may be better by now
        adopted = adopt(ballot, terms, able, promises, excluded, idle=idle)
        if adopted is not None and self._may_be_chosen(adopted, promises):
            return adopted
        known = {*able, *excluded, *rejected}
        for peer in before.group if before is not None else terms.members:
            if peer not in known:
                excluded[peer] = "late" if peer in self._live else "silent"
        return propose(ballot, terms, able, self.ready, excluded, rejected=rejected, idle=idle, before=before)
