"""Which peers share a fast network: pure functions, from what peers announce to the numbers in an Open."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from thinwire.swarm.protocol import PeerId


def clusters(peers: Sequence[PeerId], sites: Mapping[PeerId, Hashable]) -> tuple[int, ...]:
    """A number for each of `peers`: the same for those whose site is the same, one of its own for who has none.

    Numbers count from 0 in the order in which they first come. Which contributors are together follows from what they
    announced, never from who else is there, so that the results of the same contributions are the same in every ballot.
    """
    return _numbered([sites.get(peer) or ("alone", peer) for peer in peers])


def kept(before: Sequence[PeerId], numbers: Sequence[int], peers: Sequence[PeerId]) -> tuple[int, ...]:
    """The clusters of `peers` when those of an earlier ballot stay together; who was not in it is alone."""
    known = dict(zip(before, numbers, strict=True))
    return clusters(peers, {peer: ("kept", known[peer]) for peer in peers if peer in known})


def sound(numbers: Sequence[int], count: int) -> bool:
    """Whether these are what `clusters` gives for so many peers."""
    return len(numbers) == count and _numbered(numbers) == tuple(numbers)


def _numbered(names: Sequence[Hashable]) -> tuple[int, ...]:
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)
