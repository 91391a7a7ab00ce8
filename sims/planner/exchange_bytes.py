"""Bytes of exchanges in closed form; `round_time` models the actual protocol.

Bytes are per peer and exchange of P parameters, each with `bits` bits on the wire, in one direction.
"""

from __future__ import annotations

SPARSE_BITS = {16: 0.0447, 32: 0.0819, 64: 0.1485, 128: 0.266, 256: 0.504, 384: 0.641}
"""Maps values sent of 4096 to bits per parameter of the model: 2-bit values and Rice-coded index gaps."""


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
