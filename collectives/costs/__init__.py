"""Costs of rounds in closed form: seconds, bytes and utilisation of each method."""
