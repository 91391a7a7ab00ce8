"""Owners, relays and senders of chunks, as pure functions: every peer computes the same ones."""
