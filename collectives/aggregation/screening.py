"""Screening of contributions before a rule aggregates them.

Pure functions; the caller determines the order of peers. Screening rejects the peer, never the round: a single NaN
would turn every mean into NaN. The limit on norms catches absurd values (a diverged or broken peer); it is no defence
against a careful liar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from thinwire.swarm.messages.registry import PeerId

NORM_LIMIT = 1e3
"""A contribution is rejected if its norm is more than this many times the usual norm."""

MEMORY = 0.9
"""Weight of the past in the running median norm, per round; the memory is some twenty rounds."""

GROWTH = 10.0
"""Factor by which the usual norm grows when a round rejects all contributions."""


class NotEnoughPeers(ValueError):
    """Error for fewer contributors than a rule needs for the liars that it must withstand."""


def lower_median(values: Iterable[float]) -> float:
    """Return the middle value, or the lower of two: always one of the values.

    Raises ValueError if there are none.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("the median of nothing")
    return ordered[(len(ordered) - 1) // 2]


def outliers(
    norms: Mapping[PeerId, float], usual: float = 0.0, middle: Callable[[Iterable[float]], float] = lower_median
) -> tuple[tuple[PeerId, ...], float]:
    """Return the peers whose norm is above NORM_LIMIT times the usual one, and the new usual norm.

    The peers are in peer-id order. usual: usual norm from the last call; if it is 0, as at first, this round's lower
    median is used. If all norms are above the limit, the usual norm grows by GROWTH: a single explosion is rejected,
    but a lasting change is accepted after some rounds, instead of excluding all peers for ever. Zero norms are not part
    of the median. middle: function that determines the norm of this round that is remembered.
    """
    lengths = [norm for norm in norms.values() if norm > 0.0]
    if not lengths:
        return (), usual
    limit = NORM_LIMIT * (usual or lower_median(lengths))
    far = tuple(sorted(peer for peer, norm in norms.items() if norm > limit))
    near = [norm for norm in lengths if norm <= limit]
    if not near:
        return far, GROWTH * usual
    median = middle(near)
    return far, MEMORY * usual + (1.0 - MEMORY) * median if usual else median
