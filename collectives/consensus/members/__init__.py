"""Members of a round: their lives, votes and quorums, and peers that may become members."""
