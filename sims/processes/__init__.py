"""Scenarios with real processes, behind proxies or in network namespaces."""
