"""Who hands on whose payload in a gather, so that a weak uplink carries its own once and not once per receiver.

To each of the N - 1 others a contributor sends every piece itself, or it sends it to one helper, which sends it to the N - 2
that are left as soon as the piece is there. Either way all uplinks together carry as much; what is gained is that those with
much to spare carry it. Two hops are enough for the least time that uplinks allow (Li, Chou and Zhang, "Mutualcast", SIGCOMM
Asia Workshop 2005): the longest of any payload over its own uplink, and of all bytes over all uplinks.

The leader writes how fast uplinks are into the `Open` (`shares`), where handing on is worth it; who hands on what follows
from that alone, so everybody reckons the same. Who is idle hands nothing on. What peers say of their uplinks cannot be
checked: nobody hands on more than MOST payloads, and what does not come is asked of who has it, see `gather`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from statistics import median

from thinwire.collectives.allotment import MOST, Load, filled
from thinwire.collectives.contributions import Key
from thinwire.swarm.protocol import Open, PeerId

PARTS = 16
"""Parts that a payload is dealt out in."""

GAIN = 1.3
"""Sending directly has to take so many times longer, or it stays: measured links are never quite alike, and a hop costs."""

MEDIAN, FASTEST = 256, 2**16 - 1
"""What an Open says of an uplink as fast as the median, and of the fastest there can be."""

PLANS = 8
"""Ballots of a round whose pieces are handed on when they come late."""

Quota = tuple[tuple[PeerId, int], ...]
"""Helpers of one contributor, and of how many PARTS."""


def deal(uplinks: Sequence[int], gives: Sequence[bool], helps: Sequence[bool]) -> list[dict[int, int]]:
    """For each peer, how many of its PARTS which other one hands on; the rest it sends to all itself.

    Part by part, from who would need longest to who would be done first with it. `uplinks`: all above 0; `gives`: who
    contributes, payloads of one length; `helps`: who may hand on.
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
    """Time of each peer's uplink, in payloads per byte/s."""
    peers = len(uplinks)
    parts = [PARTS * (peers - 1) * one for one in gives]
    for source, found in enumerate(given):
        for helper, count in found.items():
            parts[source] -= count * (peers - 2)
            parts[helper] += count * (peers - 2)
    return [part / PARTS / uplink for part, uplink in zip(parts, uplinks, strict=True)]


def shares(links: Sequence[Load]) -> tuple[int, ...]:
    """What an Open says of uplinks: parts of MEDIAN; empty where nothing is known, or sending directly is about as fast."""
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


def quotas(opened: Open) -> dict[PeerId, Quota]:
    """Who is helped in a ballot, and by whom."""
    if not opened.shares:
        return {}
    return _quotas(
        opened.group, opened.shares, opened.alive, opened.idle, tuple(entry.peer for entry in opened.contributors)
    )


@lru_cache(maxsize=256)
def turns(quota: Quota, count: int) -> tuple[PeerId | None, ...]:
    """Who hands on each of `count` pieces, by turns as often as the quota says; None: their contributor sends it to all."""
    ways: list[tuple[PeerId | None, int]] = [*quota, (None, PARTS - sum(part for _, part in quota))]
    had, found = [0] * len(ways), []
    for piece in range(count):
        due = max(range(len(ways)), key=lambda way: ways[way][1] * (piece + 1) - PARTS * had[way])
        had[due] += 1
        found.append(ways[due][0])
    return tuple(found)


