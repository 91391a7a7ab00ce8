"""Time constants that rounds, gossip and their callers share."""

from __future__ import annotations

TICK = 0.1
"""Seconds between two looks at the clock: well below the patience of any round."""

GIVE_UP = 10
"""A peer leaves a round that neither commits nor fails within the grace plus this many patiences. Training continues with its
delta."""

MAX_PATIENCE = 120.0
"""Most seconds without progress before a peer acts, however slow rounds have been."""
