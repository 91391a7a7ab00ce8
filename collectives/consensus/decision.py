"""Decision of a round at one peer: the commit, from votes in its own ballot or from another peer.

This is the learner of Paxos Made Simple. The leader of a ballot is the distinguished one: votes go to it alone, and it
informs the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from thinwire.collectives.consensus.certificates import certified, compact, conflicting, with_proposal
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.proposal import vote_for
from thinwire.swarm.keyring import Keyring
from thinwire.swarm.messages.registry import (
    Ask,
    Commit,
    CompactCommit,
    Digest,
    Message,
    PeerId,
    Proof,
    Proposal,
    Vote,
)


class Decision:
    """Decision of one round at one peer. `commit`: None until it is known; the first one stays.

    note_commit: gets the commits of other peers, because two values of one ballot are evidence.
    """

    def __init__(self, keyring: Keyring, electorate: Electorate, note_commit: Callable[[Commit], None]) -> None:
        self.commit: Commit | None = None
        self._verify, self._key_of = keyring.verify, keyring.key_of
        self._electorate, self._terms, self._note_commit = electorate, electorate.terms, note_commit
        self._votes: dict[PeerId, tuple[Digest, bytes]] = {}
        """Votes in the last ballot that this peer opened: digest of the results, and signature."""
        self._informed: set[PeerId] = set()
        """Peers to which its proposal went over a link that is still open."""
        self._silenced_until: dict[PeerId, float] = {}
        """Senders of a false commit, and the time until which no other one of theirs is checked."""

    # --- votes

    def open(self) -> None:
        """Begin to count votes: this peer sends the proposal of another ballot to all reachable peers."""
        self._votes, self._informed = {}, set(self._electorate.live)

    def on_link_down(self, peer: PeerId) -> None:
        """Note that our last proposal may not have reached a peer."""
        self._informed.discard(peer)

    @property
    def voters(self) -> Collection[PeerId]:
        """Peers that have voted in the last ballot that this peer opened."""
        return self._votes.keys()

    def on_vote(self, sender: PeerId, message: Vote, signature: bytes, proposal: Proposal) -> bool:
        """Count a vote for our open proposal; return True if it is the first one of its sender.

        Equal votes of a quorum make the commit.
        """
        if message.digest is None:
            return False  # A leader's statement about its proposal is no vote.
        if sender not in proposal.alive or message != vote_for(proposal, message.digest):
            return False  # Others could not check its signature.
        is_first = sender not in self._votes
        self._votes[sender] = (message.digest, signature)
        same = {peer for peer, (digest, _) in self._votes.items() if digest == message.digest}
        if self._electorate.suffice(same, proposal):
            proofs = tuple(Proof(peer, self._votes[peer][1]) for peer in sorted(same))
            self.commit = Commit(proposal, message.digest, proofs)
        return is_first

    def commit_messages(self, commit: Commit) -> list[tuple[PeerId, Message]]:
        """Return the commit for each reachable peer: without its proposal for those that have it."""
        others, known = self._electorate.live - {self._electorate.me}, self._informed | self._votes.keys()
        short = compact(commit)
        return [
            *((peer, short) for peer in sorted(others & known)),
            *((peer, commit) for peer in sorted(others - known)),
        ]

    # --- commits of other peers

    def completed(self, message: CompactCommit, known: Iterable[Proposal | None]) -> Commit | Ask | None:
        """Return a commit with its proposal, which is ours or one of the `known` ones.

        Otherwise return the question for the whole commit; None if it is not needed.
        """
        found = with_proposal(message, (*known, self.commit.proposal if self.commit is not None else None))
        # Another proposal of the ballot of our commit is evidence.
        if found is None and (self.commit is None or self.commit.proposal.ballot == message.ballot):
            return Ask(self._terms.round, self._terms.fragment)
        return found

    def on_commit(self, sender: PeerId, message: Commit, now: float) -> bool:
        """Check the commit that a peer has sent; return True if it is the first one that is right."""
        if now < self._silenced_until.get(sender, 0.0) or not self._checkable(message):
            return False
        if self.commit is None and certified(message, self._electorate, self._verify):
            self.commit = message
            self._note_commit(message)
            return True
        if self.commit is None:
            self._silenced_until[sender] = now + self._terms.patience
        elif conflicting(self.commit, message):
            self._silenced_until[sender] = now + self._terms.patience
            self._note_commit(message)
        return False

    def _checkable(self, message: Commit) -> bool:
        """Return True if the keys that prove a commit are known here: it is wrong only if signatures are."""
        peers = [vote.peer for vote in message.votes if self._key_of(vote.peer) is not None]
        left = [farewell.peer for farewell in message.proposal.farewells]
        return self._electorate.suffice(peers, message.proposal) and None not in map(self._key_of, left)

    # --- what is known about results

    def results_confirmed(self, proposal: Proposal) -> bool:
        """Return True if this peer does not have to check the results of a ballot.

        They are decided, or an honest peer has voted for them.
        """
        return self.commit is not None or self._electorate.confirmed(proposal.sources)

    @property
    def doubted(self) -> bool:
        """True if the decided results were adopted, and only members that may lie had reported votes for them."""
        if self.commit is None or self.commit.proposal.adopted is None:
            return False
        return not self._electorate.confirmed(self.commit.proposal.sources)
