"""Outer methods by their name in a manifest: how replicas come together after their inner steps.

A method is a replica, a session and rounds that fit together, what is encoded with what, and how that is cut into chunks; all
else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from thinwire.collectives.halves import halves
from thinwire.collectives.payload import pieces
from thinwire.collectives.shards import Grid, grid
from thinwire.collectives.sieve import parts
from thinwire.compression import registry
from thinwire.compression.portions import Portions
from thinwire.compression.portions import layout as runs
from thinwire.swarm.manifest import SUITS, Manifest, ManifestError

from .buffered import BufferedReplica, BufferedRounds
from .chains import ChainedReplica, layout_of_part
from .chainsession import ChainedSession
from .co2 import Co2Replica, Co2Rounds
from .delayed import DelayedReplica
from .eager import EagerReplica, EagerRounds
from .fragments import Layout
from .gossiprounds import GossipRounds
from .gossipsession import GossipSession
from .lowrank import LowRankReplica, cuts
from .lowrankrounds import LowRankRounds
from .outer import Replica
from .paired import PairedReplica
from .parts import fragments_of
from .pipeline.boundary import Boundary
from .rounds import Rounds
from .session import Session
from .sparse import DemoReplica, RunCodec, SparseCodec, SparseReplica, chunks_of
from .sparserounds import SparseRounds
from .streaming import StreamingReplica, StreamingRounds
from .turns import ChainedRounds


@dataclass(frozen=True, slots=True)
class Method:
    """The parts of one method."""

    replica: type[Any]
    session: Callable[..., Any]
    rounds: Callable[..., Any]
    codec: Callable[[Manifest, Layout], Any]
    cut: Callable[[Manifest, Layout, Any], Grid] = lambda manifest, layout, codec: grid(layout.total, codec)
    smaller: str = "choose a codec with fewer bits per value, or another method, such as sparseloco"
    """What to do about a model that is too large."""


def _dense(manifest: Manifest, layout: Layout) -> Any:
    return registry.dense(manifest.exchange.codec)


def _pairs(manifest: Manifest, layout: Layout) -> Any:
    return halves(manifest.exchange.codec, lr=manifest.outer.lr, gamma=manifest.outer.gamma)


WIDE = 6
"""Values that an owner sends of a sum, for each that a contributor sends: with four it sends too little (docs/compression.md).
Places of many cost less than those of few, so that a result is some four payloads, whatever the number of peers.
"""


def _sparse(manifest: Manifest, layout: Layout) -> SparseCodec:
    codec: Any = registry.parse(manifest.exchange.codec)
    if manifest.exchange.collective != "sparse-butterfly":
        return SparseCodec(codec, chunks_of(layout, codec.chunk))
    wide = replace(codec, k=min(WIDE * codec.k, codec.chunk))
    portions = Portions(codec, wide, manifest.exchange.keep, manifest.outer.denominator)
    run = parts(layout.total, portions, codec.chunk).chunk
    return RunCodec(codec, runs(layout.total, run, codec.chunk), portions)


def _pieces(manifest: Manifest, layout: Layout, codec: SparseCodec) -> Grid:
    return codec.grid(layout.total)


def _factors(manifest: Manifest, layout: Layout, codec: Any) -> Grid:
    power: Any = registry.parse(manifest.exchange.codec)
    return cuts(power, chunks_of(layout), codec)[0]


def _part(manifest: Manifest, layout: Layout, codec: Any) -> Grid:
    return grid(max(part.size for part in fragments_of(manifest, layout)), codec)


def _sparse_part(manifest: Manifest, layout: Layout, codec: SparseCodec) -> Grid:
    count = manifest.outer.fragments
    inner = [layout_of_part(layout, part, at, count) for at, part in enumerate(fragments_of(manifest, layout))]
    return pieces(max(SparseCodec(codec.codec, chunks_of(one, codec.codec.chunk)).bound for one in inner))


_LOWER_K = "lower k in exchange.codec: fewer values are sent"

METHODS: Mapping[str, Method] = {
    "diloco": Method(Replica, Session, Rounds, _dense),
    "muloco": Method(Replica, Session, Rounds, _dense),
    "noloco": Method(PairedReplica, GossipSession, GossipRounds, _pairs),
    "sparseloco": Method(SparseReplica, Session, SparseRounds, _sparse, _pieces, _LOWER_K),
    "powersgd": Method(
        LowRankReplica,
        Session,
        LowRankRounds,
        lambda manifest, layout: registry.dense("fp32"),
        _factors,
        "lower the rank in exchange.codec, or choose another method, such as sparseloco",
    ),
    "merge": Method(Replica, Session, Rounds, _dense),
    "demo": Method(DemoReplica, Session, SparseRounds, _sparse, _pieces, _LOWER_K),
    "eager": Method(EagerReplica, Session, EagerRounds, _dense),
    "co2": Method(Co2Replica, Session, Co2Rounds, _dense),
    "buffered-async": Method(BufferedReplica, Session, BufferedRounds, _dense),
    "delayed-nesterov": Method(DelayedReplica, Session, BufferedRounds, _dense),
    "streaming": Method(
        StreamingReplica,
        Session,
        StreamingRounds,
        _dense,
        _part,
        "raise outer.fragments: a round is for one part; or choose a codec with fewer bits per value",
    ),
}
"""Name -> its parts."""

DENSE_CHAINS = Method(ChainedReplica, ChainedSession, ChainedRounds, _dense, _part, METHODS["streaming"].smaller)
SPARSE_CHAINS = Method(ChainedReplica, ChainedSession, ChainedRounds, _sparse, _sparse_part, _LOWER_K)
"""Streaming with a chain of rounds for each part."""


def method_of(manifest: Manifest) -> Method:
    """The parts of a manifest's method."""
    if manifest.chained:
        return SPARSE_CHAINS if manifest.sparse else DENSE_CHAINS
    return METHODS[manifest.outer.method]


def fitted(manifest: Manifest, layout: Layout) -> tuple[Any, Grid]:
    """The codec of a run whose model has this layout, and the cut of what it sends. Raises ManifestError for one too large."""
    method = method_of(manifest)
    try:
        codec = method.codec(manifest, layout)
        return codec, method.cut(manifest, layout, codec)
    except ValueError as error:
        message = (
            f"a model of {layout.total} parameters does not go with exchange.codec {manifest.exchange.codec!r}: {error}"
        )
        raise ManifestError(message, method.smaller) from None


def check_codec(manifest: Manifest, name: str) -> None:
    """Raises ManifestError when the manifest's codec has parameters that it cannot have; `name` is the file's."""
    try:
        registry.parse(manifest.exchange.codec)
    except registry.SpecError as error:
        raise ManifestError(f"{name}: exchange.codec: {error}", SUITS) from None
    try:
        if manifest.pipeline.stages:
            Boundary(manifest.pipeline.codec, manifest.model.width, 1, 0).nbytes(1, 1, backward=False)
    except ValueError as error:
        raise ManifestError(
            f"{name}: pipeline.codec: {error}", "'rows(bits=8)' is the default, 'fp32' is exact"
        ) from None
