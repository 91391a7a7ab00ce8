"""TCP connections between two peers that a third one splices.

The third has a link to both, and they cannot reach each other.
"""
