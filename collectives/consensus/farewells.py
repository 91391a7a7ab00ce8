"""Farewells of the members that have left a round; `quorum` proves that it may do without them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import msgspec
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import name_of, sound
from thinwire.swarm.lineage import Verify
from thinwire.swarm.messages.registry import MAX_FAREWELLS, Ballot, Farewell, Leave, Message, PeerId, Proposal


def statement(leave: Leave) -> Leave:
    """Return what the leaving peer signs: everything but the proposal, which the farewell names."""
    return msgspec.structs.replace(leave, farewell=msgspec.structs.replace(leave.farewell, signature=b""), voted=None)


def signed(leave: Leave, sign: Callable[[Message], bytes]) -> Leave:
    """Return the message with our signature."""
    signature = sign(statement(leave))
    return msgspec.structs.replace(leave, farewell=msgspec.structs.replace(leave.farewell, signature=signature))


class Farewells:
    """Verified farewells of one round, by peer."""

    def __init__(self, terms: RoundTerms, verify: Verify) -> None:
        self._terms, self._verify = terms, verify
        self._known: dict[PeerId, Leave] = {}
        self._examined: set[tuple[PeerId, PeerId]] = set()
        """Senders and members of the farewells whose votes were checked since the last ballot."""

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._known)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._known

    def on_ballot(self) -> None:
        """Note that another ballot has begun: farewells that were refused for lack of a key may come again."""
        self._examined.clear()

    def add(
        self, leave: Leave, sender: PeerId | None = None, genuine: Callable[[Proposal], bool] = lambda voted: True
    ) -> bool:
        """Add a farewell; return False if it is known, or cannot be right.

        sender: None for our own farewell. genuine: returns True if an honest peer can have voted for a proposal. That takes
        time, so it is called last, and only for the first farewell of a member that another member sends in a ballot: a liar
        can sign any number of them, each with another vote.
        """
        farewell, peer, proposal, terms = leave.farewell, leave.farewell.peer, leave.voted, self._terms
        if peer in self._known or peer not in terms.members or len(self._known) >= MAX_FAREWELLS:
            return False
        if (leave.round, leave.fragment, leave.lineage) != (terms.round, terms.fragment, terms.lineage):
            return False
        if not (proposal is None) == (farewell.voted is None) == (farewell.digest is None):
            return False
        if proposal is not None and not (sound(proposal, terms) and name_of(proposal) == farewell.voted):
            return False
        if proposal is not None and proposal.ballot > farewell.promised:
            return False  # A vote is a promise. A ballot that carries this farewell could not be justified.
        if not self.is_signed(farewell):
            return False
        if proposal is not None and not (self._note_examined(sender, peer) and genuine(proposal)):
            return False
        self._known[peer] = leave
        return True

    def _note_examined(self, sender: PeerId | None, peer: PeerId) -> bool:
        """Note that a vote is checked; return False if its sender has none that may be checked."""
        if sender is None:
            return True
        first = (sender, peer) not in self._examined and sender in self._terms.members
        self._examined.add((sender, peer))
        return first

    def messages(self) -> list[Leave]:
        """Return the farewells, for other peers."""
        return [self._known[peer] for peer in sorted(self._known)]

    def below(self, ballot: Ballot) -> dict[PeerId, Leave]:
        """Return the farewells that this ballot may carry: those with a promise that is not above it."""
        return {peer: leave for peer, leave in sorted(self._known.items()) if leave.farewell.promised <= ballot}

    def valid(self, proposal: Proposal) -> bool:
        """Return True if the farewells of a proposal may be left out of its quorum."""
        peers = [farewell.peer for farewell in proposal.farewells]
        return peers == sorted(set(peers)) and all(
            one.promised <= proposal.ballot and self.is_signed(one) for one in proposal.farewells
        )

    def is_signed(self, farewell: Farewell) -> bool:
        """Return True if a member has signed this farewell."""
        terms, known = self._terms, self._known.get(farewell.peer)
        if farewell.peer not in terms.members:
            return False
        if known is not None and known.farewell == farewell:
            return True
        stated = Leave(terms.round, terms.fragment, terms.lineage, farewell, None)
        return self._verify(farewell.peer, statement(stated), farewell.signature)


def departed(proposal: Proposal) -> Collection[PeerId]:
    """Return the members that the quorum of a proposal is counted without."""
    return [farewell.peer for farewell in proposal.farewells]
