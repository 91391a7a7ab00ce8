"""Exchange of a round between two peers, or in a small group (NoLoCo), without a vote."""
