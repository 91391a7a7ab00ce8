"""Data planes of a round, which move and aggregate its chunks: butterfly, ring, hierarchy, all-gather."""
