"""Agreement on the contributors of one outer step and on its commit.

Sans-IO: (message, now) -> messages.

Results of a round are a pure function of its contributors and their announcements (`Ready`), so peers need to agree on two
lists only: the contributors, and the members, which have a vote in the next round. That is single-decree Paxos (Lamport,
Paxos Made Simple, 2001) with these departures: the first leader is known beforehand (rendezvous ranking of the members) and
needs no first phase for term 1; an acceptor votes only when it holds every result, so that a vote is also a promise to
serve them; and members that leave are taken out of the quorum by their farewells (see `quorum`). Two rules make it harder
for liars to stop a round: of each peer only so many ballots are followed (`acceptor`), members have precedence in rotation
(`turn`), and if no commit is possible on a reported vote, it does not bind (`justification.bound`). Limits: "Liars that stop
a round" in docs/design/agreement.md.

    Ready      all -> all              announcement of a contribution, before its data
    Propose    leader -> all           these contribute; owners follow from (group, alive). In a later ballot with the
                                       promises from which its value follows
    Vote       all -> leader           all results are here, their digest is D
    Commit     leader -> all           D, with the votes that prove it; peers that have the proposal get a CompactCommit
    Prepare    candidate -> all        the leader is gone or stands still, or a peer must be left out: report your last vote
    ViewChange member -> all           the round does not end: let the next member have precedence
               member -> candidate     a higher ballot of another leader is promised here
    Promise    all -> candidate        the last vote; no lower ballot gets another one
    Decline    peer -> candidate       no state of this fragment, so no commit is known here
    Blame      participant -> leader   that peer stops our progress
    Ask        any -> any              a peer that is late, or begins the round again, asks for announcements, or for the
                                       end of the round
    Leave      member -> all           the last vote, and no further one in this round
    ShownReady any -> any              an announcement that an adopted proposal names

Parts: promises and votes of this peer (`acceptor`), its own ballots (`proposer`), the commit (`decision`, `certificates`),
the members and the reachable ones of them (`electorate`), members that have left (`farewells`), contributions that were
announced (`announcements`), complaints of participants (`blame`), checks of the proposals of leaders (`proposal_check`),
and the time of a ballot (`turn`).
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from thinwire.collectives.consensus.acceptor import Acceptor
from thinwire.collectives.consensus.announcements import Announcements
from thinwire.collectives.consensus.blame import Complaints
from thinwire.collectives.consensus.decision import Decision
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.justification import sealed
from thinwire.collectives.consensus.members.peer_standing import PeerStanding
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.members.vote_store import MemoryVoteStore, VoteStore
from thinwire.collectives.consensus.proposal import vote_for
from thinwire.collectives.consensus.proposal_check import ProposalCheck
from thinwire.collectives.consensus.proposer import Proposer
from thinwire.collectives.consensus.turn import Turn
from thinwire.swarm.evidence import Equivocation
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.messages.registry import (
    LIFE,
    Ask,
    Ballot,
    Blame,
    Commit,
    CompactCommit,
    Decline,
    Digest,
    Leave,
    Message,
    PeerId,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Ready,
    ShownReady,
    ViewChange,
    Vote,
)


class Agreement:
    """One peer's part in agreeing on one round of one fragment.

    Call `announce`, `on_message`, `reach`, `on_link_down`, `progress`, `complete`, `accuse` and `tick`; after each call
    send what `take` returns ((peer or None for everyone reachable, message) pairs) and look at `proposal`, `commit` and
    `diverged`. `voter`: False if this peer must not vote. `idle`: peers without chunks from the start. `barred`: peers that
    must not contribute because they withheld their data in earlier rounds; `hasty`: peers whose ballots must not stop a
    leader that makes progress. `store`: our stored votes and life; None: in memory. `standing`: of the other
    peers; None: all have equal rights. Callers read the parts `electorate`, `acceptor`, `decision` and `announcements`, and
    may add to the electorate's `nonvoters`.
    """

    def __init__(
        self,
        keyring: Keyring,
        terms: RoundTerms,
        *,
        live: Collection[PeerId],
        voter: bool = True,
        idle: Collection[PeerId] = (),
        barred: Collection[PeerId] = (),
        hasty: Collection[PeerId] = (),
        store: VoteStore | None = None,
        standing: PeerStanding | None = None,
    ) -> None:
        store = MemoryVoteStore() if store is None else store
        self.me, self.terms = keyring.me, terms
        self.proposal: Proposal | None = None
        self.diverged = False
        """True if the swarm is ahead, or most members have another state than ours, which must be fetched."""
        self.past: set[PeerId] = set()
        """Peers that report to be in a later round."""
        self.sign, self.verify = keyring.sign, keyring.verify
        self.electorate = Electorate(self.me, terms, live, keyring.verify, standing)
        equivocation = Equivocation(self.electorate.standing.report_equivocation)
        self.announcements = Announcements(keyring, self.electorate, equivocation)
        self.ready = self.announcements.newest
        self._check = ProposalCheck(self.electorate, self.announcements, equivocation, keyring.verify)
        self.decision = Decision(keyring, self.electorate, self._check.note_commit)
        self._proposer = Proposer(self.electorate, self.ready, idle, barred, self.announcements.member_proof)
        abstains = not voter or terms.other_life(self.me, store.life)
        self.acceptor = Acceptor(terms, store, self.electorate.views, abstains=abstains)
        self._turn = Turn(self.electorate, self.acceptor, self._proposer, self.ready, hasty)
        self._complaints = Complaints(terms, self.announcements, barred)
        self._shown: set[tuple[PeerId, Ballot]] = set()
        self._valid: Proposal | None = None
        """Valid proposal of another leader that this peer does not follow yet."""
        self._out: list[tuple[PeerId | None, Message]] = []
        if self.acceptor.abstains:
            self.electorate.nonvoters.add(self.me)
            self._send_farewell()  # We left this round in an earlier process, and others may not know it.

    @property
    def commit(self) -> Commit | None:
        """The commit of the round; None until this peer knows it."""
        return self.decision.commit

    @property
    def voter(self) -> bool:
        """True if this peer votes in the round, should it be a member."""
        return not self.acceptor.abstains

    @property
    def blocked(self) -> bool:
        """True if the round is stopped, and no other member has answered.

        Two values can have been chosen, or one with newcomers that are not accepted here.
        """
        return self._proposer.blocked and self.commit is None

    @property
    def overdue(self) -> bool:
        """True if the round lasts so long that this peer has asked for another leader."""
        return self.commit is None and self.electorate.views.asked > 0

    @property
    def unanswered(self) -> tuple[PeerId, ...]:
        """Reachable members without a promise or a vote in our last ballot of this round."""
        return self._proposer.unanswered

    def waiting_for(self) -> tuple[PeerId, ...]:
        """Return the reachable members and applicants that the round waits for before it opens."""
        return self._turn.waiting_for()

    # --- events of this peer

    def use_number(self, number: int) -> bytes:
        """Return the life that an announcement with this number must name: no later process repeats both."""
        return self.acceptor.use_number(number)

    def announce(self, ready: Ready, now: float) -> None:
        """Announce our own encoded pseudo-gradient."""
        self._out.append((None, ready))
        self._on_ready(self.me, ready, b"", now)
        self.tick(now)

    def progress(self, now: float) -> None:
        """Restart the patience: a chunk or a result has arrived."""
        self._turn.progress(now)

    def complete(self, digest: Digest, now: float) -> None:
        """Vote for the open ballot, all of whose results are here; `digest` is blake3 over their hashes."""
        proposal = self.proposal
        if proposal is None or self.commit is not None or self.me not in self.terms.members:
            return  # Votes of others do not count, and a newcomer that loses its votes unnoticed could contradict them.
        if self.announcements.contradicted(proposal):
            return  # The leader and the contributor may lie together. The others need our vote to commit.
        if not self.acceptor.vote(proposal, digest):
            return
        self._turn.follow(proposal.ballot.leader, now)
        vote = vote_for(proposal, digest)
        if proposal.ballot.leader == self.me:
            self._on_vote(self.me, vote, self.sign(vote), now)
        else:
            self._out.append((proposal.ballot.leader, vote))

    def accuse(self, peer: PeerId, reason: str, now: float) -> None:
        """Complain about `peer`, which stops our progress."""
        if self.proposal is None or self.commit is not None:
            return
        if (blame := self._complaints.make(self.proposal, peer, reason, now)) is None:
            return
        if self.proposal.ballot.leader == self.me:
            self._proposer.on_blame(self.me, blame, self.proposal, now, voters=self.decision.voters)
            self.tick(now)
        else:
            # An announcement is evidence for each peer with another one, also if the leader ignores it.
            self._out.append((self.proposal.ballot.leader if blame.said is None else None, blame))

    def reach(self, peer: PeerId) -> None:
        """Note a new link to `peer`."""
        if peer in self.electorate.live:
            return
        self.electorate.live.add(peer)
        if self.commit is None:
            messages = (*self.electorate.farewells.messages(), self.ready.get(self.me))
            self._out += [(peer, one) for one in messages if one is not None]

    def on_link_down(self, peer: PeerId, now: float) -> None:
        """Note that the link to `peer` broke."""
        self.electorate.live.discard(peer)
        self.decision.on_link_down(peer)
        if self.commit is None:
            self._proposer.on_peer_lost(peer, self.proposal)
        elif peer == self.commit.proposal.ballot.leader and self.electorate.order(peer)[:1] == [self.me]:
            # The leader may not have informed all peers, and the others wait for us to begin a ballot.
            self._out.append((None, self.commit))
        self.tick(now)

    def leave(self) -> None:
        """Send our farewell if we are a member and it helps the others: our process ends in a moment."""
        # If the members that we reach are no quorum without us, our farewell would help none of them.
        if self.electorate.spares_me and self.me in self.terms.members and self.voter and self.abstain():
            self._send_farewell()

    def _send_farewell(self) -> None:
        farewell = self.acceptor.farewell(self.me, self.sign)
        if farewell is not None and self.me in self.terms.members:
            self.electorate.farewells.add(farewell)
            self._out.append((None, farewell))

    def overtaken(self) -> None:
        """End our part in this round: the swarm has continued without us."""
        self.diverged = True

    def abstain(self) -> bool:
        """Give up our vote in this round for good; return False if that could not be stored."""
        self.electorate.nonvoters.add(self.me)
        return self.acceptor.abstains or self.acceptor.abstain()

    def take(self) -> list[tuple[PeerId | None, Message]]:
        """Return the messages to send, and forget them; None addresses all reachable peers."""
        out, self._out = self._out, []
        return out

    # --- messages of other peers

    def on_message(self, sender: PeerId, message: Message, signature: bytes, now: float) -> None:
        """Handle a checked message of this round and fragment from an authenticated peer."""
        if not self.terms.members:
            return  # We do not have the swarm's state yet, and no vote.
        if isinstance(message, CompactCommit):
            found = self.decision.completed(message, (self.proposal, self.acceptor.voted))
            if not isinstance(found, Commit):
                self._out += [(sender, found)] if found is not None else []
                return
            message = found
        if isinstance(message, Vote) and message.digest is not None:
            self._check.note_vote(sender, message, signature)  # Also after the commit: it needs no more votes.
        if isinstance(message, Commit):
            self._on_commit(sender, message, now)
        elif isinstance(message, (Propose, Prepare, ViewChange)) and sender not in self.terms.members:
            return  # Only members lead; otherwise a stranger could stop every round.
        elif isinstance(message, Leave):
            self._on_leave(sender, message)
        elif self.commit is not None:
            self._handle_after_commit(sender, message, self.commit)
        elif self._handle_before_commit(sender, message, signature, now):
            return
        self.tick(now)

    def _on_commit(self, sender: PeerId, message: Commit, now: float) -> None:
        if self.decision.on_commit(sender, message, now):
            self.announcements.keep(message.proposal, self.acceptor.voted)
            if self._proposer.ballot is not None:
                self._out.append((None, message))  # Peers that we have asked wait for us now.

    def _handle_after_commit(self, sender: PeerId, message: Message, commit: Commit) -> None:
        """Handle a message after the commit: it may be evidence, and its sender may lack the commit."""
        if isinstance(message, Blame):
            self.announcements.proves(message, commit.proposal)
        elif isinstance(message, Propose):
            self._check.note(message.proposal)
        if isinstance(message, (Ready, Prepare, ViewChange, Blame, Ask)):
            self._out.append((sender, commit))

    def _handle_before_commit(self, sender: PeerId, message: Message, signature: bytes, now: float) -> bool:
        """Handle a message before the commit. Return True if `tick` need not follow."""
        match message:
            case Ready():
                self._on_ready(sender, message, signature, now)
                for peer, reason in self._complaints.doubted(self.proposal):
                    self.accuse(peer, reason, now)
                return self._turn.early(self.proposal)  # Usually one of many, and `tick` comes soon anyway.
            case ShownReady() if self.proposal is not None:
                self.announcements.add_shown(message, self.proposal)
            case Propose():
                self._on_proposal(sender, message, now)
            case Prepare():
                self._on_prepare(sender, message, now)
            case ViewChange():
                self._on_view_change(sender, message, now)
            case Promise():
                if message.voted is not None:
                    self._check.note(message.voted)
                # Only the first vote that a member reports is worth the time of its check.
                first = message.voted is None or self._proposer.note_reported_vote(sender, message)
                if first and (message.voted is None or self._check.genuine(message.voted)):
                    self._proposer.on_promise(sender, message, signature)
            case Decline():
                self._proposer.excuse(sender)
            case Vote():
                self._on_vote(sender, message, signature, now)
            case Blame() if self.proposal is not None:
                proven = self.announcements.proves(message, self.proposal)
                voters = self.decision.voters
                self._proposer.on_blame(sender, message, self.proposal, now, voters=voters, proven=proven)
            case Ask() if self.me in self.ready:
                self._out.append((sender, self.ready[self.me]))
        return False

    def _on_ready(self, sender: PeerId, message: Ready, signature: bytes, now: float) -> None:
        # Without a life the sender could become a member in any life, and its announcements would be no evidence.
        if not self.terms.lineage or len(message.life) == LIFE:
            if self.announcements.add(sender, message, signature):
                self._proposer.on_new_announcement(sender)
            self.diverged |= self.announcements.outnumbered
        if self.proposal is not None:
            self.announcements.keep(self.proposal, self.acceptor.voted)
        self._follow(now)

    def _on_proposal(self, sender: PeerId, message: Propose, now: float) -> None:
        if not self._check.concerns(sender, message, self.proposal):
            return
        # The signatures of one proposal can take a long time, so they are checked once for each ballot that counts.
        if not self.acceptor.heed_proposal(sender, message.proposal, now):
            return
        self.electorate.farewells.on_ballot()
        if self._check.valid(message):
            self._valid = message.proposal
            self._follow(now)

    def _follow(self, now: float) -> None:
        """Follow the last valid proposal, unless this peer does not accept it yet."""
        proposal = self._valid
        if proposal is None or not self._check.accepts(proposal):
            return
        self._valid = None
        if not self.acceptor.follow(proposal.ballot):
            return
        self._proposer.follow()
        self.proposal = proposal
        self.announcements.keep(proposal, self.acceptor.voted)
        self._turn.follow(proposal.ballot.leader, now)
        for peer, reason in (*self._complaints.unwanted(proposal), *self._complaints.doubted(proposal)):
            self.accuse(peer, reason, now)

    def refuse_leader(self, proposal: Proposal) -> None:
        """Follow no further ballot of a leader that has voted for impossible or unclaimed results."""
        if proposal.ballot.leader in proposal.sources:
            self._check.refused.add(proposal.ballot.leader)

    def send_proposal(self, peer: PeerId) -> None:
        """Send our proposal to a peer that follows another one with its ballot.

        Both together are evidence against the leader.
        """
        proposal = self.proposal
        if proposal is not None and (peer, proposal.ballot) not in self._shown:
            self._shown.add((peer, proposal.ballot))
            self._out.append((peer, Propose(proposal)))

    def _on_prepare(self, sender: PeerId, message: Prepare, now: float) -> None:
        if message.lineage != self.terms.lineage or not self.voter or sender in self._check.refused:
            return
        before = self.acceptor.promised
        if message.ballot < before:
            self._out.append((sender, self._view_change()))
            return
        if self._turn.too_early(sender, self.proposal, now) or not self.acceptor.heed_prepare(sender, message, now):
            return
        if (promise := self.acceptor.promise(message.ballot)) is None:
            return
        if before.leader != sender or (self.proposal is not None and self.proposal.ballot == before):
            self._turn.follow(sender, now)  # A ballot that its leader begins again is no progress.
        self._proposer.on_other_ballot()
        self._out += [(sender, one) for one in (self.ready.get(self.me), promise) if one is not None]

    def _view_change(self) -> ViewChange:
        terms, views = self.terms, self.electorate.views
        return ViewChange(terms.round, terms.fragment, views.asked, self.acceptor.promised, terms.lineage)

    def _on_view_change(self, sender: PeerId, message: ViewChange, now: float) -> None:
        if message.lineage != self.terms.lineage or not self.voter:
            return
        views = self.electorate.views
        if views.on_change(sender, message.view, now):
            self._out.append((None, self._view_change()))
        elif message.view < views.asked:
            self._out.append((sender, self._view_change()))
        if self._proposer.refused(message.ballot):
            self._prepare(now)

    def _on_leave(self, sender: PeerId, message: Leave) -> None:
        """Note a farewell, and pass it on while the round needs it: the peer may not have reached all others."""
        peer, farewells = message.farewell.peer, self.electorate.farewells
        if self.commit is not None or peer in farewells or peer not in self.terms.members:
            return
        if farewells.add(message, sender, self._check.genuine):
            others = self.electorate.live - {self.me, sender, peer}
            self._out += [(other, message) for other in sorted(others)]
            self._proposer.on_peer_lost(peer, self.proposal)

    def _on_vote(self, sender: PeerId, message: Vote, signature: bytes, now: float) -> None:
        if self.proposal is None or not self._proposer.leads(self.proposal):
            return
        if self.decision.on_vote(sender, message, signature, self.proposal):
            self._proposer.on_vote(sender)
            self._turn.progress(now)
        if self.commit is not None:
            self._out += self.decision.commit_messages(self.commit)

    # --- time, and ballots of this peer

    def tick(self, now: float) -> None:
        """Let time pass: open a ballot when it is time, replace a leader that is gone or stands still."""
        if self.commit is not None or self.diverged or not self.voter:
            return
        if self.electorate.views.due(now):
            self.electorate.views.ask(now)
            self._out.append((None, self._view_change()))
        if self._proposer.preparing:
            self._try_open(now)
        elif self._turn.has_come(self.proposal, self._check.refused, now):
            fresh = self.terms.members[0] == self.me and self.acceptor.promised.term == 0
            if fresh and (promise := self.acceptor.promise(Ballot(1, self.me))) is not None:
                self._proposer.first(promise, self.sign(promise))
                self._try_open(now)
            else:
                self._prepare(now)

    def _prepare(self, now: float) -> None:
        highest = self.acceptor.highest(self.me)
        ballot = self._proposer.next(self.acceptor.promised, highest, now) if self.voter else None
        promise = self.acceptor.promise(ballot) if ballot is not None else None
        if promise is None:
            return
        self._turn.progress(now)
        self._proposer.prepare(promise, self.sign(promise), now)
        self._out += [(None, leave) for leave in self.electorate.farewells.messages()]
        self._out.append((None, Prepare(self.terms.round, self.terms.fragment, promise.ballot, self.terms.lineage)))
        self._try_open(now)

    def _try_open(self, now: float) -> None:
        message = self._proposer.propose(self.proposal, now)
        if message is not None:
            if self.terms.lineage:
                message = msgspec.structs.replace(message, proposal=sealed(message.proposal, self.sign))
            self.proposal = message.proposal
            self.decision.open()
            self.announcements.keep(self.proposal, self.acceptor.voted)
            self._out.append((None, message))
        if not self._proposer.preparing:
            self._turn.progress(now)
