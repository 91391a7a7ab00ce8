"""Rounds of averaging: the life of one round, its repair, and the choice of its data plane."""
