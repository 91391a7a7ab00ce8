"""Relays of an all-gather: a weak uplink carries its payload once instead of once per receiver.

A contributor sends each piece either directly to each of the N - 1 others, or to one helper, which forwards it to the
remaining N - 2 peers as soon as it arrives. The total load of all uplinks is equal in both cases; the gain is that
uplinks with spare capacity carry more of it. Two hops are sufficient for the shortest time that uplinks allow (Li, Chou
and Zhang, "Mutualcast", SIGCOMM Asia Workshop 2005): the maximum of the time of any payload over its own uplink, and of
all bytes over all uplinks.

The leader writes the speeds of uplinks into the `Proposal` (`shares`) if relaying pays; the relays follow from that alone,
so that all peers compute the same. Idle peers relay nothing. Announced uplink speeds cannot be checked: no peer relays
more than MOST payloads, and a piece that does not arrive is requested from peers that have it, see `allgather`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from statistics import median

from thinwire.collectives.topology.bandwidth_shares import MOST, PeerLoad, filled
from thinwire.swarm.messages.registry import ContributionKey, PeerId, Proposal

PARTS = 16
"""Number of parts into which a payload is divided for assignment."""

GAIN = 1.3
"""Pieces are sent directly unless that takes this factor longer.

Measured links never quite agree, and a hop costs time.
"""

MEDIAN, FASTEST = 256, 2**16 - 1
"""Values in a proposal for an uplink as fast as the median, and for the fastest possible one."""

PLANS = 8
"""Number of ballots of a round whose late pieces are still relayed."""

Quota = tuple[tuple[PeerId, int], ...]
"""Helpers of one contributor, with the number of PARTS of each."""


def deal(uplinks: Sequence[int], gives: Sequence[bool], helps: Sequence[bool]) -> list[dict[int, int]]:
    """Return for each peer the helpers that relay its PARTS, and how many each; it sends the rest itself.

    Parts are moved one by one, from the peer that would need the longest to the peer that would finish it first.
    uplinks: all > 0. gives: which peers contribute (payloads of equal length). helps: which peers may relay.
    """
    peers = len(uplinks)
    given: list[dict[int, int]] = [{} for _ in uplinks]
    work = [PARTS * (peers - 1) * one for one in gives]
    handed, relieved = [0] * peers, [0] * peers
    slowest = [(-work[at] / uplinks[at], at) for at in range(peers) if gives[at]]
    readiest = [((work[at] + peers - 2) / uplinks[at], at) for at in range(peers) if helps[at]]
    heapify(slowest)
    heapify(readiest)
    while peers > 2 and slowest and readiest:
        time, source = slowest[0]
        soonest, helper = readiest[0]
        if relieved[helper] or handed[helper] >= MOST * PARTS:
            heappop(readiest)
        elif handed[source] or relieved[source] == PARTS or soonest >= -time:
            break
        else:
            given[source][helper] = given[source].get(helper, 0) + 1
            relieved[source] += 1
            handed[helper] += 1
            work[source] -= peers - 2
            work[helper] += peers - 2
            heappop(slowest)
            heappop(readiest)
            heappush(slowest, (-work[source] / uplinks[source], source))
            heappush(readiest, ((work[helper] + peers - 2) / uplinks[helper], helper))
    return given


def seconds(uplinks: Sequence[float], gives: Sequence[bool], given: Sequence[dict[int, int]]) -> list[float]:
    """Return the time of each peer's uplink; 1 is the time of one payload on an uplink of speed 1."""
    peers = len(uplinks)
    parts = [PARTS * (peers - 1) * one for one in gives]
    for source, found in enumerate(given):
        for helper, count in found.items():
            parts[source] -= count * (peers - 2)
            parts[helper] += count * (peers - 2)
    return [part / PARTS / uplink for part, uplink in zip(parts, uplinks, strict=True)]


def shares(links: Sequence[PeerLoad]) -> tuple[int, ...]:
    """Return the uplink speeds for a proposal in units of 1/MEDIAN of the median.

    Empty if nothing is known, or if sending directly is about as fast.
    """
    known = filled(links)
    if len(known) < 3:
        return ()
    usual = median(link.up for link in known)
    found = tuple(min(FASTEST, max(1, round(MEDIAN * link.up / usual))) for link in known)
    gives, helps = [link.contributes for link in known], [link.owns for link in known]
    directly = max(seconds(found, gives, [{} for _ in known]))
    return () if directly < GAIN * max(seconds(found, gives, deal(found, gives, helps))) else found


@lru_cache(maxsize=64)
def _quotas(
    group: tuple[PeerId, ...],
    shares: tuple[int, ...],
    alive: tuple[PeerId, ...],
    idle: tuple[PeerId, ...],
    givers: tuple[PeerId, ...],
) -> dict[PeerId, Quota]:
    uplink = dict(zip(group, shares, strict=True))
    given = deal([uplink[peer] for peer in alive], [p in givers for p in alive], [p not in idle for p in alive])
    return {
        peer: tuple((alive[helper], count) for helper, count in sorted(found.items()))
        for peer, found in zip(alive, given, strict=True)
        if found
    }


def quotas(proposal: Proposal) -> dict[PeerId, Quota]:
    """Return the contributors that are helped in a ballot, with their helpers."""
    if not proposal.shares:
        return {}
    return _quotas(
        proposal.group,
        proposal.shares,
        proposal.alive,
        proposal.idle,
        tuple(entry.peer for entry in proposal.contributors),
    )


