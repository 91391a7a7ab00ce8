"""Certificates: commits with the votes that prove them to a peer that knows the members."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

import msgspec
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.farewells import departed
from thinwire.collectives.consensus.members.lives import lives_in_order
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import name_of, sound, vote_for
from thinwire.swarm.lineage import Verify
from thinwire.swarm.messages.registry import Certificate, Commit, CompactCommit, PeerId, Proposal
from thinwire.swarm.messages.wire_form import proofs_of, votes_of


def certified(message: Commit, electorate: Electorate, verify: Verify) -> bool:
    """Return True if the votes of a commit prove it: valid, each of another peer, and a quorum."""
    return sound(message.proposal, electorate.terms) and bool(_voters(message, electorate, verify))


def certificate(
    message: Commit, terms: RoundTerms, key_of: Callable[[PeerId], bytes | None], verify: Verify
) -> Certificate | None:
    """Return a commit with its electorate and the keys that others need to check it.

    Return None if too few votes are valid, or their keys are unknown. The certificate has only the valid votes, because a
    peer that knows an earlier electorate counts how many of it have voted. key_of: returns the public key of a peer.
    """
    members = terms.by_seniority
    valid = voters(message, members, terms.fraction, verify)
    if not valid:
        return None
    signers = [*sorted(valid), *departed(message.proposal)]
    keys = tuple(key for peer in dict.fromkeys(signers) if (key := key_of(peer)) is not None)
    commit = msgspec.structs.replace(message, votes=tuple(proof for proof in message.votes if proof.peer in valid))
    return Certificate(members, lives_in_order(members, terms.lives), commit, keys)


def voters(message: Commit, members: Sequence[PeerId], fraction: float, verify: Verify) -> Collection[PeerId]:
    """Return the peers whose valid votes prove a commit; empty if they are no quorum.

    members: the electorate, by seniority.
    """
    proposal = message.proposal
    terms = RoundTerms(
        proposal.round, proposal.fragment, tuple(members), b"", b"", fraction=fraction, lineage=proposal.lineage
    )
    return _voters(message, Electorate(b"", terms, (), verify), verify)


def compact(commit: Commit) -> CompactCommit:
    """Return a commit without its proposal."""
    proposal = commit.proposal
    place = proposal.round, proposal.fragment, proposal.ballot
    return CompactCommit(*place, name_of(proposal), commit.digest, *votes_of(commit.votes, proposal.alive))


def with_proposal(message: CompactCommit, known: Iterable[Proposal | None]) -> Commit | None:
    """Return the commit; None if its proposal is not among the `known` ones, or its votes are malformed."""
    for proposal in known:
        if proposal is not None and proposal.ballot == message.ballot and name_of(proposal) == message.proposal_digest:
            with suppress(ValueError):
                return Commit(proposal, message.digest, proofs_of(message.voters, message.signatures, proposal.alive))
    return None


def conflicting(ours: Commit, theirs: Commit) -> bool:
    """Return True if two commits of one ballot have different values."""
    first, second = ours.proposal, theirs.proposal
    same = (first.lineage, first.ballot) == (second.lineage, second.ballot)
    return same and vote_for(first, ours.digest) != vote_for(second, theirs.digest)


def _voters(message: Commit, electorate: Electorate, verify: Verify) -> Collection[PeerId]:
    proposal, named = message.proposal, [proof.peer for proof in message.votes]
    if named != sorted(set(named)) or not set(named) <= set(proposal.alive) or not electorate.suffice(named, proposal):
        return ()
    if not electorate.farewells.valid(proposal):
        return ()
    vote = vote_for(proposal, message.digest)
    valid = {one.peer for one in message.votes if verify(one.peer, vote, one.signature)}
    return valid if electorate.suffice(valid, proposal) else ()
