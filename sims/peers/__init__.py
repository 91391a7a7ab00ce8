"""Simulated peers: the machine a peer runs on, made-up learners, and Byzantine behaviour."""
