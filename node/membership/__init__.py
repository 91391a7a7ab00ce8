"""Membership of a running peer: presence loop, join handshake, health monitor, known peers."""
