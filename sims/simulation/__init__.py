"""Simulation of a scenario: the world that runs it, and the injector of its faults."""
