"""Outer methods as a manifest describes them: one file for each, with its keys of [outer] and its facts."""