class Handing:
    """One peer's part in handing on the pieces of one round."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.failed: set[PeerId] = set()
        """Who has not handed on what it should."""
        self._plans: list[Open] = []
        self._charged: dict[tuple[Key, int], set[PeerId]] = {}
        self._late: dict[int, PeerId | None] = {}
        self._wants: dict[PeerId, set[PeerId]] = {}
        self._via: dict[int, PeerId] = {}

    def open(self, opened: Open, *, changed: bool) -> None:
        """A ballot opens; `changed`: with other slots than the one before."""
        self._plans = [*self._plans[1 - PLANS :], opened]
        if changed:
            self._late.clear()

    def renew(self) -> None:
        """We contribute something else: nobody has any of it."""
        self._via.clear()

    def helper(self, source: PeerId, index: int, count: int) -> PeerId | None:
        """Who hands on one of the `count` pieces of a contributor in the ballot in progress, if anybody."""
        return next(iter(_ways(self._plans[-1], source, index, count)), None)

    # --- our own pieces

    def way(self, index: int, count: int, able: set[PeerId]) -> PeerId | None:
        """Who of those `able` hands on a piece of ours; None: nobody, we send it to all. Who has it already does it, else its
        helper, else who stands in for that one.
        """
        before, ways = self._via.pop(index, None), _ways(self._plans[-1], self.me, index, count)
        found = next((peer for peer in (before, *ways) if peer is not None and peer in able), None)
        if found is not None:
            self._via[index] = found
        return found

    def wanted(self, sender: PeerId, indices: Sequence[int]) -> None:
        """A peer asks us for pieces of ours that it should have had of others. One word against a helper is not enough."""
        for helper in {self._via[index] for index in indices if index in self._via} - {sender}:
            self._wants.setdefault(helper, set()).add(sender)
            if len(self._wants[helper]) > 1:
                self.failed.add(helper)

    # --- pieces of others

    def charge(self, key: Key, index: int, count: int) -> bool:
        """A contributor has sent us a piece: whether we are to hand it on."""
        if (key, index) not in self._charged and any(
            self.me in _ways(plan, key[0], index, count) for plan in self._plans
        ):
            self.take_on(key, index)
        return (key, index) in self._charged

    def take_on(self, key: Key, index: int) -> None:
        """Hand on a piece of a contributor."""
        self._charged.setdefault((key, index), {key[0], self.me})

    @property
    def charged(self) -> list[tuple[Key, int]]:
        """What we have been given to hand on."""
        return list(self._charged)

    def heirs(self, key: Key, index: int, alive: Sequence[PeerId]) -> list[PeerId]:
        """Who is now to get it: those `alive` to whom we have not sent it yet, beginning with another one each time."""
        had = self._charged[key, index]
        found = [peer for peer in alive if peer not in had]
        had.update(found)
        first = index % max(1, len(found))
        return found[first:] + found[:first]

    def lost(self, peer: PeerId) -> None:
        """What we sent to `peer` may not have arrived."""
        self._via = {index: helper for index, helper in self._via.items() if helper != peer}
        for (key, _), had in self._charged.items():
            if peer not in (key[0], self.me):
                had.discard(peer)

    def late(self, slot: int, helper: PeerId, *, idles: bool) -> bool:
        """A piece has not come that `helper` is to hand on: whether that is news. `idles`: though we have a link to it."""
        if slot in self._late:
            return False
        self._late[slot] = helper if idles else None
        return True

    def came(self, slot: int, sender: PeerId) -> bool:
        """A result is here; whether it was late, and somebody else than its helper had it."""
        helper = self._late.get(slot)
        if helper not in (None, sender):
            self.failed.add(helper)
        return slot in self._late and helper != sender


def stand_in(opened: Open, source: PeerId, helper: PeerId, index: int) -> PeerId | None:
    """Who gets a piece from its contributor and hands it on when its helper does not: of each piece another one."""
    others = [peer for peer in opened.alive if peer not in (source, helper)]
    able = [peer for peer in others if peer not in opened.idle] or others
    return able[index % len(able)] if able else None


def _ways(opened: Open, source: PeerId, index: int, count: int) -> tuple[PeerId, ...]:
    """Who hands on a piece: its helper and who stands in for that one, in a ballot that has one."""
    plan = quotas(opened)
    helper = turns(plan[source], count)[index] if source in plan and index < count else None
    if helper is None:
        return ()
    other = stand_in(opened, source, helper, index)
    return (helper,) if other is None else (helper, other)
