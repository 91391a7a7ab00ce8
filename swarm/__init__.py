"""Identities, membership, manifest and messages of a swarm.

Sans-IO: no code in this package opens a socket or reads a clock.
"""
