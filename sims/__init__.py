"""Simulator: the product's code in virtual time on an in-memory network; test beds of real processes."""
