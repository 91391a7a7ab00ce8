"""Invariants that every simulated swarm must satisfy; each is checked against the product's own state."""
