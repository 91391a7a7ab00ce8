"""Members of a round: those that vote, their lives, quorums and farewells."""
