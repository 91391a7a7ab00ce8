"""What a leader proposes, and what makes a proposal acceptable: pure functions of what has been announced and voted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import blake3
import msgspec
from thinwire.collectives.topology import clusters, placement, relay_plan
from thinwire.collectives.topology.bandwidth_shares import allot
from thinwire.collectives.topology.placement import Order
from thinwire.swarm.messages.registry import (
    LIFE,
    MAX_GROUP,
    Ballot,
    Contribution,
    Digest,
    Exclusion,
    Open,
    PeerId,
    Promise,
    Ready,
)

MISSING, WITHHELD = "chunk missing", "withheld"
"""Reasons of a Blame: a contributor's data does not come; or has not come in so many rounds that it is put out at once."""

FAULTS = (MISSING, "not announced", "hash", "length", "not finite", "encoding", "norm", "withdrawn", WITHHELD)
"""Reasons of a Blame against a contributor."""

GONE = "gone"


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """What a round of one fragment is about; equal on all peers that can agree.

    members: participants of the last committed round, in leader order (rendezvous ranking), the base of the quorum.
    base: state digest after that round. plan: digest of layout, codec, grid and aggregation.
    fraction: share of the members that must be exceeded. min_peers: fewest contributors.
    max_weight: most tokens that one contribution may claim. room: most contributors.
    grace: seconds to wait for stragglers once a quorum is ready; `graces`: for these members another number of seconds;
    `limit`, where that is more, for a peer that does not lead.
    patience: seconds without progress before somebody acts; derived by the caller from what rounds have taken so far.
    weights: who may contribute, each with this weight whatever it announces; None: everybody, with what is announced.
    spare: who contributes only where too few others do.
    chunks: of the fragment, where their owners may be chosen by bandwidth; 0: all own equally many.
    hands: whether a ballot may say how fast uplinks are, so that payloads are handed on.
    sited: whether a ballot says which of its peers share a site.
    buffered: members announce that they are here before they have something to contribute, so a round waits for
    contributions: for one at least, or `min_peers`, and then `grace` for those of the others; for who is not here, a patience.
    lives: of the members by which they are known; others may have any.
    ring: the order in which a leader lets data go round those that own chunks (empty: no ring, this time); None: there are
    no rings.
    """

    round: int
    fragment: int
    members: tuple[PeerId, ...]
    base: Digest
    plan: Digest
    fraction: float = 0.5
    min_peers: int = 1
    max_weight: int = 2**53 - 1
    room: int = MAX_GROUP
    grace: float = 10.0
    limit: float = 0.0
    graces: Mapping[PeerId, float] = field(default_factory=dict)
    patience: float = 2.0
    weights: Mapping[PeerId, int] | None = None
    spare: frozenset[PeerId] = frozenset()
    chunks: int = 0
    hands: bool = False
    sited: bool = False
    buffered: bool = False
    ring: Order | None = None
    lives: Mapping[PeerId, bytes] = field(default_factory=dict)

    def other_life(self, peer: PeerId, life: bytes) -> bool:
        """Return True if a member of this round has lost its run folder since it became one: `life` is not its life."""
        return self.lives.get(peer, life) != life


def lives_of(members: Sequence[PeerId], lives: bytes) -> dict[PeerId, bytes]:
    """Return the known lives of members. `lives`: LIFE bytes each, in their order; zeros mean unknown."""
    pairs = zip(members, range(0, len(lives), LIFE), strict=False)
    return {peer: life for peer, at in pairs if any(life := lives[at : at + LIFE])}


def lives_agree(opened: Open, me: PeerId, life: bytes, ready: Mapping[PeerId, Ready]) -> bool:
    """Return False if an Open gives us another life than ours, or contradicts announcements that we have.

    A leader could otherwise take the votes of the next round from everybody else. If the Open adopts results, the lives
    were decided with them, and other peers may have lost their folders since.
    """
    found = lives_of(opened.members, opened.lives)
    if life and me in opened.members and found.get(me) != life:
        return False
    known = {} if opened.adopted is not None else {peer: ready[peer].life for peer in opened.members if peer in ready}
    return all(found.get(peer) == announced for peer, announced in known.items() if any(announced))


