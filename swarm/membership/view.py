"""Views of the swarm: immutable, numbered, equal on peers with equal knowledge."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from thinwire.swarm.messages.registry import PeerId

RECENT = 64
"""Changes of a view that are remembered."""


@dataclass(frozen=True, slots=True)
class View:
    """Peers that are alive or suspected (sorted, this peer included).

    `number` counts the views of this peer only: equal sets do not have equal numbers on different peers.
    """

    number: int
    peers: tuple[PeerId, ...]

    def __contains__(self, peer: object) -> bool:
        return peer in self.peers

    def __len__(self) -> int:
        return len(self.peers)


class LivePeers:
    """Other peers that are alive or suspected, and the view that they form with this peer."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._others: list[PeerId] = []
        self._everyone = [me]
        self._changes = 0
        self._recent: deque[PeerId] = deque(maxlen=RECENT)
        """Peers of the last changes, the newest first."""
        self.current: View | None = None
        """The view that they form, if one was made since the last change."""

    def add(self, peer: PeerId) -> None:
        """Add a peer to the view."""
        insort(self._others, peer)
        insort(self._everyone, peer)
        self._note_change(peer)

    def remove(self, peer: PeerId) -> None:
        """Remove a peer from the view."""
        del self._others[bisect_left(self._others, peer)]
        del self._everyone[bisect_left(self._everyone, peer)]
        self._note_change(peer)

    def _note_change(self, peer: PeerId) -> None:
        self._changes += 1
        self._recent.appendleft(peer)
        self.current = None

    def changed_since(self, number: int) -> list[PeerId] | None:
        """Return the peers that joined or departed since the view of this number; None if too many did."""
        count = self._changes - number
        return list(islice(self._recent, count)) if count <= len(self._recent) else None

    def others(self) -> list[PeerId]:
        """Return the other peers in the view, sorted."""
        return list(self._others)

    @property
    def sorted(self) -> Sequence[PeerId]:
        """The other peers in the view, sorted, without a copy: it changes with the view."""
        return self._others

    def has(self, peer: PeerId) -> bool:
        """Return True if another peer is in the view."""
        place = bisect_left(self._others, peer)
        return place < len(self._others) and self._others[place] == peer

    def sample(self, rng: random.Random, most: int, *, but: PeerId) -> list[PeerId]:
        """Return at most `most` other peers in the view, drawn at random, without the peer `but`."""
        others = self._others
        place = bisect_left(others, but)
        count = len(others) - (place < len(others) and others[place] == but)
        drawn = rng.sample(range(count), min(most, count))
        return [others[one if one < place or count == len(others) else one + 1] for one in drawn]

    @property
    def everyone(self) -> Sequence[PeerId]:
        """All peers in the view, this one included, sorted, without a copy: it changes with the view."""
        return self._everyone

    @property
    def number(self) -> int:
        """Number of the present view."""
        return self._changes

    @property
    def size(self) -> int:
        """Number of peers in the view, this one included."""
        return len(self._everyone)

    @property
    def alone(self) -> bool:
        """True if no other peer is in the view."""
        return not self._others

    def view(self) -> View:
        """Return the present view; it has another number after each change."""
        if self.current is None:
            # Built on demand, because many joins may happen between two calls.
            self.current = View(self._changes, tuple(self._everyone))
        return self.current
