"""Cost of exchanges: seconds and bytes that follow from sizes, and two sampled latency models.

Closed forms for equal links without other traffic; `round_time` models the actual protocol with unequal links. Bytes
are per peer and exchange of P parameters, each with `bits` bits on the wire, in one direction.
"""

from __future__ import annotations

import numpy as np

SPARSE_BITS = {16: 0.0447, 32: 0.0819, 64: 0.1485, 128: 0.266, 256: 0.504, 384: 0.641}
"""Maps values sent of 4096 to bits per parameter of the model: 2-bit values and Rice-coded index gaps."""


def ring_seconds(nbytes: float, peers: int, rate: float, latency: float) -> float:
    """Return the time of a ring all-reduce of `nbytes` over links of `rate` bytes/s, `latency` s one way."""
    return 2 * (peers - 1) * (nbytes / peers / rate + latency)


def butterfly_bytes(parameters: float, bits: float, peers: int) -> float:
    """Return the bytes of a butterfly: contributions to other owners' chunks, and results of own chunks."""
    return 2 * (peers - 1) / peers * parameters * bits / 8


def gather_bytes(parameters: float, bits: float, peers: int) -> float:
    """Return the bytes of an all-gather, in which every peer gets every payload.

    Relays move the upload between peers but do not change its sum.
    """
    return (peers - 1) * parameters * bits / 8


def sieve_bytes(parameters: float, kept: int, wide: int, peers: int) -> float:
    """Return the bytes of a sparse butterfly.

    Owners receive `kept` of 4096 values from every peer and send `wide` of 4096 values of the sum to every peer.
    """
    return (peers - 1) / peers * parameters * (SPARSE_BITS[kept] + SPARSE_BITS[wide]) / 8


def pair_bytes(parameters: float, bits: float) -> float:
    """Return the bytes of a pair that exchanges one vector.

    This is NoLoCo (arXiv:2506.10911) with γ = β and an exact codec; `gossip_time` models the actual protocol.
    """
    return parameters * bits / 8


def tree_over_pair(peers: int, spread: float, rng: np.random.Generator, samples: int = 2000) -> float:
    """Return the mean latency of a tree all-reduce, relative to that of one pair, both there and back.

    peers: a power of two. The time of a message is log-normal with `spread` = standard deviation / mean; a node of the
    tree waits for two messages.
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
    """Return the time of rounds with a global barrier, relative to rounds in which random pairs wait.

    Only computing counts. An inner step takes exp(normal(1, `variance`)); a round has `steps` inner steps; `peers` is
    even.
    """
    barrier, clocks = 0.0, np.zeros(peers)
    for _ in range(rounds):
        took = rng.lognormal(1.0, variance**0.5, (peers, steps)).sum(1)
        barrier += float(took.max())
        clocks += took
        left, right = rng.permutation(peers).reshape(2, -1)
        clocks[left] = clocks[right] = np.maximum(clocks[left], clocks[right])
    return barrier / float(clocks.max())
