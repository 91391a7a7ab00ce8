"""Which group of those that others name for an average a peer takes up, so that no single member decides who is in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set

from thinwire.swarm.protocol import MAX_GROUP, PeerId

Group = tuple[PeerId, ...]


def orderly(group: Group) -> bool:
    """Whether it is sorted and names nobody twice."""
    return all(one < two for one, two in zip(group, group[1:], strict=False))


def greater(one: Group, two: Group) -> bool:
    """Whether `one` is the one to go over to: of more members, or of as many and later in order."""
    return (len(one), one) > (len(two), two)


def fits(group: Group, me: PeerId, callers: Set[PeerId], here: Set[PeerId], awaited: Set[PeerId]) -> bool:
    """Whether we would name nearly the same, so that the word of one is enough.

    callers: those whose call is here, and us. awaited: whom we would not begin without. We are in it and nobody is left
    out but for want of room; all of it are here, and more than half have called, so that it can end without the others.
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
    """The group that more than half of `others` name, each one that it is in itself; None if there is none."""
    counts = Counter(group for peer, group in named.items() if peer in group and peer in others)
    group, count = max(counts.items(), key=lambda item: item[1], default=((), 0))
    return group if 2 * count > len(others) else None
