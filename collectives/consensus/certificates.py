"""Certificates: commits with the votes that prove them to a peer that knows the members."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.proposal import RoundTerms, name_of, sound
from thinwire.swarm.messages.registry import Commit, Message, PeerId, Vote

Verify = Callable[[PeerId, Message, bytes], bool]


def certified(message: Commit, electorate: Electorate, verify: Verify) -> bool:
    """Return True if the votes of a commit prove it: valid, each of another peer, and a quorum."""
    return sound(message.opened, electorate.terms) and _voted(message, electorate, verify)


def continues(
    message: Commit,
    lineage: bytes,
    fragment: int,
    after: int,
    members: Sequence[PeerId],
    fraction: float,
    verify: Verify,
) -> bool:
    """Return True if a commit proves that a lineage has continued `after` a round with these members.

    members: by seniority. It may be a later commit than the next one, as long as the members did not change before it.
    """
    opened = message.opened
    terms = RoundTerms(opened.round, fragment, tuple(members), bytes(32), bytes(32), fraction=fraction, lineage=lineage)
    same = (opened.lineage, opened.fragment) == (lineage, fragment)
    return same and opened.round > after and _voted(message, Electorate(b"", terms, (), verify), verify)


def _voted(message: Commit, electorate: Electorate, verify: Verify) -> bool:
    opened, named = message.opened, [proof.peer for proof in message.votes]
    if named != sorted(set(named)) or not set(named) <= set(opened.alive) or not electorate.suffice(named, opened):
        return False
    if not electorate.farewells.valid(opened):
        return False
    vote = Vote(opened.round, opened.fragment, opened.ballot, name_of(opened), message.digest)
    return electorate.suffice({one.peer for one in message.votes if verify(one.peer, vote, one.signature)}, opened)
