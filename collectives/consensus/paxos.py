"""Agreement on one outer step: who contributes, and whether it commits. Sans-IO: (message, now) -> messages.

Results of a round are a pure function of its contributors and of what they announced (`Ready`), so peers need to agree on
two lists only: the contributors, and the members, who have a say in the next round. That is single-decree Paxos (Lamport
1998) with three departures: the first leader is known beforehand (rendezvous ranking of the last round's members) and needs
no first phase for term 1; an acceptor votes only when it holds every result, so that a vote is also a promise to serve them;
and members known to be gone leave the quorum (see `quorum`). Two things keep liars from holding a round: of each peer only so
many ballots are heeded (`acceptor`), and when no verdict is possible on what was voted for, the choice is free (`candidate`).

    Ready      everyone -> everyone    what I will send, before I send it
    Open       leader -> everyone      these contribute; owners follow from (group, alive)
    Vote       everyone -> leader      I hold all results, their digest is D
    Commit     leader -> everyone      D, with the votes that prove it
    Prepare    candidate -> everyone   the leader is gone or stuck, or a peer must be left out: what did you vote for?
    Promise    everyone -> candidate   this, and nothing older from now on
    Decline    newcomer -> candidate   I have no state yet, so I know of no verdict
    Blame      participant -> leader   I cannot get on because of that peer
    Ask        anyone -> anyone        I came late: what have you announced, or how did it end?

Its parts: what this peer promised (`acceptor`), its own ballots (`proposer`), who has a say (`electorate`), what participants
say of each other (`blame`), and verdicts that others bring (`certificates`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection

from thinwire.collectives.consensus.acceptor import BALLOTS, Acceptor
from thinwire.collectives.consensus.certificates import CertificateCollector
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.proposal import WITHHELD, RoundTerms, lives_agree, name_of
from thinwire.collectives.consensus.proposer import Proposer
from thinwire.swarm.messages.registry import (
    Ask,
    Ballot,
    Blame,
    Commit,
    Decline,
    Digest,
    Message,
    Open,
    PeerId,
    Prepare,
    Promise,
    Ready,
    Vote,
)


class Agreement:
    """One peer's part in agreeing on one round of one fragment.

    Feed it `announce`, `on_message`, `reach`, `on_link_down`, `progress`, `complete`, `accuse` and `tick`; after each call
    send what `take` returns ((peer or None for everyone reachable, message) pairs) and look at `opened`, `commit` and
    `diverged`. `sign(message)` and `verify(peer, message, signature)` are the identity's. `idle`: who is to own no chunks
    from the start. `barred`: peers that are not to contribute because they withheld their data in earlier rounds.
    `life`: ours, see `Open.lives`.
    """

    def __init__(
        self,
        me: PeerId,
        terms: RoundTerms,
        *,
        sign: Callable[[Message], bytes],
        verify: Callable[[PeerId, Message, bytes], bool],
        live: Collection[PeerId],
        gone: Collection[PeerId] = (),
        witness: bool = True,
        idle: Collection[PeerId] = (),
        barred: Collection[PeerId] = (),
        life: bytes = b"",
    ) -> None:
        self.me, self.terms, self.life = me, terms, life
        self.opened: Open | None = None
        self.commit: Commit | None = None
        self.diverged = False
        """The swarm is ahead, or most ready members have another state digest than ours: fetch the state, then come again."""
        self.ready: dict[PeerId, Ready] = {}
        self.witness = self.remembers = witness and not terms.other_life(me, life)
        """Whether we vote; and whether we know what we did in this round before, which is what others are told."""
        self._sign = sign
        self._electorate = Electorate(me, terms, live, gone)
        self._proposer = Proposer(self._electorate, self.ready, idle, barred)
        self._barred = frozenset(barred)
        self._certificates = CertificateCollector(verify)
        self._acceptor = Acceptor(terms)
        self._quorum_since: float | None = None
        self._differ = False
        self._moved = 0.0
        self._out: list[tuple[PeerId | None, Message]] = []
        self._accused: dict[tuple[PeerId, str], float] = {}
        self._accused_in: Ballot | None = None

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
        if opened is None or self.commit is not None or not self.witness or not self._acceptor.vote(opened, digest):
            return
        self._patient(opened.ballot.leader, now)
        vote = Vote(self.terms.round, self.terms.fragment, opened.ballot, name_of(opened), digest)
        if opened.ballot.leader == self.me:
            self._hear_vote(self.me, vote, self._sign(vote), now)
        else:
            self._out.append((opened.ballot.leader, vote))

    def accuse(self, peer: PeerId, reason: str, now: float) -> None:
        """We cannot get on because of `peer`. What comes time and again is said now and then: whoever sends rubbish shall not
        have us sign, and the leader verify, as many complaints.
        """
        if self.opened is None or self.commit is not None:
            return
        if self._accused_in != self.opened.ballot:
            self._accused_in, self._accused = self.opened.ballot, {}
        if now < self._accused.get((peer, reason), -math.inf) + self.terms.patience / 4:
            return
        self._accused[peer, reason] = now
        blame = Blame(self.terms.round, self.terms.fragment, self.opened.ballot, peer, reason)
        if self.opened.ballot.leader == self.me:
            self._proposer.hear_blame(self.me, blame, self.opened)
            self.tick(now)
        else:
            self._out.append((self.opened.ballot.leader, blame))

    def reach(self, peer: PeerId, now: float) -> None:
        """A link to `peer` is up."""
        if peer not in self._electorate.live:
            self._electorate.live.add(peer)
            mine = self.ready.get(self.me)
            if mine is not None and self.commit is None:
                self._out.append((peer, mine))

    def on_link_down(self, peer: PeerId, now: float, *, gone: bool) -> None:
        """The link to `peer` broke; `gone` when its machine refuses connections now, or it said goodbye."""
        self._electorate.live.discard(peer)
        if gone:
            self._electorate.gone.add(peer)
        if self.commit is None and self.opened is not None and peer in self.opened.alive:
            self._proposer.urged |= self._proposer.leads(self.opened)
        if self.commit is not None and peer == self.commit.opened.ballot.leader:
            if self._electorate.order(peer)[:1] == [self.me]:
                # It may not have told all, and those it has not told wait for us to begin anew.
                self._out.append((None, self.commit))
        self.tick(now)

    def passed(self, peer: PeerId) -> None:
        """A peer says that it has gone on to a later round."""
        self._proposer.past.add(peer)

    @property
    def past(self) -> set[PeerId]:
        """Who says that it has gone on to a later round."""
        return self._proposer.past

    def overtaken(self) -> None:
        """The swarm has left this round behind: have no more part in it."""
        self.diverged = True

    def void(self, now: float) -> None:
        """Nobody who holds the results of the verdict is left, so nobody here can ever apply it: the round is open again.

        Whoever comes back with them will be the one whose state differs, and takes over ours.
        """
        assert self.commit is not None
        self._certificates.void(self.commit.digest)
        self._proposer.void()
        self._acceptor.void()
        self.commit = self.opened = None
        self._moved = now

    def take(self) -> list[tuple[PeerId | None, Message]]:
        """Messages to send; None addresses everyone we can reach."""
        out, self._out = self._out, []
        return out

    # --- what others say

    def on_message(self, sender: PeerId, message: Message, signature: bytes, now: float) -> None:
        """A checked message of this round and fragment from an authenticated peer."""
        if not self.terms.members:
            return  # we do not have the swarm's state yet, and no say
        counts = sender in self.terms.members or self._orphaned(now)
        if isinstance(message, Commit):
            if self.commit is None:
                self._certificates.on_message(message, self._electorate)
        elif not counts and isinstance(message, (Open, Prepare)):
            return  # only members lead, or a stranger could stop every round
        elif self.commit is not None:
            if isinstance(message, (Ready, Prepare, Blame, Ask)):
                self._out.append((sender, self.commit))
        elif isinstance(message, Ready):
            self._hear_ready(sender, message, now)
            if self._early():
                return  # one of many, most often; and time passes soon anyway
        elif isinstance(message, Open):
            self._hear_open(sender, message, now)
        elif isinstance(message, Prepare):
            self._hear_prepare(sender, message, now)
        elif isinstance(message, Promise):
            self._proposer.hear_promise(sender, message, counts=counts)
        elif isinstance(message, Decline):
            self._proposer.excuse(sender)
        elif isinstance(message, Vote):
            self._hear_vote(sender, message, signature, now)
        elif isinstance(message, Blame) and self.opened is not None:
            self._proposer.hear_blame(sender, message, self.opened)
        elif isinstance(message, Ask) and self.me in self.ready:
            self._out.append((sender, self.ready[self.me]))
        self.tick(now)

    def _hear_ready(self, sender: PeerId, message: Ready, now: float) -> None:
        known = self.ready.get(sender)
        if known is None or message.attempt > known.attempt:
            self.ready[sender] = message
            if known is not None:
                self._proposer.hear_again(sender)
            votes = message.witness and not self.terms.other_life(sender, message.life)
            if not votes and sender in self.terms.members:
                self._electorate.gone.add(sender)
            self._differ |= message.base != self.terms.base
        if not self._differ:
            return
        left = set(self.terms.members) - self._electorate.gone
        bases = Counter(self.ready[peer].base for peer in left & self.ready.keys())
        del bases[self.terms.base]
        self.diverged |= 2 * max(bases.values(), default=0) > len(left)

    def _early(self) -> bool:
        """Whether it is plain that more announcements are needed, or at least waited for, before a round opens."""
        if self.opened is not None or self._proposer.preparing or self._proposer.urged:
            return False
        ready, members = len(self.ready), len(self.terms.members)
        too_few = ready < self.terms.fraction * (members - len(self._electorate.gone))
        return too_few or (self._quorum_since is not None and ready < members)

    def _hear_open(self, sender: PeerId, message: Open, now: float) -> None:
        if self.opened is not None and message.ballot <= self.opened.ballot:
            return
        if not lives_agree(message, self.me, self.life, self.ready) or not self._acceptor.follows(sender, message, now):
            return
        self._acceptor.promised = message.ballot
        self._proposer.yield_to_others()
        self.opened = message
        self._patient(sender, now)
        self._object(message, now)

    def _object(self, opened: Open, now: float) -> None:
        """Complain at once about contributors of a ballot that we would put out, if enough others are left."""
        contributors = {entry.peer for entry in opened.contributors}
        enough = len(contributors - self._barred) >= self.terms.min_peers
        if enough and opened.adopted is None and opened.ballot.term <= BALLOTS:
            for peer in sorted(contributors & self._barred):
                self.accuse(peer, WITHHELD, now)

    def _hear_prepare(self, sender: PeerId, message: Prepare, now: float) -> None:
        if not self.witness or not self._acceptor.heeds(sender, message, now):
            return
        promise = self._acceptor.promise(message.ballot)
        self._patient(sender, now)
        self._proposer.seen()
        mine = self.ready.get(self.me)
        if mine is not None:
            self._out.append((sender, mine))
        self._out.append((sender, promise))

    def _patient(self, leader: PeerId, now: float) -> None:
        """Patience with a leader starts again, unless it has begun so many ballots that only data counts."""
        if self._acceptor.trusts(leader):
            self._moved = now

    def _hear_vote(self, sender: PeerId, message: Vote, signature: bytes, now: float) -> None:
        if self.opened is None:
            return
        news, self.commit = self._proposer.hear_vote(sender, message, signature, self.opened)
        if news:
            self._moved = now
        if self.commit is not None:
            self._out.append((None, self.commit))

    # --- time

    def tick(self, now: float) -> None:
        """Let time pass: open when everyone is ready or grace is over, replace a leader that is gone or stuck."""
        if self.commit is None and (verdict := self._certificates.believed(self._electorate)) is not None:
            self.commit = verdict
            if self._proposer.ballot is not None:
                self._out.append((None, verdict))  # those we have asked wait for us now
        if self.commit is not None or self.diverged or not (self.witness or self._orphaned(now)):
            return
        if self._proposer.preparing:
            self._try_open(now)
        elif self._proposer.urged and self._proposer.leads(self.opened):
            self._prepare(now)
        elif (due := self._due(now)) is not None and now >= due:
            whole = not self._electorate.gone.intersection(self.terms.members)
            if whole and self.terms.members[0] == self.me and self._acceptor.promised.term == 0:
                self._proposer.first(self._acceptor.promise(Ballot(1, self.me)))
                self._try_open(now)
            else:
                self._prepare(now)

    @property
    def reachable(self) -> set[PeerId]:
        """Peers with a live link, and ourselves."""
        return self._electorate.live

    @property
    def voted(self) -> Open | None:
        """The ballot that we voted for last: its results are to be had from us."""
        return self._acceptor.voted

    @property
    def bound(self) -> bool:
        """Whether we have promised or voted anything in it."""
        return self._acceptor.promised.term > 0 or self._acceptor.voted is not None

    @property
    def acceptor(self) -> Acceptor:
        """Promises and votes of this peer; to be read, not changed."""
        return self._acceptor

    def able_without(self, peers: Collection[PeerId]) -> bool:
        """Whether the other members, wherever they are, could commit this round."""
        return self._electorate.enough(set(self.terms.members).difference(peers))

    def waiting_for(self) -> tuple[PeerId, ...]:
        """Members that we can reach and that the round waits for before it opens."""
        return self._electorate.waiting_for(self._given())

    def _given(self) -> Collection[PeerId]:
        """Who has announced what the round waits for."""
        return [peer for peer, ready in self.ready.items() if ready.weight] if self.terms.buffered else self.ready

    def _due(self, now: float) -> float | None:
        """When it is our turn to begin a ballot, None when it is not."""
        electorate, leader, patience = self._electorate, self._acceptor.leader, self.terms.patience
        order, orphaned = electorate.order(leader), self._orphaned(now)
        if self.me not in order and not orphaned:
            return None
        turn = order.index(self.me) if self.me in order else len(order)
        if self.opened is not None or self._acceptor.promised.term > 1:
            stuck = self._moved + (2 + turn) * self._proposer.growth * patience
            waits = leader in electorate.live and self._acceptor.trusts(leader)
            return stuck if waits else min(stuck, self._moved + turn * patience)
        ready = electorate.live & self.ready.keys()
        if orphaned:
            if self.me not in ready:
                return None
            turn = sorted(ready).index(self.me)
        few = self.terms.buffered and len(ready.intersection(self._given())) < max(1, self.terms.min_peers)
        if few or not electorate.here(ready, now):
            self._quorum_since = None
            return None
        if self._quorum_since is None:
            self._quorum_since = now
        graces = [self.terms.graces.get(peer, self.terms.grace) for peer in self.waiting_for()]
        grace = max(graces, default=0.0) if turn == 0 or not graces else max(*graces, self.terms.limit)
        if self.terms.buffered and self._electorate.waiting_for(self.ready):
            grace = max(grace, patience)  # they have but to say that they are here, to stay members
        return self._quorum_since + grace + turn * patience

    def _orphaned(self, now: float) -> bool:
        """See Electorate.orphaned; then everybody votes."""
        orphaned = self._electorate.orphaned(now)
        self.witness |= orphaned
        return orphaned

    # --- leading

    def _prepare(self, now: float) -> None:
        ballot = self._proposer.next(self._acceptor.promised, now) if self.witness else None
        if ballot is None:
            return
        self._moved = now
        self._proposer.prepare(self._acceptor.promise(ballot), now)
        self._out.append((None, Prepare(self.terms.round, self.terms.fragment, ballot)))
        self._try_open(now)

    def _try_open(self, now: float) -> None:
        opened = self._proposer.propose(self.opened, now)
        if opened is not None:
            self.opened = opened
            self._out.append((None, opened))
        if not self._proposer.preparing:
            self._moved = now
