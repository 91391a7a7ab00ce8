"""Time constants that rounds, gossip and their callers share."""

from __future__ import annotations

TICK = 0.1
"""Seconds between two looks at the clock: well below the patience of any round."""

GIVE_UP = 10
"""Patiences beyond the grace after which a peer leaves an undecided round; its delta stays."""

MAX_PATIENCE = 120.0
"""Most seconds without progress before a peer acts, however slow rounds have been."""
