"""Outer methods that send a small part of each update (SparseLoCo, DeMo)."""
