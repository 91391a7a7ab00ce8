"""Outer methods in a manifest: one file for each, with its keys of [outer] and its facts."""
