"""Addresses of peers: those that others see, and those of host names."""
