"""Reachability of this peer: other peers report the address at which they see it, and try it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable

from thinwire.collectives.transport.addresses.observed_addresses import Reach, Sighting, judge
from thinwire.collectives.transport.interface import Contact, Transport
from thinwire.node.runtime.event_log import Emit
from thinwire.swarm.identity.address import scope_of, source_of
from thinwire.swarm.identity.peer_record import MAX_ADDRESSES, PeerRecord
from thinwire.swarm.membership.swim import Roster

MOST = 4
"""Peers that are asked at one time."""

CHECK_SECONDS = 2.0
"""Seconds between looks at the roster: new subnets are asked at once, because one claim is weak."""

RETRY_SECONDS = 15.0
"""Seconds after which peers are asked again if none has answered yet."""

AGAIN_SECONDS = 300.0
"""Seconds after which the same peers are asked again: translators forget, and providers renumber."""


def chosen(records: Iterable[PeerRecord], most: int = MOST) -> list[Contact]:
    """Return the contacts of peers to ask, each in another subnet, at their first addresses."""
    found: dict[str, Contact] = {}
    for record in records:
        if record.addresses and (source := source_of(record.addresses[0])) not in found:
            found[source] = Contact(record.addresses[0], record.transport_key)
            if len(found) == most:
                break
    return list(found.values())


def sources_of(records: Iterable[PeerRecord]) -> set[str]:
    """Return the subnets of these peers, by their first addresses."""
    return {source_of(record.addresses[0]) for record in records if record.addresses}


class Reachability:
    """Asks peers for sightings and announces the resulting addresses. `reach` is the last judgement."""

    def __init__(self, transport: Transport, roster: Roster, *, now: Callable[[], float], emit: Emit) -> None:
        self.reach = Reach()
        self._transport, self._roster, self._now, self._emit = transport, roster, now, emit
        self._own = transport.addresses()
        self._mapped: tuple[str, ...] = ()

    @property
    def own(self) -> tuple[str, ...]:
        """Addresses of this machine, as announced."""
        return self._own

    async def watch(self) -> None:
        """Ask whenever peers of other subnets appear, when our own addresses change, and from time to time.

        Without a network nothing is asked or announced.
        """
        asked: frozenset[Contact] = frozenset()
        asked_sources: set[str] = set()
        at, seen, turn, last = 0.0, -1, 0, self._own
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            before, last = last, self._transport.addresses()
            own = last if last == before else self._own  # An interface may go and return at once.
            if all(scope_of(address) == "machine" for address in own):
                continue
            if own != self._own:
                # All that others have seen concerns the old addresses.
                self._own, self.reach, at = own, Reach(), -math.inf
                self._announce()
            peers, due = self._roster.peers, self._now() >= at
            changed, seen = peers.live.changed_since(seen), peers.view.number
            if not due and changed is not None and sources_of(peers.records(changed)) <= asked_sources:
                continue  # No peer of another subnet has joined.
            others = peers.others
            # Each time other peers are asked first, so that a few peers cannot decide for ever.
            first = turn * MOST % max(1, len(others))
            contacts = chosen(peers.records([*others[first:], *others[:first]]))
            if contacts and (due or not asked.issuperset(contacts)):
                asked, at, turn = frozenset(contacts), self._now() + AGAIN_SECONDS, turn + due
                asked_sources = {source_of(contact.address) for contact in contacts}
                answers = await self._transport.observe(contacts)
                sightings = [answer for answer in answers if isinstance(answer, Sighting)]
                self.judge(sightings)
                if not sightings and self.reach == Reach():
                    at = self._now() + RETRY_SECONDS

    def map(self, address: str) -> None:
        """Announce an address at which the router forwards to our gate; "": there is none any more."""
        self._mapped = (address,) if address else ()
        self._announce()

    def _announce(self) -> None:
        own = tuple(dict.fromkeys((*self._mapped, *self._own)))
        addresses = self.reach.addresses(own)[:MAX_ADDRESSES]
        if addresses != self._roster.record.addresses and not self._roster.left:
            self._roster.update(addresses, self._now())

    def judge(self, sightings: list[Sighting]) -> None:
        """Announce what follows from these sightings; without any, the last judgement stays."""
        if not sightings or (reach := judge(sightings)) == self.reach:
            return
        self.reach = reach
        self._emit("reach", {"nat": reach.nat, "address": reach.address, "reached": reach.reached})
        self._announce()
