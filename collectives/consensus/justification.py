"""Justification of a ballot above the first: signed promises of a quorum from which its value follows.

A leader that lies could otherwise propose another value than the one that was chosen. The promises are the messages that
the leader has received, so a leader can neither change the vote in one nor take it from another ballot, round or lineage:
the signature covers all of these. If a leader leaves out the promise of a voter, that member counts as silent, and silent
members count as voters of every reported value (`bound`).

An honest acceptor votes in a ballot above the first only if it is justified. This differs from Paxos, where acceptors
trust the proposer, and from PBFT (Castro and Liskov 1999), where a value is locked in a phase of its own before it is
chosen. A round here has one phase fewer than in PBFT. The price: two possible values stop it until more members answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
from thinwire.collectives.consensus.electorate import Electorate
from thinwire.collectives.consensus.farewells import departed
from thinwire.collectives.consensus.proposal import AcceptedValue, name_of, sound, statement
from thinwire.swarm.lineage import Verify
from thinwire.swarm.messages.registry import (
    MAX_PROPOSALS,
    Contribution,
    Digest,
    Leave,
    Message,
    PeerId,
    Promise,
    Proposal,
    Propose,
    Report,
)

Signed = tuple[Promise, bytes]
"""A promise and its signature."""


def choices(promises: Mapping[PeerId, Promise]) -> list[AcceptedValue]:
    """Return the values with votes, highest ballot first, in one ballot most votes first.

    One ballot has two values only if a peer lies: an owner that sent different results, or a voter.
    """
    found: dict[tuple[tuple[Contribution, ...], tuple[PeerId, ...], bytes, Digest], list[tuple[PeerId, Proposal]]] = {}
    for peer, promise in promises.items():
        if promise.voted is not None and promise.digest is not None:
            value = (promise.voted.contributors, promise.voted.members, promise.voted.lives, promise.digest)
            found.setdefault(value, []).append((peer, promise.voted))
    listed = [
        AcceptedValue(
            max((proposal for _, proposal in votes), key=lambda o: o.ballot), digest, tuple(sorted(p for p, _ in votes))
        )
        for (_, _, _, digest), votes in found.items()
    ]
    return sorted(listed, key=lambda c: (c.proposal.ballot, len(c.voters), c.digest), reverse=True)


def bound(
    found: Sequence[AcceptedValue],
    silent: Collection[PeerId],
    left: Collection[PeerId],
    possible: Callable[[Collection[PeerId], Collection[PeerId]], bool],
) -> list[AcceptedValue]:
    """Return the values that can have been chosen, highest ballot first; with none the choice is free.

    found: reported votes, highest ballot first. silent: members without a report. left: members with a farewell that the
    ballot carries. possible: see `Electorate.possible`. A value can have been chosen only if its reported voters and the
    silent members would be a quorum; members that have left without a vote for it do not count. If no member lies, and a
    value was chosen, all later ballots have proposed it, so the first value of the list binds. If members may lie, the
    ballot of a report proves nothing, so a ballot may propose a value only if no other one is possible. If none is possible
    the choice is free: a single voter with results that no peer can use must not stop the round.
    tests/kit/reference/small_model.py has the proof.
    """
    return [one for one in found if possible({*silent, *one.voters}, set(left).difference(one.voters))]


def contested(found: Sequence[AcceptedValue]) -> list[AcceptedValue]:
    """Return the values that a ballot may adopt in a free choice, most votes first.

    These are values with votes for other results of the same contributors. Then an owner has sent peers different results
    and would do so again, so peers fetch the results of the voters.
    """
    digests: dict[tuple[Contribution, ...], set[Digest]] = {}
    for one in found:
        digests.setdefault(one.proposal.contributors, set()).add(one.digest)
    return sorted(
        (one for one in found if len(digests[one.proposal.contributors]) > 1), key=lambda one: -len(one.voters)
    )


def decidable(
    promises: Mapping[PeerId, Promise], farewells: Mapping[PeerId, Leave], electorate: Electorate
) -> tuple[list[AcceptedValue], list[AcceptedValue]]:
    """Return the values with reported votes, and those of them that can have been chosen, as `bound` does.

    farewells: those that the ballot carries. A member that has promised counts by its promise.
    """
    reports = {
        peer: Promise(one.round, one.fragment, one.farewell.promised, one.voted, one.farewell.digest)
        for peer, one in farewells.items()
    }
    reports |= promises
    found = choices(reports)
    silent = set(electorate.terms.members).difference(reports)
    return found, bound(found, silent, set(farewells), electorate.possible)


def presentable(promises: Mapping[PeerId, Signed], farewells: Collection[Leave]) -> dict[PeerId, Signed]:
    """Return the promises that a justification can contain, without votes for the rarest proposals.

    A member whose promise is left out counts as silent. Each liar can report another proposal, so the rarest are theirs.
    """
    named = Counter(name_of(one.voted) for one, _ in promises.values() if one.voted is not None)
    must = {name_of(one.voted) for one in farewells if one.voted is not None}
    others = sorted(named.keys() - must, key=lambda name: (-named[name], name))
    kept = must.union(others[: max(0, MAX_PROPOSALS - len(must))])
    return {peer: one for peer, one in promises.items() if one[0].voted is None or name_of(one[0].voted) in kept}


def justify(proposal: Proposal, promises: Mapping[PeerId, Signed], farewells: Collection[Leave]) -> Propose | None:
    """Return the proposal with its promises; None if the votes are for too many different proposals."""
    voted = [promise.voted for promise, _ in promises.values()] + [one.voted for one in farewells]
    named = {name_of(one): one for one in voted if one is not None}
    if len(named) > MAX_PROPOSALS:
        return None
    number = {name: at for at, name in enumerate(sorted(named), 1)}
    reports = tuple(
        Report(peer, number[name_of(one.voted)] if one.voted is not None else 0, one.digest, signature)
        for peer, (one, signature) in sorted(promises.items())
    )
    return Propose(proposal, reports, tuple(named[name] for name in sorted(named)))


def reported(
    message: Propose, electorate: Electorate, verify: Verify
) -> tuple[dict[PeerId, Promise], dict[PeerId, Leave]] | None:
    """Return the promises and farewells of a proposal.

    None if they are malformed, or if no quorum has promised. Only promises of members with a valid signature count. The caller
    checks farewells, and proofs of members.
    """
    proposal, terms = message.proposal, electorate.terms
    if not all(sound(one, terms) and one.ballot < proposal.ballot for one in message.earlier):
        return None
    peers = [report.peer for report in message.reports]
    if peers != sorted(set(peers)):
        return None  # Else a liar could repeat invalid signatures, which take time to check.
    promises: dict[PeerId, Promise] = {}
    for report in message.reports:
        if report.peer not in terms.members or report.voted > len(message.earlier):
            return None
        voted = message.earlier[report.voted - 1] if report.voted else None
        promise = Promise(terms.round, terms.fragment, proposal.ballot, voted, report.digest, terms.lineage)
        if (voted is None) == (report.digest is None) and verify(report.peer, promise, report.signature):
            promises[report.peer] = promise
    if not electorate.enough(promises, departed(proposal)):
        return None
    named = {name_of(one): one for one in message.earlier}
    if any(one.voted is not None and one.voted not in named for one in proposal.farewells):
        return None
    return promises, {
        one.peer: Leave(terms.round, terms.fragment, terms.lineage, one, named[one.voted] if one.voted else None)
        for one in proposal.farewells
    }


def justified(
    proposal: Proposal, promises: Mapping[PeerId, Promise], farewells: Mapping[PeerId, Leave], electorate: Electorate
) -> bool:
    """Return True if the value of a proposal follows from its promises and farewells.

    A free choice adopts only contested results. The structure of the proposal is checked by the caller.
    """
    found, possible = decidable(promises, farewells, electorate)
    if not possible:
        return proposal.adopted is None or any(proposes(proposal, one) for one in contested(found))
    return (len(possible) == 1 or not electorate.liars) and proposes(proposal, possible[0])


def sealed(proposal: Proposal, sign: Callable[[Message], bytes]) -> Proposal:
    """Return a proposal with its leader's signature."""
    return msgspec.structs.replace(proposal, seal=sign(statement(proposal)))


def proposes(proposal: Proposal, value: AcceptedValue) -> bool:
    """Return True if a proposal adopts this value, and names only its voters as holders of the results."""
    old = value.proposal
    ours = proposal.contributors, proposal.members, proposal.lives, proposal.adopted
    return ours == (old.contributors, old.members, old.lives, value.digest) and {*proposal.sources} <= {*value.voters}
