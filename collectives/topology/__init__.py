"""Pure functions that say who owns, relays and sends which chunk; every peer computes the same."""
