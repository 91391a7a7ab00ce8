"""Reference for the result of a chunk, computed in one place from what the contributors sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from thinwire.collectives.aggregation.means import Rule, mean
from thinwire.collectives.deterministic_rounding import encode
from thinwire.collectives.rounds.data_planes import ring_schedule
from thinwire.collectives.rounds.data_planes.owner_results import Reducer
from thinwire.collectives.topology.shards import shares
from thinwire.collectives.transport.buffer_pool import BufferPool
from thinwire.compression.core.codec import Codec
from thinwire.compression.core.types import Buffer
from thinwire.swarm.messages.registry import Commit, Proposal


def sites_of(commit: Commit) -> list[int]:
    """Return the site of each contributor, by its number in the record; without sites all are separate."""
    proposal = commit.proposal
    known = dict(zip(proposal.group, proposal.sites, strict=False))
    return [known.get(entry.peer, -1 - at) for at, entry in enumerate(proposal.contributors)]


def result(
    codec: Codec, rule: Rule, payloads: Sequence[Buffer], weights: Sequence[float], sites: Sequence[int], size: int
) -> Buffer:
    """Return the encoded mean of payloads of `size` elements: of each site, then over the sites.

    Sites are in the order of their contributors.
    """
    if len(set(sites)) == len(sites):
        return _mean(codec, rule, payloads, weights, size)
    values, totals = [], []
    for site in dict.fromkeys(sites):
        at = [place for place, other in enumerate(sites) if other == site]
        mine, shares = [payloads[place] for place in at], [weights[place] for place in at]
        values.append(_mean(codec, rule, mine, shares, size) if len(mine) > 1 else mine[0])
        totals.append(sum(shares))
    return _mean(codec, rule, values, totals, size) if len(values) > 1 else values[0]


def round_ring(codec: Codec, proposal: Proposal, count: int) -> Callable[[int, Sequence[Buffer], int], Buffer]:
    """Return a function that gives the encoded mean of one of `count` chunks, added up along the ring."""
    reducer, around = Reducer(codec, mean, BufferPool()), ring_schedule.paths(proposal)
    owners = shares(count, ring_schedule.ring(proposal), fragment=proposal.fragment)

    def made(chunk: int, payloads: Sequence[Buffer], size: int) -> Buffer:
        named = {entry.peer: payload for entry, payload in zip(proposal.contributors, payloads, strict=True)}
        return ring_schedule.result(around[owners[chunk]], named, reducer, size)

    return made


def _mean(codec: Codec, rule: Rule, payloads: Sequence[Buffer], weights: Sequence[float], size: int) -> Buffer:
    value = np.empty(size, np.float32)
    rule(codec, payloads, weights, value)
    encoded = np.empty(codec.nbytes(size), np.uint8)
    encode(codec, value, encoded)
    return encoded.data
