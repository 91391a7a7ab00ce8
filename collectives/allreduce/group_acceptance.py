"""Rules by which a peer accepts a proposed group, so that no single member decides about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set

from thinwire.swarm.messages.registry import MAX_GROUP, PeerId

Group = tuple[PeerId, ...]


def orderly(group: Group) -> bool:
    """Return True if a group is sorted and names no peer twice."""
    return all(one < two for one, two in zip(group, group[1:], strict=False))


def greater(one: Group, two: Group) -> bool:
    """Return True if a caller of group `two` changes to group `one`.

    Group `one` wins if it has more members, or as many and is later in order.
    """
    return (len(one), one) > (len(two), two)


def fits(group: Group, me: PeerId, callers: Set[PeerId], here: Set[PeerId], awaited: Set[PeerId]) -> bool:
    """Return True if we would name nearly the same group, so that one proposer suffices.

    `callers`: peers whose call is here, and us. `awaited`: peers that we would not begin without. The group must
    contain us and all awaited peers (unless it is full); all members must be present, and more than half must have
    called, so that it can finish without the others.
    """
    members = set(group)
    left_out = awaited - members
    full = len(group) == MAX_GROUP and all(peer > group[-1] for peer in left_out)
    return (
        me in members
        and (full or not left_out)
        and members <= here | callers
        and 2 * len(members & callers) > len(group)
    )


def confirmed(named: Mapping[PeerId, Group], others: Collection[PeerId]) -> Group | None:
    """Return the group that more than half of `others` name and are members of; None if there is none."""
    counts = Counter(group for peer, group in named.items() if peer in group and peer in others)
    group, count = max(counts.items(), key=lambda item: item[1], default=((), 0))
    return group if 2 * count > len(others) else None
