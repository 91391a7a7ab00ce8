"""Measurements, each a module that is run from the root of the repository: `python -m benchmarks.exchange.tiny`."""
