"""Proposals of a leader, and the conditions for them: pure functions of announcements and votes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import blake3
import msgspec
from thinwire.collectives.consensus.members.lives import lives_in_order, lives_of
from thinwire.collectives.consensus.members.terms import RoundTerms
from thinwire.collectives.topology import clusters, placement, relay_plan
from thinwire.collectives.topology.bandwidth_shares import allot
from thinwire.swarm.messages.registry import (
    LIFE,
    MAX_GROUP,
    Ballot,
    Contribution,
    Digest,
    Exclusion,
    Farewell,
    PeerId,
    Proposal,
    Ready,
    Vote,
)

MISSING, WITHHELD = "chunk missing", "withheld"
"""Reasons of a Blame: data of a contributor is missing, now or in so many rounds that it is excluded."""

TWO_ANNOUNCEMENTS = "two announcements"
"""Reason of a Blame: a proposal names another announcement than the accuser has."""

FAULTS = (
    MISSING,
    "not announced",
    TWO_ANNOUNCEMENTS,
    "hash",
    "length",
    "not finite",
    "encoding",
    "norm",
    "withdrawn",
    WITHHELD,
)
"""Reasons of a Blame against a contributor."""

LEFT, ON_TRIAL, DISTRUSTED = "left", "on trial", "its contributions do not lower the loss"
"""Reasons of an Exclusion: the peer has left with a farewell, lacks endorsements, or is distrusted."""

UNPROVEN = "its key or admission is unknown"
"""Reason of an Exclusion: the leader cannot prove to others that the peer may become a member."""


def names(entry: Contribution, ready: Ready) -> bool:
    """Return True if an entry of a proposal is about this announcement."""
    return entry.attempt == ready.attempt and entry.announced in (ready.digest, b"")


def name_of(proposal: Proposal) -> Digest:
    """Return the blake3 of a proposal without its seal, which a vote names."""
    bare = msgspec.structs.replace(proposal, seal=b"") if proposal.seal else proposal
    return blake3.blake3(msgspec.msgpack.encode(bare)).digest()


def statement(proposal: Proposal) -> Vote:
    """Return what the leader signs for its proposal (`Proposal.seal`)."""
    return Vote(proposal.round, proposal.fragment, proposal.ballot, name_of(proposal), None, proposal.lineage)


def vote_for(proposal: Proposal, digest: Digest) -> Vote:
    """Return the vote for a proposal and these results."""
    return msgspec.structs.replace(statement(proposal), digest=digest)


def new_lives(proposal: Proposal, terms: RoundTerms) -> dict[PeerId, bytes]:
    """Return the next members that are not members of this round in the same life, with their lives."""
    lives = lives_of(proposal.members, proposal.lives)
    return {peer: life for peer, life in lives.items() if terms.lives.get(peer) != life}


def sound(proposal: Proposal, terms: RoundTerms) -> bool:
    """Return True if the structure of a proposal is valid.

    Round, lineage and electorate are those of the terms. Lists are sorted without duplicates, `alive` is within the group
    and has an owner, each chunk has one owner, weights are bounded or as settled, a ring has all owners. Contributors are
    members of the next round. In a lineage, their announcements and the lives of all members are named, and new lives have
    proofs (whose signatures are not checked here). A proposal of adopted results names their holders, and the members that
    were decided with them. In others, members that are absent keep their lives.
    """
    peers = [contribution.peer for contribution in proposal.contributors]
    return (
        (proposal.round, proposal.fragment, proposal.lineage) == (terms.round, terms.fragment, terms.lineage)
        and proposal.electorate == terms.electorate
        and set(proposal.idle) < set(proposal.alive)
        and terms.min_peers <= len(proposal.contributors) <= terms.max_contributors
        and all(
            list(ids) == sorted(set(ids))
            for ids in (proposal.group, proposal.alive, proposal.idle, proposal.kept, peers)
        )
        and set(proposal.alive) <= set(proposal.group)
        and set(peers) <= set(proposal.members)
        and (proposal.adopted is None) == (not proposal.sources)
        and _members_valid(proposal, terms)
        and all(0 < contribution.weight <= terms.max_weight for contribution in proposal.contributors)
        and all(len(one.announced) == 32 or not (one.announced or terms.lineage) for one in proposal.contributors)
        and (not proposal.shares or _shares_valid(proposal, terms))
        and clusters.sound(proposal.sites, len(proposal.group) if terms.sited else 0)
        and len(proposal.lives) in (0, LIFE * len(proposal.members))
        and (not terms.lineage or len(lives_of(proposal.members, proposal.lives)) == len(proposal.members))
        and (proposal.adopted is not None or not proposal.left)
        and len(proposal.member_proofs) == (len(new_lives(proposal, terms)) if terms.lineage else 0)
        and (terms.weights is None or all(terms.weights.get(c.peer) == c.weight for c in proposal.contributors))
        and (not proposal.order or _ring_valid(proposal, terms))
    )


def _members_valid(proposal: Proposal, terms: RoundTerms) -> bool:
    """Return True if adopted results name members, and a free proposal those of `alive` and absent ones."""
    if proposal.adopted is not None or not proposal.kept:
        return bool(proposal.kept) == (proposal.adopted is not None)
    lives, absent = lives_of(proposal.kept, proposal.lives), set(proposal.kept).difference(proposal.alive)
    stay = all(peer in terms.lives and lives.get(peer) == terms.lives[peer] for peer in absent)
    return set(proposal.alive) < set(proposal.kept) and stay


def _shares_valid(proposal: Proposal, terms: RoundTerms) -> bool:
    """Return True if shares are valid: chunks that add up to the fragment, or capacities above 0."""
    if terms.relays:
        return len(proposal.shares) == len(proposal.group) and 0 not in proposal.shares
    return 0 < terms.chunks == sum(proposal.shares) and len(proposal.shares) == len(proposal.group)


def _ring_valid(proposal: Proposal, terms: RoundTerms) -> bool:
    """Return True if the terms allow a ring, and it contains each owner of chunks once."""
    places = [place for place, peer in enumerate(proposal.alive) if peer not in proposal.idle]
    return terms.ring is not None and proposal.adopted is None and sorted(proposal.order) == places


def fit(
    terms: RoundTerms, present: Collection[PeerId], ready: Mapping[PeerId, Ready]
) -> tuple[tuple[PeerId, ...], dict[PeerId, str]]:
    """Return the peers of `present` that can take part, sorted, and the reasons why others cannot."""
    able: list[PeerId] = []
    excluded: dict[PeerId, str] = {}
    for peer in sorted(present):
        announced = ready.get(peer)
        if announced is None:
            continue
        if announced.base != terms.base:
            excluded[peer] = "base digest"
        elif announced.plan != terms.plan:
            excluded[peer] = "plan"
        else:
            able.append(peer)
    if len(able) > MAX_GROUP:
        # Members first, because a quorum is counted over them.
        able.sort(key=lambda peer: (peer not in terms.members, peer))
        excluded |= dict.fromkeys(able[MAX_GROUP:], "group is full")
        able = sorted(able[:MAX_GROUP])
    return tuple(able), excluded


def propose(
    ballot: Ballot,
    terms: RoundTerms,
    able: tuple[PeerId, ...],
    ready: Mapping[PeerId, Ready],
    excluded: Mapping[PeerId, str],
    *,
    rejected: Mapping[PeerId, str],
    distrusted: Collection[PeerId] = (),
    idle: Collection[PeerId],
    before: Proposal | None,
    without_ring: bool = False,
    farewells: tuple[Farewell, ...] = (),
) -> Proposal | None:
    """Return a freely chosen proposal; None if there are too few contributors.

    All of `able` contribute, except the rejected, and the `distrusted` if enough others do. The group is that of the ballot
    `before`, if any, so that only chunks of departed or idle peers change their owner.
    """
    group, shares = (before.group, before.shares) if before is not None else (able, None)
    alive = tuple(peer for peer in able if peer in group)
    if not alive:
        group, alive, shares = able, able, None
    willing = [peer for peer in alive if _weight(ready[peer], peer, terms) > 0 and peer not in rejected]
    chosen, left_out = _contributors(terms, willing, distrusted)
    contributors = tuple(
        Contribution(peer, ready[peer].attempt, _weight(ready[peer], peer, terms), ready[peer].digest)
        for peer in chosen
    )
    if not alive or len(contributors) < terms.min_peers:
        return None
    out = _listed({**rejected, **excluded, **left_out})
    resting = _resting(idle, alive)
    ring = () if without_ring or terms.ring is None else placement.order(terms.ring, alive, resting, ready)
    if ring:
        shares = ()  # All peers of a ring send equally many bytes.
    elif shares is None:
        links = placement.loads(group, chosen, resting, ready)
        shares = relay_plan.shares(links) if terms.relays else allot(terms.chunks, links, terms.fragment)
    sites: tuple[int, ...] = ()
    if terms.sited:  # Results depend on the sites, so a group has the same sites in all ballots.
        kept = before is not None and group is before.group
        sites = before.sites if before is not None and kept else placement.sites(group, ready)
    return Proposal(
        terms.round,
        terms.fragment,
        ballot,
        group=group,
        alive=alive,
        contributors=contributors,
        excluded=out,
        adopted=None,
        sources=(),
        idle=resting,
        shares=shares,
        sites=sites,
        order=ring,
        lives=b"".join(ready[peer].life.ljust(LIFE, b"\0") for peer in alive)
        if any(ready[p].life for p in alive)
        else b"",
        lineage=terms.lineage,
        farewells=farewells,
        electorate=terms.electorate,
    )


def _contributors(
    terms: RoundTerms, willing: Sequence[PeerId], distrusted: Collection[PeerId]
) -> tuple[list[PeerId], dict[PeerId, str]]:
    """Choose contributors of the `willing` peers; return them, and the reasons why others are left out.

    Distrusted and spare peers are left out only if `min_peers` others contribute.
    """
    doubted = [peer for peer in willing if peer in distrusted][: max(0, len(willing) - terms.min_peers)]
    left_out = dict.fromkeys(doubted, DISTRUSTED)
    chosen = [peer for peer in willing if peer not in doubted]
    first = [peer for peer in chosen if peer not in terms.spare]
    if len(first) >= terms.min_peers:
        left_out |= {peer: "spare" for peer in chosen if peer in terms.spare}
        chosen = first
    if len(chosen) > terms.max_contributors:
        # The order of the members changes with each round, so that not always the same peers are left out.
        order = {peer: place for place, peer in enumerate(terms.members)}
        chosen = sorted(sorted(chosen, key=lambda peer: order.get(peer, len(order)))[: terms.max_contributors])
    return chosen, left_out


def _weight(ready: Ready, peer: PeerId, terms: RoundTerms) -> int:
    """Return the weight of an announced contribution; 0 if there is none, or it is not allowed."""
    if terms.weights is not None:
        return terms.weights.get(peer, 0) if ready.weight else 0
    return min(ready.weight, terms.max_weight)


@dataclass(frozen=True, slots=True)
class AcceptedValue:
    """Value with votes: contributors and members of `proposal`, and the digest of the results.

    proposal: the proposal of the highest ballot with votes for this value. voters: peers that report such votes, sorted; they
    hold all results.
    """

    proposal: Proposal
    digest: Digest
    voters: tuple[PeerId, ...]


def adopt(
    ballot: Ballot,
    terms: RoundTerms,
    able: tuple[PeerId, ...],
    choice: AcceptedValue,
    excluded: Mapping[PeerId, str],
    farewells: tuple[Farewell, ...] = (),
    left: tuple[Farewell, ...] = (),
    *,
    idle: Collection[PeerId],
) -> Proposal:
    """Return a proposal of a value with votes: peers fetch its results from the voters.

    The members of the next round are part of the value, although other peers may take part now. left: see `Electorate.left`.
    """
    old = choice.proposal
    alive = able or choice.voters
    group = tuple(sorted({*alive, *old.group[: MAX_GROUP - len(alive)]}))
    owned = dict(zip(old.group, old.shares, strict=False))
    # The shares of an all-gather are uplinks above 0, and those of new peers are unknown.
    kept = owned and (owned.keys() == set(group) if terms.relays else owned.keys() <= set(group))
    out = _listed({entry.peer: entry.reason for entry in old.excluded} | dict(excluded))
    return Proposal(
        terms.round,
        terms.fragment,
        ballot,
        group=group,
        alive=alive,
        contributors=old.contributors,
        excluded=out,
        adopted=choice.digest,
        sources=choice.voters,
        idle=_resting(idle, alive),
        kept=old.members,
        shares=tuple(owned.get(peer, 0) for peer in group) if kept else (),
        sites=clusters.kept(old.group, old.sites, group) if terms.sited else (),
        lives=old.lives,
        member_proofs=old.member_proofs,
        lineage=terms.lineage,
        farewells=farewells,
        left=left,
        electorate=terms.electorate,
    )


def with_absent(proposal: Proposal, absent: Collection[PeerId], terms: RoundTerms) -> Proposal:
    """Return a freely chosen proposal in which these members of the round stay members."""
    if not absent:
        return proposal
    lives = {**terms.lives, **lives_of(proposal.alive, proposal.lives)}
    kept = tuple(sorted({*proposal.alive, *absent}))
    return msgspec.structs.replace(proposal, kept=kept, lives=lives_in_order(kept, lives))


def _resting(idle: Collection[PeerId], alive: Collection[PeerId]) -> tuple[PeerId, ...]:
    """Return the peers without chunks, sorted; none if otherwise no peer would own chunks."""
    return tuple(sorted(set(idle) & set(alive))) if set(alive) - set(idle) else ()


def _listed(reasons: Mapping[PeerId, str]) -> tuple[Exclusion, ...]:
    return tuple(Exclusion(peer, reason) for peer, reason in sorted(reasons.items())[:MAX_GROUP])
