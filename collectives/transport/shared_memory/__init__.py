"""Shared memory between peers of one user on one machine."""
