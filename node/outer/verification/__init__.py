"""Checks of the work of other peers: scores of contributions in open runs, and audits of owners."""
