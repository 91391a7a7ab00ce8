"""Which peers share a fast network: pure functions, from what peers announce to the numbers in an Open."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from thinwire.swarm.protocol import PeerId

NEAR = 5e-3
"""Seconds there and back within which two peers count as near: a building, or the machines of one data centre."""


def clusters(peers: Sequence[PeerId], sites: Mapping[PeerId, Hashable]) -> tuple[int, ...]:
    """A number for each of `peers`: the same for those whose site is the same, one of its own for who has none.

    Numbers count from 0 in the order in which they first come. Which contributors are together follows from what they
    announced, never from who else is there, so that the results of the same contributions are the same in every ballot.
    """
    return _numbered([sites.get(peer) or ("alone", peer) for peer in peers])


def near(peers: Sequence[PeerId], rtt: Callable[[PeerId, PeerId], float]) -> dict[PeerId, PeerId]:
    """Peers that are near to each other, by the smallest id among them; `rtt`: seconds, 0.0 where it is not known.

    The shortest links first, two groups become one where all of one are near all of the other (complete linkage): so a row of
    near neighbours does not join two that are far apart. Empty where all are near: then there is no wide area between them.
    """
    found = {(one, other): rtt(one, other) for at, one in enumerate(peers) for other in peers[:at]}
    known = {pair: seconds for pair, seconds in found.items() if 0.0 < seconds <= NEAR}
    known |= {(other, one): seconds for (one, other), seconds in known.items()}
    groups = {peer: {peer} for peer in peers}
    for one, other in sorted((pair for pair in known if pair[0] < pair[1]), key=lambda pair: (known[pair], pair)):
        ours, theirs = groups[one], groups[other]
        if ours is not theirs and all((a, b) in known for a in ours for b in theirs):
            ours |= theirs
            groups |= dict.fromkeys(theirs, ours)
    names = {peer: min(group) for peer, group in groups.items() if len(group) > 1}
    return names if len(names) < len(peers) or len(set(names.values())) > 1 else {}


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