def name_of(opened: Open) -> Digest:
    """blake3 of an Open: what a vote is for."""
    return blake3.blake3(msgspec.msgpack.encode(opened)).digest()


def gone_in(opened: Open) -> set[PeerId]:
    """Peers that the leader counts as gone."""
    return {entry.peer for entry in opened.excluded if entry.reason == GONE}


def sound(opened: Open, terms: RoundTerms) -> bool:
    """Structure of an Open: of this round, sorted, no duplicates, alive within the group, an owner left, every chunk owned
    once, weights bounded or as they are settled, a ring of all owners or none.

    Who contributes is a member. A ballot that is no free choice names who holds its results, and the members settled with them.
    """
    peers = [contribution.peer for contribution in opened.contributors]
    return (
        (opened.round, opened.fragment) == (terms.round, terms.fragment)
        and set(opened.idle) < set(opened.alive)
        and terms.min_peers <= len(opened.contributors) <= terms.room
        and all(list(ids) == sorted(set(ids)) for ids in (opened.group, opened.alive, opened.idle, opened.kept, peers))
        and set(opened.alive) <= set(opened.group)
        and set(peers) <= set(opened.members)
        and (opened.adopted is None) == (not opened.sources) == (not opened.kept)
        and all(0 < contribution.weight <= terms.max_weight for contribution in opened.contributors)
        and (not opened.shares or _whole(opened, terms))
        and clusters.sound(opened.sites, len(opened.group) if terms.sited else 0)
        and len(opened.lives) in (0, LIFE * len(opened.members))
        and (terms.weights is None or all(terms.weights.get(c.peer) == c.weight for c in opened.contributors))
        and (not opened.order or _round(opened, terms))
    )


def _whole(opened: Open, terms: RoundTerms) -> bool:
    """Whether the shares of an Open deal out the fragment, which is one whose owners may be chosen; or are of uplinks."""
    if terms.hands:
        return len(opened.shares) == len(opened.group) and 0 not in opened.shares
    return 0 < terms.chunks == sum(opened.shares) and len(opened.shares) == len(opened.group)


def _round(opened: Open, terms: RoundTerms) -> bool:
    """Whether a ring may be, and has each of those that own chunks once."""
    places = [place for place, peer in enumerate(opened.alive) if peer not in opened.idle]
    return terms.ring is not None and opened.adopted is None and sorted(opened.order) == places


def fit(
    terms: RoundTerms, present: Collection[PeerId], ready: Mapping[PeerId, Ready]
) -> tuple[tuple[PeerId, ...], dict[PeerId, str]]:
    """Which of those `present` can take part (sorted), and why the others cannot."""
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
        # Members first: they had a say before, and their votes are what a quorum is counted by.
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
    idle: Collection[PeerId],
    before: Open | None,
    straight: bool = False,
) -> Open | None:
    """A free choice: everyone able contributes what it announced, except the rejected. None when that is nobody, or too few.

    The group of an earlier ballot is kept, so that only chunks of those who left, or are idle, change their owner. `straight`:
    without a ring, whatever the terms say.
    """
    group, shares = (before.group, before.shares) if before is not None else (able, None)
    alive = tuple(peer for peer in able if peer in group)
    if not alive:
        group, alive, shares = able, able, None
    willing = [peer for peer in alive if _weight(ready[peer], peer, terms) > 0 and peer not in rejected]
    first = [peer for peer in willing if peer not in terms.spare]
    if len(first) >= terms.min_peers:
        excluded = {**excluded, **{peer: "spare" for peer in willing if peer in terms.spare}}
        willing = first
    if len(willing) > terms.room:
        # Members come in another order in every round, so that it is not always the same ones who are left out.
        order = {peer: place for place, peer in enumerate(terms.members)}
        willing = sorted(sorted(willing, key=lambda peer: order.get(peer, len(order)))[: terms.room])
    contributors = tuple(Contribution(peer, ready[peer].attempt, _weight(ready[peer], peer, terms)) for peer in willing)
    if not alive or len(contributors) < terms.min_peers:
        return None
    out = _listed({**rejected, **excluded})
    resting = _resting(idle, alive)
    ring = () if straight or terms.ring is None else placement.order(terms.ring, alive, resting, ready)
    if ring:
        shares = ()  # each of a ring has as much to send, whatever it owns
    elif shares is None:
        links = placement.loads(group, willing, resting, ready)
        shares = relay_plan.shares(links) if terms.hands else allot(terms.chunks, links, terms.fragment)
    sites: tuple[int, ...] = ()
    if terms.sited:  # results depend on it, so a group that is kept keeps its own
        kept = before is not None and group is before.group
        sites = before.sites if before is not None and kept else placement.sites(group, ready)
    return Open(
        terms.round,
        terms.fragment,
        ballot,
        group,
        alive,
        contributors,
        out,
        None,
        (),
        resting,
        shares=shares,
        sites=sites,
        order=ring,
        lives=b"".join(ready[peer].life.ljust(LIFE, b"\0") for peer in alive)
        if any(ready[p].life for p in alive)
        else b"",
    )


