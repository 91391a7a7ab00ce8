"""Bytes of exchanges in closed form; `round_time` models the actual protocol.

Bytes are per peer and exchange of P parameters, each with `bits` bits on the wire, in one direction.
"""

from __future__ import annotations

import numpy as np
from thinwire.compression.sparse.demo import Demo
from thinwire.compression.sparse.topk import LEVELS, Sparse

SPARSE_BITS = {16: 0.0447, 32: 0.0819, 64: 0.1485, 128: 0.266, 256: 0.504, 384: 0.641}
"""Maps values sent of 4096 to bits per parameter of the model: 2-bit values and Rice-coded index gaps."""


def sparse_bits(kept: float, width: int = 2) -> float:
    """Return the bits per parameter of `kept` values of 4096, with `width` bits each, by the table."""
    table = np.log([*SPARSE_BITS]), np.log([*SPARSE_BITS.values()])
    return float(np.exp(np.interp(np.log(kept), *table))) + (width - 2) * kept / 4096


def bits_of(codec: Sparse | Demo) -> float:
    """Return the bits per parameter of a sparse codec."""
    return sparse_bits(4096 * codec.k / codec.chunk, LEVELS[codec.values])


def butterfly_bytes(parameters: float, bits: float, peers: int) -> float:
    """Return the bytes of a butterfly: contributions to other owners' chunks, and results of own chunks."""
    return 2 * (peers - 1) / peers * parameters * bits / 8


def gather_bytes(parameters: float, bits: float, peers: int) -> float:
    """Return the bytes of an all-gather, in which every peer gets every payload.

    Relays move the upload between peers but do not change its sum.
    """
    return (peers - 1) * parameters * bits / 8


def sparse_butterfly_bytes(parameters: float, bits: float, wide: float, peers: int) -> float:
    """Return the bytes of a sparse butterfly.

    Owners receive `bits` per parameter from every peer and send `wide` bits per parameter of the sum to every peer.
    """
    return (peers - 1) / peers * parameters * (bits + wide) / 8
