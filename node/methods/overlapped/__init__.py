"""Outer methods that train while a round is in progress (streaming DiLoCo, eager updates, CO2)."""
