"""The result of a chunk as the product must have it, computed at one place from what the contributors sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from thinwire.collectives.aggregate import Rule
from thinwire.collectives.rounding import encode
from thinwire.compression.codec import Buffer, Codec
from thinwire.swarm.protocol import Commit


def sites_of(commit: Commit) -> list[int]:
    """The site of each contributor, by its number in the record; all are apart where there are none."""
    opened = commit.opened
    known = dict(zip(opened.group, opened.sites, strict=False))
    return [known.get(entry.peer, -1 - at) for at, entry in enumerate(opened.contributors)]


def result(
    codec: Codec, rule: Rule, payloads: Sequence[Buffer], weights: Sequence[float], sites: Sequence[int], size: int
) -> Buffer:
    """The encoded mean of payloads of `size` elements: of each site first, then over the sites in the order of contributors."""
    if len(set(sites)) == len(sites):
        return _mean(codec, rule, payloads, weights, size)
    values, totals = [], []
    for site in dict.fromkeys(sites):
        at = [place for place, other in enumerate(sites) if other == site]
        mine, shares = [payloads[place] for place in at], [weights[place] for place in at]
        values.append(_mean(codec, rule, mine, shares, size) if len(mine) > 1 else mine[0])
        totals.append(sum(shares))
    return _mean(codec, rule, values, totals, size) if len(values) > 1 else values[0]


def _mean(codec: Codec, rule: Rule, payloads: Sequence[Buffer], weights: Sequence[float], size: int) -> Buffer:
    mean = np.empty(size, np.float32)
    rule(codec, payloads, weights, mean)
    encoded = np.empty(codec.nbytes(size), np.uint8)
    encode(codec, mean, encoded)
    return encoded.data
