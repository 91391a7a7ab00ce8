"""Choice of the gossip items of a message: what its receiver must know first, then news."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.swarm.membership.broadcast_queue import Broadcast
from thinwire.swarm.membership.member_table import Members
from thinwire.swarm.membership.presets import Preset
from thinwire.swarm.messages.registry import PeerId

PIGGYBACK_ITEMS, BATCH_ITEMS = 8, 32
"""Maximum number of items in a probe or its answer, and in a Gossip message, see messages.membership."""


class ItemChoice:
    """Chooser of items from the table of members and from `news`, the queue of items to spread."""

    def __init__(self, members: Members, news: Broadcast, preset: Preset) -> None:
        self._members, self._news, self._preset = members, news, preset
        self._spread_in, self._times = 0, 0
        """Number of peers, and how often each item is sent among so many."""

    @property
    def unspread(self) -> int:
        """Number of items in the queue."""
        return len(self._news)

    def has_news(self, at: float) -> bool:
        """Return True if another peer may have to be told something, at the time `at` or later."""
        members = self._members
        return bool(self._news or members.behind or members.suspicious or members.told_until > at)

    def piggyback(self, to: PeerId) -> tuple[bytes, ...]:
        """Return the items for a probe or its answer."""
        return self._choose(to, self._preset.piggyback, PIGGYBACK_ITEMS)

    def batch(self, to: PeerId) -> tuple[bytes, ...]:
        """Return the items for a Gossip message; none if the known peer `to` needs none."""
        if self._news or self._members.table[to].note or to in self._members.behind:
            return self._choose(to, self._preset.batch, BATCH_ITEMS)
        return ()

    def _choose(self, to: PeerId, rest: int, most: int) -> tuple[bytes, ...]:
        """Return at most `most` items of at most `rest` bytes in total, to be sent to a peer.

        A peer under suspicion gets an accusation first, so that it can refute it.
        """
        first: list[bytes] = []
        member, behind = self._members.table.get(to), self._members.behind
        if member is not None and member.note and member.state != "banned":
            note = self._members.note_for(member)
            first += [note] if member.live else [note, member.record.item]
        if to in behind:
            del behind[to]
            first.insert(0, self._members.own.record.item)
        if first:
            while sum(map(len, first)) > rest:
                first.pop()
            rest -= sum(map(len, first))
        if (size := self._members.live.size) != self._spread_in:
            self._spread_in, self._times = size, self._preset.copies(size)
        return (*first, *self._news.take(rest, most - len(first), self._times))

    def table(self, now: float) -> Iterator[bytes]:
        """Yield the items of the whole table, for a PushPull."""
        members = self._members
        yield members.own.record.item
        recent = 2 * self._preset.push_pull(members.live.size) + self._preset.gossip_to_dead
        for member in members.table.values():
            if member.live:
                yield member.record.item
            if member.note and (member.live or member.state == "banned" or now - member.since < recent):
                yield member.note
        yield from members.excluded.revoked.values()
        yield from members.excluded.notes(members.table)
