"""Kinds of access links by name: one table for `thinwire init`, `thinwire plan` and scenarios."""

from __future__ import annotations

from dataclasses import dataclass

MBIT = 1e6 / 8
"""Bytes per second of one Mbit/s."""


@dataclass(frozen=True, slots=True)
class AccessKind:
    """Access link of a peer: `up` and `down` in bytes/s, `loss` as a probability.

    jitter: mean additional one-way seconds.
    """

    up: float
    down: float
    loss: float = 0.0
    jitter: float = 0.0


ACCESS = {
    "dsl": AccessKind(10 * MBIT, 50 * MBIT),
    "cable": AccessKind(20 * MBIT, 200 * MBIT),
    "fibre": AccessKind(300 * MBIT, 300 * MBIT),
    "lte": AccessKind(8 * MBIT, 30 * MBIT, loss=0.005, jitter=0.015),
    "office": AccessKind(1000 * MBIT, 1000 * MBIT),
    "datacentre": AccessKind(10_000 * MBIT, 10_000 * MBIT),
}
"""Kinds of access links by name."""
