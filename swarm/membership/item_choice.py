"""Choice of the gossip items of a message: what its receiver must know first, then news."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.swarm.membership.broadcast_queue import BroadcastQueue
from thinwire.swarm.membership.gossip_items import is_proof
from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.membership.transitions import Transitions
from thinwire.swarm.messages.registry import PeerId

PIGGYBACK_ITEMS, BATCH_ITEMS = 8, 32
"""Maximum number of items in a probe or its answer, and in a Gossip message, see messages.membership."""

PROOFS = 64
"""Most proofs in a table, the last ones; a few more if several are equally old."""


class ItemChoice:
    """Chooser of items from the table of peers and from the `queue` of items to spread."""

    def __init__(self, transitions: Transitions, queue: BroadcastQueue, preset: Preset) -> None:
        self._transitions, self._table = transitions, transitions.table
        self._queue, self._preset = queue, preset
        self._copies_for, self._copies = 0, 0
        """Size of a view, and how often each item is sent in a view of that size."""

    @property
    def queued(self) -> int:
        """Number of items in the queue."""
        return len(self._queue)

    def any_due(self, at: float) -> bool:
        """Return True if there may be an item to send to another peer at the time `at` or later."""
        transitions = self._transitions
        waiting = self._queue or transitions.stale_receivers or transitions.any_suspected
        return bool(waiting or transitions.inform_dead_until > at)

    def piggyback(self, to: PeerId) -> tuple[bytes, ...]:
        """Return the items for a probe or its answer."""
        return self._choose(to, self._preset.piggyback, PIGGYBACK_ITEMS)

    def batch(self, to: PeerId) -> tuple[bytes, ...]:
        """Return the items for a Gossip message; none if the known peer `to` needs none."""
        if self._queue or self._table.entries[to].state_item or to in self._transitions.stale_receivers:
            return self._choose(to, self._preset.batch, BATCH_ITEMS)
        return ()

    def _choose(self, to: PeerId, rest: int, most: int) -> tuple[bytes, ...]:
        """Return at most `most` items of at most `rest` bytes in total, to be sent to a peer.

        A peer under suspicion gets an accusation first, so that it can refute it.
        """
        first: list[bytes] = []
        entry, stale = self._table.entries.get(to), self._transitions.stale_receivers
        if entry is not None and entry.state_item and entry.state != "banned":
            item = self._transitions.state_item_for(entry)
            first += [item] if entry.live else [item, entry.record.item]
        if to in stale:
            del stale[to]
            first.insert(0, self._table.own.record.item)
        if first:
            while sum(map(len, first)) > rest:
                first.pop()
            rest -= sum(map(len, first))
        if (size := self._table.live.size) != self._copies_for:
            self._copies_for, self._copies = size, self._preset.copies(size)
        return (*first, *self._queue.take(rest, most - len(first), self._copies))

    def table(self, now: float) -> Iterator[bytes]:
        """Yield the items of the whole table, for a PushPull."""
        table, exclusions = self._table, self._transitions.exclusions
        yield table.own.record.item
        yield from exclusions.revoked.values()
        recent = 2 * self._preset.push_pull(table.live.size) + self._preset.gossip_to_dead
        # Keys are free, so proofs against them may be many.
        proofs = sorted(entry.since for _, entry in table.absent_entries() if is_proof(entry.state_item))
        since = proofs[-PROOFS:][0] if proofs else 0.0
        for entry in table.entries.values():
            if entry.live:
                yield entry.record.item
            if not entry.state_item:
                continue
            if is_proof(entry.state_item):
                counts = entry.since >= since
            else:
                counts = entry.live or entry.state == "banned" or now - entry.since < recent
            if counts:
                yield entry.state_item
        yield from exclusions.gossip_items_on_unknown(table.entries)