@lru_cache(maxsize=256)
def turns(quota: Quota, count: int) -> tuple[PeerId | None, ...]:
    """Return the helper of each of `count` pieces, in the proportions of the quota.

    None means that the contributor sends the piece to all peers itself.
    """
    counts: list[tuple[PeerId | None, int]] = [*quota, (None, PARTS - sum(part for _, part in quota))]
    had, found = [0] * len(counts), []
    for piece in range(count):
        due = max(range(len(counts)), key=lambda at: counts[at][1] * (piece + 1) - PARTS * had[at])
        had[due] += 1
        found.append(counts[due][0])
    return tuple(found)


class RelayPlan:
    """State of one peer that relays pieces in one round."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.failed: set[PeerId] = set()
        """Peers that have not relayed what they should."""
        self._plans: list[Proposal] = []
        """The last ballots, at most PLANS."""
        self._charged: dict[tuple[ContributionKey, int], set[PeerId]] = {}
        """Pieces that we relay, each with the peers that have it, or to which we have sent it."""
        self._late: dict[int, PeerId | None] = {}
        """Slots with late pieces, and the helper that is the cause; None: unknown."""
        self._wants: dict[PeerId, set[PeerId]] = {}
        """Peers that lack pieces of ours, by the helper that should have sent them."""
        self._via: dict[int, PeerId] = {}
        """Peer to which we sent each piece of ours, to be relayed."""

    def open(self, proposal: Proposal, *, changed: bool) -> None:
        """Open a ballot. changed: its slots differ from those of the ballot before."""
        self._plans = [*self._plans[1 - PLANS :], proposal]
        if changed:
            self._late.clear()

    def renew(self) -> None:
        """Forget which helpers have our pieces, because our contribution has changed."""
        self._via.clear()

    def helper(self, source: PeerId, index: int, count: int) -> PeerId | None:
        """Return the helper of one of the `count` pieces of a contributor in the current ballot, if any."""
        return next(iter(_relays(self._plans[-1], source, index, count)), None)

    # --- pieces of this peer

    def relay(self, index: int, count: int, able: set[PeerId]) -> PeerId | None:
        """Return the peer among those `able` that relays a piece of ours; None: we send it to all peers.

        In order of preference: the peer that already has the piece, its helper, the helper's stand-in.
        """
        before, relays = self._via.pop(index, None), _relays(self._plans[-1], self.me, index, count)
        found = next((peer for peer in (before, *relays) if peer is not None and peer in able), None)
        if found is not None:
            self._via[index] = found
        return found

    def note_request(self, sender: PeerId, indices: Sequence[int]) -> None:
        """Handle a request for pieces of ours that the sender should have received from helpers.

        A complaint by a single peer does not count against a helper.
        """
        for helper in {self._via[index] for index in indices if index in self._via} - {sender}:
            self._wants.setdefault(helper, set()).add(sender)
            if len(self._wants[helper]) > 1:
                self.failed.add(helper)

    # --- pieces of other peers

    def charge(self, key: ContributionKey, index: int, count: int) -> bool:
        """Return True if we have to relay a piece that a contributor has sent to us."""
        if (key, index) not in self._charged and any(
            self.me in _relays(plan, key[0], index, count) for plan in self._plans
        ):
            self.take_on(key, index)
        return (key, index) in self._charged

    def take_on(self, key: ContributionKey, index: int) -> None:
        """Start relaying a piece of a contributor."""
        self._charged.setdefault((key, index), {key[0], self.me})

    @property
    def charged(self) -> list[tuple[ContributionKey, int]]:
        """Pieces that we relay."""
        return list(self._charged)

    def receivers(self, key: ContributionKey, index: int, alive: Sequence[PeerId]) -> list[PeerId]:
        """Return the peers of `alive` to which the piece must still be sent, and mark it as sent to them.

        The first receiver is different for each piece.
        """
        had = self._charged[key, index]
        found = [peer for peer in alive if peer not in had]
        had.update(found)
        first = index % max(1, len(found))
        return found[first:] + found[:first]

    def on_link_down(self, peer: PeerId) -> None:
        """Note that what we sent to `peer` may not have arrived."""
        self._via = {index: helper for index, helper in self._via.items() if helper != peer}
        for (key, _), had in self._charged.items():
            if peer not in (key[0], self.me):
                had.discard(peer)

    def note_late(self, slot: int, helper: PeerId, *, linked: bool) -> bool:
        """Note that a piece that `helper` relays is late. Returns False if that was known.

        linked: we have a link to the helper, so that it is the cause.
        """
        if slot in self._late:
            return False
        self._late[slot] = helper if linked else None
        return True

    def note_arrival(self, slot: int, sender: PeerId) -> bool:
        """Note that a piece has arrived.

        Returns True if it was late and its sender is not its helper.
        """
        helper = self._late.get(slot)
        if helper not in (None, sender):
            self.failed.add(helper)
        return slot in self._late and helper != sender


def stand_in(proposal: Proposal, source: PeerId, helper: PeerId, index: int) -> PeerId | None:
    """Return the peer that relays a piece if its helper fails; a different one for each piece."""
    others = [peer for peer in proposal.alive if peer not in (source, helper)]
    able = [peer for peer in others if peer not in proposal.idle] or others
    return able[index % len(able)] if able else None


def _relays(proposal: Proposal, source: PeerId, index: int, count: int) -> tuple[PeerId, ...]:
    """Return the helper of a piece and the helper's stand-in; empty if the ballot has no helper for it."""
    plan = quotas(proposal)
    helper = turns(plan[source], count)[index] if source in plan and index < count else None
    if helper is None:
        return ()
    other = stand_in(proposal, source, helper, index)
    return (helper,) if other is None else (helper, other)
