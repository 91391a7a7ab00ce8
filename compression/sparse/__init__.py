"""Codecs that send only the largest elements: top-k and DeMo, with error feedback and Rice coding."""
