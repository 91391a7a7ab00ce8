"""Simulated network: links with latency, bandwidth and loss, partitions, and a transport on top."""
