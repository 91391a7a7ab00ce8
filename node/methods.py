"""Outer methods by their name in a manifest: how replicas come together after their inner steps.

A method is a replica, a session and rounds that fit together, and what its chunks are encoded with; all else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.collectives.halves import halves
from thinwire.compression import registry
from thinwire.swarm.manifest import Manifest

from .gossiprounds import GossipRounds
from .gossipsession import GossipSession
from .outer import Replica
from .paired import PairedReplica
from .rounds import Rounds
from .session import Session


@dataclass(frozen=True, slots=True)
class Method:
    """The parts of one method."""

    replica: type[Replica]
    session: Callable[..., Any]
    rounds: Callable[..., Any]
    codec: Callable[[Manifest], Any]


METHODS: Mapping[str, Method] = {
    "diloco": Method(Replica, Session, Rounds, lambda manifest: registry.dense(manifest.exchange.codec)),
    "noloco": Method(
        PairedReplica,
        GossipSession,
        GossipRounds,
        lambda manifest: halves(manifest.exchange.codec, lr=manifest.outer.lr, gamma=manifest.outer.gamma),
    ),
}
"""Name -> its parts."""
