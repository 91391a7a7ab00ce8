"""Members of a round: those that vote, their lives and quorums, and the peers that may become members."""