def _weight(ready: Ready, peer: PeerId, terms: RoundTerms) -> int:
    """What an announcement counts: 0 when it is none, or of one who may not contribute."""
    if terms.weights is not None:
        return terms.weights.get(peer, 0) if ready.weight else 0
    return min(ready.weight, terms.max_weight)


@dataclass(frozen=True, slots=True)
class AcceptedValue:
    """What some have voted for: the results called `digest` of the contributors of `opened`, the highest such ballot, and its
    members.

    `voters`: who says so, sorted; they hold every one of these results.
    """

    opened: Open
    digest: Digest
    voters: tuple[PeerId, ...]


def choices(promises: Mapping[PeerId, Promise]) -> list[AcceptedValue]:
    """What has been voted for, by these promises: the highest ballot first, of one ballot what most have voted for.

    Of one ballot there are two only when somebody lies: an owner that told two peers different results, or a voter.
    """
    found: dict[tuple[tuple[Contribution, ...], tuple[PeerId, ...], bytes, Digest], list[tuple[PeerId, Open]]] = {}
    for peer, promise in promises.items():
        if promise.voted is not None and promise.digest is not None:
            value = (promise.voted.contributors, promise.voted.members, promise.voted.lives, promise.digest)
            found.setdefault(value, []).append((peer, promise.voted))
    listed = [
        AcceptedValue(
            max((opened for _, opened in votes), key=lambda o: o.ballot), digest, tuple(sorted(p for p, _ in votes))
        )
        for (_, _, _, digest), votes in found.items()
    ]
    return sorted(listed, key=lambda c: (c.opened.ballot, len(c.voters), c.digest), reverse=True)


def adopt(
    ballot: Ballot,
    terms: RoundTerms,
    able: tuple[PeerId, ...],
    choice: AcceptedValue,
    excluded: Mapping[PeerId, str],
    *,
    idle: Collection[PeerId],
) -> Open:
    """No free choice: the contributors and the results that were voted for, to be fetched from those who voted for them.

    The members were settled with them, whoever takes part now.
    """
    old = choice.opened
    alive = able or choice.voters
    group = tuple(sorted({*alive, *old.group[: MAX_GROUP - len(alive)]}))
    owned = dict(zip(old.group, old.shares, strict=False))
    # Of a gather shares say how fast uplinks are, and nobody has none: who is new is not known.
    kept = owned and (owned.keys() == set(group) if terms.hands else owned.keys() <= set(group))
    out = _listed({entry.peer: entry.reason for entry in old.excluded} | dict(excluded))
    return Open(
        terms.round,
        terms.fragment,
        ballot,
        group,
        alive,
        old.contributors,
        out,
        choice.digest,
        choice.voters,
        _resting(idle, alive),
        old.members,
        shares=tuple(owned.get(peer, 0) for peer in group) if kept else (),
        sites=clusters.kept(old.group, old.sites, group) if terms.sited else (),
        lives=old.lives,
    )


def _resting(idle: Collection[PeerId], alive: Collection[PeerId]) -> tuple[PeerId, ...]:
    """Who owns no chunks; when that would be everyone, nobody is spared."""
    return tuple(sorted(set(idle) & set(alive))) if set(alive) - set(idle) else ()


def _listed(reasons: Mapping[PeerId, str]) -> tuple[Exclusion, ...]:
    named = sorted(reasons.items(), key=lambda item: (item[1] != GONE, item[0]))[:MAX_GROUP]
    return tuple(Exclusion(peer, reason) for peer, reason in sorted(named))
