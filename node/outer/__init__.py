"""Outer optimization: the session of a round, the loop over rounds, catch-up after missed rounds."""
