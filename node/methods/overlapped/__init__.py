"""Outer methods that train while a round is under way (streaming DiLoCo, eager updates, CO2)."""
