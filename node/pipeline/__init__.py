"""Peers too small for the model form one replica as pipeline stages."""
