"""Complaints to a leader (`Blame`): first chunks change their owners, then peers are excluded.

No third peer can check most complaints: the link between the two peers may be cut, or either may lie. So after the first
complaint against a contributor both peers lose only the chunks that they own; both stay in the round, and their contributions
still count. The chunk in question goes to another owner. Only the complaint of a second owner, or an observation of the leader
itself, excludes the contribution. A new contribution of the same peer is accepted once. If it is excluded again, it stays
excluded; otherwise the peer could block the round for ever. Peers that lack results get them from the others after the round
has committed. The chunks move to other owners only if the round cannot commit without the peers that complain, or if it needs
the vote of the owner, which has not voted after a patience. In that case the peer that complains loses its chunks, too.

In a ring no peer can find the fault: each partial mean has passed through many peers, and all stop when one stops. So one
complaint ends the ring for the round, and no peer is blamed. The next ballot has owners instead, which find the faulty peer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from thinwire.collectives.consensus.acceptor import BALLOTS
from thinwire.collectives.consensus.announcements import Announcements
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.consensus.proposal import FAULTS, TWO_ANNOUNCEMENTS, WITHHELD
from thinwire.swarm.messages.registry import Ballot, Blame, PeerId, Proposal

UNSERVED = ("result", "result missing")
"""Reasons of a Blame against an owner of chunks: its result is wrong or missing."""

BROKEN = "ring"
"""Reason of a Blame in a ring: the data of the neighbour is wrong or missing."""

SUBTOTAL, UNSUMMED = "subtotal", "subtotal missing"
"""Reasons of a Blame against a relay: the subtotal of its cluster is wrong or missing."""


class BlameBook:
    """Complaints of one round at one peer, which counts them while it leads.

    Their number is bounded by the square of the group. `idle`: peers without chunks from the start. `barred`: peers whose
    contributions are excluded from the start.
    """

    def __init__(self, idle: Collection[PeerId] = (), barred: Collection[PeerId] = ()) -> None:
        self.rejected: dict[PeerId, str] = dict.fromkeys(barred, WITHHELD)
        """Excluded contributions by peer, with reasons."""
        self.idle: set[PeerId] = set(idle)
        """Peers that must not own chunks."""
        self.equivocators: set[PeerId] = set()
        """Peers with two announcements in this round, which take no part in it."""
        self.ring_failed = False
        """True if a ring has failed in this round."""
        self._complaints: dict[PeerId, set[PeerId]] = {}
        """Accusers of each contributor."""
        self._unserved: dict[PeerId, set[PeerId]] = {}
        """Accusers of each owner of chunks in `_ballot`."""
        self._ballot: Ballot | None = None
        self._forgiven: set[PeerId] = set()

    def forgive(self, peer: PeerId) -> None:
        """Forget the complaints against a peer that contributes again, but only once."""
        if self.rejected.get(peer) == WITHHELD:
            return  # Another announcement brings no data.
        accused = peer in self.rejected or peer in self._complaints or peer in self.equivocators
        if accused and peer not in self._forgiven:
            self._forgiven.add(peer)
            self.equivocators.discard(peer)
            self.rejected.pop(peer, None)
            self._complaints.pop(peer, None)

    def forgive_all(self) -> None:
        """Forget all complaints about contributions: too few contributors are left for a round."""
        self.rejected.clear()
        self._complaints.clear()
        self._forgiven.clear()

    def on_message(
        self,
        accuser: PeerId,
        blame: Blame,
        proposal: Proposal,
        suffice: Callable[[Collection[PeerId]], bool],
        *,
        silent: Callable[[PeerId], bool] = lambda peer: False,
        proven: bool = False,
    ) -> bool:
        """Handle a complaint about a ballot that we lead; return True if it changes the next ballot.

        `suffice`: returns True if these peers can commit the round alone. silent: returns True if a peer has not voted
        although it has had time. proven: the complaint shows the fault.
        """
        if accuser not in proposal.alive:
            return False
        if proven:
            changes = proposal.adopted is None and blame.peer not in self.equivocators
            self.equivocators.add(blame.peer)
            return changes
        if blame.reason == BROKEN:
            changes = bool(proposal.order) and not self.ring_failed
            self.ring_failed |= changes
            return changes
        if blame.reason in UNSERVED:
            return self._on_missing_result(accuser, blame.peer, proposal, suffice, silent)
        if blame.reason in (SUBTOTAL, UNSUMMED):
            return self._on_missing_subtotal(accuser, blame.peer, proposal)
        contributes = any(entry.peer == blame.peer for entry in proposal.contributors)
        if blame.reason not in FAULTS or not contributes or blame.peer in self.rejected:
            return False
        if accuser == blame.peer:
            return proposal.adopted is None and self._reject(blame)
        owners = set(proposal.alive) - set(proposal.idle)
        if accuser not in owners:
            return False  # A peer without chunks receives no contributions.
        accusers = self._complaints.setdefault(blame.peer, set())
        accusers.add(accuser)
        others = owners - self.idle - {accuser}
        if proposal.adopted is None and (accuser == proposal.ballot.leader or len(accusers) > 1 or not others):
            return self._reject(blame)
        return self._relieve(accuser, blame.peer, others)

    def _on_missing_subtotal(self, owner: PeerId, relay: PeerId, proposal: Proposal) -> bool:
        """Handle the owner's complaint about a relay, which loses its chunks.

        The owner loses its chunks, too, unless it leads.
        """
        working = set(proposal.alive) - set(proposal.idle)
        if relay in self.idle or relay == owner or not {owner, relay} <= working:
            return False
        if owner == proposal.ballot.leader:
            self.idle.add(relay)
            return True
        return self._relieve(owner, relay, working - self.idle - {owner})

    def _relieve(self, accuser: PeerId, accused: PeerId, others: set[PeerId]) -> bool:
        """Take the chunks from both peers, if other owners are left; return False if the complaint is void.

        Complaints of a peer that has lost its chunks do not count: otherwise one liar could take the chunks of all peers.
        """
        if accuser in self.idle:
            return False
        self.idle.add(accuser)
        if others - {accused}:
            self.idle.add(accused)
        return True

    def _on_missing_result(
        self,
        accuser: PeerId,
        owner: PeerId,
        proposal: Proposal,
        suffice: Callable[[Collection[PeerId]], bool],
        silent: Callable[[PeerId], bool],
    ) -> bool:
        if proposal.ballot != self._ballot:
            self._ballot, self._unserved = proposal.ballot, {}
        if owner not in proposal.alive or owner in proposal.idle or owner == accuser:
            return False
        self._unserved.setdefault(owner, set()).add(accuser)
        able = set(proposal.alive).difference(*self._unserved.values())
        if suffice(able):
            # The owner may be the liar that does not vote, or the accuser the one that complains without a reason.
            needed = not suffice(able.difference(peer for peer in self._unserved if silent(peer)))
            return needed and self._relieve(
                accuser, owner, set(proposal.alive) - set(proposal.idle) - self.idle - {accuser}
            )
        most = max(len(accusers) for accusers in self._unserved.values())
        before = set(self.idle)
        self.idle |= {peer for peer, accusers in self._unserved.items() if len(accusers) == most}
        return self.idle != before

    def _reject(self, blame: Blame) -> bool:
        self.rejected[blame.peer] = blame.reason
        return True


class Complaints:
    """Complaints of this peer about proposals. `barred`: peers that must not contribute."""

    def __init__(self, terms: RoundTerms, announcements: Announcements, barred: Collection[PeerId]) -> None:
        self._terms, self._announcements, self._barred = terms, announcements, frozenset(barred)
        self._made: dict[tuple[PeerId, str], float] = {}
        self._ballot: Ballot | None = None

    def make(self, proposal: Proposal, peer: PeerId, reason: str, now: float) -> Blame | None:
        """Return a complaint about `peer`; None if it is made again too soon.

        A repeated complaint is sent a few times per patience, because we must sign and the leader verify each.
        """
        if self._ballot != proposal.ballot:
            self._ballot, self._made = proposal.ballot, {}
        if now < self._made.get((peer, reason), -math.inf) + self._terms.patience / 4:
            return None
        self._made[peer, reason] = now
        announced = self._announcements.signed(peer) if reason == TWO_ANNOUNCEMENTS else None
        return Blame(self._terms.round, self._terms.fragment, proposal.ballot, peer, reason, announced)

    def unwanted(self, proposal: Proposal) -> list[tuple[PeerId, str]]:
        """Return the contributors that we would exclude, if enough others are left, and the reason."""
        contributors = {entry.peer for entry in proposal.contributors}
        enough = len(contributors - self._barred) >= self._terms.min_peers
        free = proposal.adopted is None and proposal.ballot.term <= BALLOTS
        return [(peer, WITHHELD) for peer in sorted(contributors & self._barred)] if enough and free else []

    def doubted(self, proposal: Proposal | None) -> list[tuple[PeerId, str]]:
        """Return a contributor with two announcements, if there is one, and the reason.

        One complaint is enough to end the ballot, and a leader that lies could name false announcements of all contributors.
        """
        if proposal is None:
            return []
        return [(peer, TWO_ANNOUNCEMENTS) for peer in self._announcements.contradicted(proposal)[:1]]
