"""Queues of outgoing frames, their order, and estimates of rates from what was sent."""
