"""Numba kernels of the codecs, with the helpers for payloads and threads around them."""
