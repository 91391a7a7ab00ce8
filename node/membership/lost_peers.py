"""Search for peers of the run whose addresses this peer has, but which its roster does not contain."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from thinwire.collectives.transport.interface import Contact
from thinwire.node.membership.join import DIALS
from thinwire.node.membership.presence import Presence
from thinwire.node.runtime.environment import Environment
from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.membership.swim import Roster
from thinwire.swarm.messages.registry import PeerId


class LostPeers:
    """Peers that `seek` dials until the roster knows them; from then on the roster reconnects to them.

    Without this, two parts of a swarm would never find each other again if the peers that know both have restarted or gone.
    `presence`: returns ours, once it is open. `dial`: knocks at the gate of one peer. `own_key`: our transport key.
    """

    def __init__(
        self,
        presence: Callable[[], Presence],
        preset: Preset,
        environment: Environment,
        dial: Callable[[Contact], Awaitable[None]],
        *,
        own_key: bytes,
    ) -> None:
        self._presence, self._preset, self._environment = presence, preset, environment
        self._dial, self._own_key = dial, own_key
        self._sought: list[Contact] = []
        self._claims = frozenset[Contact]()

    @property
    def absent(self) -> list[Contact]:
        """Peers that cannot be reached: the dead ones, and those that we seek.

        Without those that only our Welcome named: it is not signed, and peers must not pass on such a claim for ever.
        """
        roster = self._presence().roster
        if not self._sought and not roster.peers.any_absent:
            return []  # The usual case, and fast: each newcomer that knocks needs this list.
        dead = roster.peers.dead
        sought = self._unknown([contact for contact in self._sought if contact not in self._claims])
        found = {contact.transport_key: contact for contact in (*sought, *contacts_of(roster, dead))}
        return [found[key] for key in sorted(found)]

    def seek(self, known: Sequence[Contact], claimed: Sequence[Contact]) -> None:
        """Dial these peers, but not ourselves. `claimed`: those that our Welcome named."""
        self._claims = frozenset(claimed).difference(known)
        found = dict.fromkeys(one for one in (*known, *claimed) if one.transport_key != self._own_key)
        self._sought = list(found)
        if self._sought:
            self._presence().attend(self._search())

    async def _search(self) -> None:
        """Dial all at first, then DIALS in each reconnect period, at most for a day.

        All at first, because the peer that has admitted us may have been searching, too: if neither found the others, the two
        would found a lineage.
        """
        missing, preset = self._sought, self._preset
        until, pause = self._environment.now() + preset.tombstone, preset.probe_period
        while missing and self._environment.now() < until:
            await asyncio.sleep(pause)
            missing = self._unknown(self._sought)
            count = DIALS if pause == preset.reconnect_period else len(missing)
            missing, pause = missing[count:] + missing[:count], preset.reconnect_period
            self._sought = missing
            await asyncio.gather(*map(self._dial, missing[-count:]))
        self._sought = []

    def _unknown(self, sought: list[Contact]) -> list[Contact]:
        """Return the sought peers that the roster does not contain."""
        unknown = {contact.transport_key for contact in sought}
        for record in self._presence().roster.peers.records() if unknown else ():
            unknown.discard(record.transport_key)
            if not unknown:
                break  # Usually after a few records: a newcomer meets the peers of its invite first.
        return [contact for contact in sought if contact.transport_key in unknown]


def contacts_of(roster: Roster, peers: Iterable[PeerId]) -> Iterator[Contact]:
    """Yield the contacts of those of `peers` that can be dialled, except this peer."""
    for peer in peers:
        record = roster.peers.record_of(peer)
        if record is not None and peer != roster.record.peer_id and record.addresses:
            yield Contact(record.addresses[0], record.transport_key)
