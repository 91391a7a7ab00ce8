"""Collective operations: many peers' tensors become one, round by round."""
