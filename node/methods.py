"""Outer methods by their name in a manifest: how replicas come together after their inner steps.

A method is a replica, a session and rounds that fit together, what is encoded with what, and how that is cut into chunks; all
else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.collectives.gather import pieces
from thinwire.collectives.halves import halves
from thinwire.collectives.shards import Grid, grid
from thinwire.compression import registry
from thinwire.swarm.manifest import Manifest, ManifestError

from .eager import EagerReplica, EagerRounds
from .fragments import Layout
from .gossiprounds import GossipRounds
from .gossipsession import GossipSession
from .lowrank import LowRankReplica
from .lowrankrounds import LowRankRounds
from .outer import Replica
from .paired import PairedReplica
from .rounds import Rounds
from .session import Session
from .sparse import DemoReplica, SparseCodec, SparseReplica, chunks_of
from .sparserounds import SparseRounds
from .streaming import StreamingReplica, StreamingRounds


@dataclass(frozen=True, slots=True)
class Method:
    """The parts of one method."""

    replica: type[Replica]
    session: Callable[..., Any]
    rounds: Callable[..., Any]
    codec: Callable[[Manifest, Layout], Any]
    cut: Callable[[Layout, Any], Grid] = lambda layout, codec: grid(layout.total, codec)


def _dense(manifest: Manifest, layout: Layout) -> Any:
    return registry.dense(manifest.exchange.codec)


def _pairs(manifest: Manifest, layout: Layout) -> Any:
    return halves(manifest.exchange.codec, lr=manifest.outer.lr, gamma=manifest.outer.gamma)


def _sparse(manifest: Manifest, layout: Layout) -> SparseCodec:
    codec: Any = registry.parse(manifest.exchange.codec)
    return SparseCodec(codec, chunks_of(layout, codec.chunk))


def _pieces(layout: Layout, codec: SparseCodec) -> Grid:
    return pieces(codec.bound)


METHODS: Mapping[str, Method] = {
    "diloco": Method(Replica, Session, Rounds, _dense),
    "noloco": Method(PairedReplica, GossipSession, GossipRounds, _pairs),
    "sparseloco": Method(SparseReplica, Session, SparseRounds, _sparse, _pieces),
    "powersgd": Method(LowRankReplica, Session, LowRankRounds, lambda manifest, layout: registry.dense("fp32")),
    "demo": Method(DemoReplica, Session, SparseRounds, _sparse, _pieces),
    "eager": Method(EagerReplica, Session, EagerRounds, _dense),
    "streaming": Method(StreamingReplica, Session, StreamingRounds, _dense),
}
"""Name -> its parts."""


def check_codec(manifest: Manifest, name: str) -> None:
    """Raises ManifestError when the manifest's codec has parameters that it cannot have; `name` is the file's."""
    try:
        registry.parse(manifest.exchange.codec)
    except registry.SpecError as error:
        raise ManifestError(
            f"{name}: exchange.codec: {error}", "leave it out: every method has one that suits it"
        ) from None
