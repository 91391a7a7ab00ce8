"""Circuits: TCP connections between two peers that cannot reach each other, spliced by a peer that has a link to both."""
