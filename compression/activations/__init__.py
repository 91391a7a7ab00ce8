"""Codecs for activations that cross the boundary between two pipeline stages."""
