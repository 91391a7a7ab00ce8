"""Limits of circuits: deadlines and caps. Tests pass smaller ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CircuitLimits:
    """Limits in seconds and counts, with production defaults.

    - `circuits`, `pair`, `asker`: circuits at one relay, of all pairs, of one, and asked for by one peer, those that wait for
      an end included. A link has four, and one more while it opens.
    - `token`: how long a relay waits for both ends. `idle`: how long no circuit of a pair may carry a byte; control
      connections send heartbeats more often.
    - `answer`: how long to wait for a relay's answer. `relays`: relays that are asked in one dial.
    - `invited`: concurrent visits to relays because another peer has asked for us; `told`: answers that wait to be sent.
    """

    circuits: int = 64
    pair: int = 10
    asker: int = 32
    token: float = 5.0
    idle: float = 60.0
    answer: float = 2.0
    relays: int = 4
    invited: int = 16
    told: int = 128
