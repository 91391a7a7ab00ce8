"""Clusters of peers that share a fast network.

Pure functions, from announcements to the numbers in a proposal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from thinwire.swarm.messages.registry import PeerId

NEAR = 5e-3
"""Longest round-trip time in seconds of peers that are near: a building, or a data centre."""


def clusters(peers: Sequence[PeerId], sites: Mapping[PeerId, Hashable]) -> tuple[int, ...]:
    """Return a number for each of `peers`: equal for equal sites, unique for a peer without a site.

    Numbers count from 0 by first occurrence. Which contributors are together depends only on their announcements, not
    on other peers, so that equal contributions give equal results in every ballot.
    """
    return _numbered([sites.get(peer) or ("alone", peer) for peer in peers])


def near(peers: Sequence[PeerId], rtt: Callable[[PeerId, PeerId], float]) -> dict[PeerId, PeerId]:
    """Group peers that are near each other; each is mapped to the smallest id of its group.

    rtt: seconds, 0.0 if unknown. Starting with the shortest links, two groups are merged if all peers of one are near
    all peers of the other (complete linkage), so that a row of near neighbours does not join two distant peers. Empty
    if all peers are near, since then there is no wide area between them.
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
    """Return the clusters of `peers` if those of an earlier ballot stay together.

    A peer that was not in the earlier ballot is alone.
    """
    known = dict(zip(before, numbers, strict=True))
    return clusters(peers, {peer: ("kept", known[peer]) for peer in peers if peer in known})


def sound(numbers: Sequence[int], count: int) -> bool:
    """Return True if `numbers` is a possible result of `clusters` for this number of peers."""
    return len(numbers) == count and _numbered(numbers) == tuple(numbers)


def _numbered(names: Sequence[Hashable]) -> tuple[int, ...]:
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)
