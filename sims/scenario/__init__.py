"""Scenarios: the TOML format, its parser, and the faults that a scenario can have."""
