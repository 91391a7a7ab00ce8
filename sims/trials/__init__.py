"""Trials: random scenarios by seed, in families, cut down to the faults that a failure needs."""
