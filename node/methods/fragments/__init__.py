"""Outer methods in which each fragment of the model has its own rounds, several at a time."""
