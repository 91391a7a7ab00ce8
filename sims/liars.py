"""Peers that lie. A liar is a real peer whose session is changed in one respect; everything else it does is honest."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.sims.machine import Process

KINDS: Mapping[str, str] = {}


def corrupt(process: Process, kind: str) -> None:
    """Make the peer of a process lie from now on."""
    raise NotImplementedError(kind)
