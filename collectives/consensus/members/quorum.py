"""Quorum of a round: a majority, or two thirds, of the members that the last round decided.

No peer's own observation (refused, unreachable, silent) makes a quorum smaller. A ballot may carry farewells: final,
signed statements of members that leave. Then the quorum is a majority of the other members. On an exact tie the side with
the most senior of them wins (dynamic-linear voting, Jajodia and Mutchler 1990).

Why two quorums of one round agree. Let a value be chosen in ballot b with farewells F by voters V, a majority of C - F,
and let b' > b have farewells F' and promises of P, a majority of C - F'. A ballot carries only farewells whose promise is
not above it, and a peer promises nothing after its farewell. The proposer of b' must learn of the value:

- If a voter of V is in F', its farewell reports the vote: a farewell is the peer's last statement, so the vote was earlier.
  (A farewell with a vote above its promise is refused: no honest peer sends one.)
- Otherwise V is within C - F - F'. No x in F - F' is in P: it would have promised b' before its farewell, whose promise
  would then be above b. So P is within C - F - F', too. V and P are majorities of supersets of this set, so they have a
  member in common. If both hold exactly half of it, F = F', and both have the same most senior member.

Each such member voted in b before it promised b', because after the promise it votes for no lower ballot. The rest is the
induction of single-decree Paxos over the ballots from b to b'. tests/kit/reference/small_model.py checks all cases of small
groups.

Members that lie. With quorums above two thirds, f < n/3 of the n members may lie: report a vote that they have not given,
or none, vote twice, and propose anything. An honest member votes in a later ballot only if the signed promises of a quorum
show that no other value can have been chosen (`justification`). A chosen value has at least q - f honest voters, q being
the quorum. Each of them has voted for nothing else since, because other values were not justified. So in any promises of
a quorum they report this value, or are silent, and `possible` finds it. The quorum is also above (m + f) / 2 of the m
members without farewells, so that any two quorums have an honest member in common.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from thinwire.swarm.messages.registry import PeerId

TWO_THIRDS = 2 / 3
"""Least fraction with which quorums tolerate members that lie."""


def tolerated(count: int, fraction: float) -> int:
    """Return how many of `count` members may lie.

    Fewer than a third with quorums above two thirds, else none.
    """
    return max(0, count - 1) // 3 if fraction >= TWO_THIRDS else 0


def fewest(liars: int) -> int:
    """Return the fewest members of which so many may lie; the inverse of `tolerated`. Without liars 0."""
    return 3 * liars + 1 if liars else 0


def enough(
    agreeing: Collection[PeerId], seniors: Sequence[PeerId], left: Collection[PeerId] = (), *, fraction: float = 0.5
) -> bool:
    """Return True if `agreeing` exceeds `fraction` of `seniors` (members by seniority) without `left`.

    A tie at one half goes to the most senior of them. False if all have left: newcomers have no vote.
    """
    base = [member for member in seniors if member not in left] if left else seniors
    have, liars = len([member for member in base if member in agreeing]), tolerated(len(seniors), fraction)
    if liars:
        return _exceeds(have, len(base), liars, fraction)
    if fraction == 0.5 and base and 2 * have == len(base):
        return base[0] in agreeing
    return have > fraction * len(base)


def possible(
    agreeing: Collection[PeerId], seniors: Sequence[PeerId], left: Collection[PeerId] = (), *, fraction: float
) -> bool:
    """Return True if `agreeing`, and the liars that are tolerated, may be a quorum.

    It is counted over `seniors` without `left`.
    """
    liars = tolerated(len(seniors), fraction)
    if not liars:
        return enough(agreeing, seniors, left, fraction=fraction)
    base = [member for member in seniors if member not in left]
    have = len([member for member in base if member in agreeing])
    return _exceeds(have + liars, len(base), liars, fraction)


def _exceeds(have: int, base: int, liars: int, fraction: float) -> bool:
    # Farewells make `base` smaller, but not the number of liars: two quorums must have an honest member in common.
    return have > fraction * base and 2 * have > base + liars
