"""Rounds of averaging, and the data planes they can use: butterfly, ring, all-gather, hierarchy."""
