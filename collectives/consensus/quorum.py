"""When enough peers agree: the base of a quorum is the members of the last committed round, never a local view.

Dynamic-linear voting (Jajodia and Mutchler 1990): a round may commit when more than a fraction of the peers that took part
in the round before vote for it; on an exact tie the side that holds the distinguished member wins. Members that said goodbye,
or whose machine answered that the process is gone (a reset, not silence), no longer count: a crash shrinks the base, a
partition does not, so a partition's minority freezes instead of going its own way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from thinwire.swarm.messages.registry import PeerId


def enough(
    agreeing: Collection[PeerId], members: Sequence[PeerId], gone: Collection[PeerId], *, fraction: float = 0.5
) -> bool:
    """Whether `agreeing` exceeds `fraction` of `members` that are not `gone`; ties at one half go to the first member.

    `members` are in an order that all peers share. False when every member is gone: a newcomer, which never had a say, cannot
    tell a swarm that died from one that went on without it.
    """
    base = [member for member in members if member not in gone] if gone else members
    have = len([member for member in base if member in agreeing])
    return have > fraction * len(base) or (fraction == 0.5 and 0 < 2 * have == len(base) and base[0] in agreeing)
