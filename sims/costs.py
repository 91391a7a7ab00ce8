"""What exchanges cost: seconds and bytes that follow from sizes alone, and two latency models that are sampled.

Closed forms, with links that are equal and free of other traffic; `roundtime` has our own protocol with unequal links.
Bytes are per peer and exchange of P parameters at `bits` on the wire each, and count one direction.
"""

from __future__ import annotations

import numpy as np

SPARSE_BITS = {16: 0.0447, 32: 0.0819, 64: 0.1485, 128: 0.266, 256: 0.504, 384: 0.641}
"""Values kept of 4096 -> bits per parameter of the model: 2-bit values and Rice-coded gaps between their indices."""


def ring_seconds(nbytes: float, peers: int, rate: float, latency: float) -> float:
    """Ring all-reduce of `nbytes` over links of `rate` bytes/s and `latency` seconds one way."""
    return 2 * (peers - 1) * (nbytes / peers / rate + latency)


def butterfly_bytes(parameters: float, bits: float, peers: int) -> float:
    """Every chunk has an owner: contributions to the others' chunks, and results of one's own to the others."""
    return 2 * (peers - 1) / peers * parameters * bits / 8


def gather_bytes(parameters: float, bits: float, peers: int) -> float:
    """Everyone gets everyone's payload. Relays move the upload from one peer to another, its sum stays."""
    return (peers - 1) * parameters * bits / 8


def sieve_bytes(parameters: float, kept: int, wide: int, peers: int) -> float:
    """Chunks have owners that get `kept` of 4096 values from everybody and send `wide` of the sum to everybody."""
    return (peers - 1) / peers * parameters * (SPARSE_BITS[kept] + SPARSE_BITS[wide]) / 8


def pair_bytes(parameters: float, bits: float) -> float:
    """Two peers exchange one vector (NoLoCo, arXiv:2506.10911, with γ = β and an exact codec); `pairtime` has ours."""
    return parameters * bits / 8


def tree_over_pair(peers: int, spread: float, rng: np.random.Generator, samples: int = 2000) -> float:
    """Mean latency of a tree all-reduce among `peers` (a power of two) over that of one pair, both there and back.

    One message takes a log-normal time with `spread` = standard deviation / mean; a node of the tree waits for two.
    """
    variance = np.log1p(spread * spread)

    def draw(*shape: int) -> np.ndarray:
        return rng.lognormal(-variance / 2, np.sqrt(variance), shape)

    times = np.zeros((samples, peers))
    while times.shape[1] > 1:
        times = times + draw(*times.shape)
        times = np.maximum(times[:, ::2], times[:, 1::2])
    return float(times.mean() / draw(200_000, 2).max(1).mean())


def barrier_over_pairs(
    peers: int, steps: int, rng: np.random.Generator, rounds: int = 250, variance: float = 0.5
) -> float:
    """Time that rounds take when all wait for all, over that when random pairs wait for each other; nothing else counts.

    An inner step takes exp(normal(1, `variance`)); a round has `steps` of them; `peers` is even.
    """
    barrier, clocks = 0.0, np.zeros(peers)
    for _ in range(rounds):
        took = rng.lognormal(1.0, variance**0.5, (peers, steps)).sum(1)
        barrier += float(took.max())
        clocks += took
        left, right = rng.permutation(peers).reshape(2, -1)
        clocks[left] = clocks[right] = np.maximum(clocks[left], clocks[right])
    return barrier / float(clocks.max())
