"""Outer methods by name; each combines a replica, a session and a loop of rounds."""
