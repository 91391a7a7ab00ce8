"""Registry of outer methods: name in a manifest -> replica, session, loop, codec and chunk grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from thinwire.collectives.aggregation.rule_factory import sparse_rule
from thinwire.collectives.gossip.pair_codec import parse_pair_codec
from thinwire.collectives.rounds.data_planes.allgather.payload_pieces import piece_grid
from thinwire.collectives.rounds.data_planes.sparse_butterfly import parts
from thinwire.collectives.topology.shards import Grid, grid
from thinwire.compression import registry
from thinwire.compression.boundary_codec import Boundary
from thinwire.compression.core.exact_block import BufferedCodec
from thinwire.compression.sparse.portions import PortionCodecs, portion_chunks
from thinwire.node.methods.asynchronous.delayed_nesterov import DelayedNesterovReplica
from thinwire.node.methods.asynchronous.fedbuff import FedBuffReplica
from thinwire.node.methods.asynchronous.schedule import Asynchronous
from thinwire.node.methods.fragments.fragment_loop import FragmentLoop
from thinwire.node.methods.fragments.fragment_replicas import FragmentReplicas
from thinwire.node.methods.fragments.fragment_sessions import FragmentSessions
from thinwire.node.methods.noloco.loop import GossipLoop
from thinwire.node.methods.noloco.replica import GossipReplica
from thinwire.node.methods.noloco.session import GossipSession
from thinwire.node.methods.overlapped.co2 import Co2Replica
from thinwire.node.methods.overlapped.eager import EagerReplica
from thinwire.node.methods.overlapped.schedule import Overlap
from thinwire.node.methods.powersgd.replica import PowerSGDReplica, cuts
from thinwire.node.methods.powersgd.two_phase_schedule import TwoPhase
from thinwire.node.methods.sparse.replica import DemoReplica, SparseReplica, chunks_of
from thinwire.node.methods.sparse.sparse_codec import OwnedChunkCodec, SparseCodec
from thinwire.node.outer.outer_loop import OuterLoop, Schedule
from thinwire.node.outer.round_loop import RoundLoop
from thinwire.node.outer.round_session import RoundSession
from thinwire.node.outer.session import Session, SessionContext
from thinwire.node.state.fragments import fragments_of, layout_of_part
from thinwire.node.state.layout import Layout
from thinwire.node.state.replica import Replica
from thinwire.swarm.aggregation_spec import NEEDS
from thinwire.swarm.manifest.manifest import Manifest, ManifestError
from thinwire.swarm.manifest.parser import SUITS
from thinwire.swarm.messages.registry import CHUNK_BYTES
from thinwire.swarm.method_specs.buffered_async import AsynchronousSpec
from thinwire.swarm.method_specs.noloco import NoLoCo


@dataclass(frozen=True, slots=True)
class Method:
    """Parts of one outer method.

    `replica`: class of a peer's outer state, `Replica` or one with its interface; `begin` makes the first state, with arguments
    that differ by method. `session`: makes the session of a replica. `rounds`: makes the loop over its rounds. `codec`: makes
    the encoding of contributions. `cut`: makes their chunk grid.
    """

    replica: type[Any]
    session: Callable[[SessionContext, Any], Session]
    rounds: Callable[..., RoundLoop]
    codec: Callable[[Manifest, Layout], Any]
    cut: Callable[[Manifest, Layout, Any], Grid] = lambda manifest, layout, codec: grid(layout.total, codec)
    smaller: str = "choose a codec with fewer bits per value, or another method, such as sparseloco"
    """Hint for a model that is too large for the codec."""
    buffers: str = ""
    """Reason why buffers of a model cannot be part of the state; empty if they can."""
    partial: bool = False
    """True if fragments have separate rounds, so that a peer may hold only some of them."""


def _dense(manifest: Manifest, layout: Layout) -> Any:
    return registry.dense(manifest.exchange.codec)


def _pairs(manifest: Manifest, layout: Layout) -> Any:
    outer = manifest.method(NoLoCo)
    return parse_pair_codec(manifest.exchange.codec, lr=outer.lr, gamma=outer.gamma, parts=outer.slow_weight_parts)


WIDE = 6
"""Values that an owner sends of a sum, for each that a contributor sends.

Four are too few (docs/compression.md). A result has about the size of four payloads for any number of peers: the
indices of many values cost less each.
"""


def _sparse(manifest: Manifest, layout: Layout) -> SparseCodec:
    codec: Any = registry.parse(manifest.exchange.codec)
    if manifest.exchange.collective != "sparse-butterfly":
        return SparseCodec(codec, chunks_of(layout, codec.chunk))
    wide = replace(codec, k=min(WIDE * codec.k, codec.chunk))
    exchange, denominator = manifest.exchange, manifest.outer.residual.denominator
    portions = PortionCodecs(codec, wide, exchange.owner_residual_decay, denominator, sparse_rule(exchange.rule))
    size = parts(layout.total, portions, codec.chunk).chunk
    return OwnedChunkCodec(codec, portion_chunks(layout.total, size, codec.chunk), portions)


def _pieces(manifest: Manifest, layout: Layout, codec: SparseCodec) -> Grid:
    return codec.grid(layout.total)


def _factors(manifest: Manifest, layout: Layout, codec: Any) -> Grid:
    power: Any = registry.parse(manifest.exchange.codec)
    return cuts(power, chunks_of(layout), codec)[0]


def _part(manifest: Manifest, layout: Layout, codec: Any) -> Grid:
    return grid(max(part.size for part in fragments_of(manifest, layout)), codec)


def _sparse_part(manifest: Manifest, layout: Layout, codec: SparseCodec) -> Grid:
    count = manifest.outer.fragment_count
    inner = [layout_of_part(layout, part, at, count) for at, part in enumerate(fragments_of(manifest, layout))]
    return piece_grid(max(SparseCodec(codec.codec, chunks_of(one, codec.codec.chunk)).bound for one in inner))


def _loop(schedule: Callable[[Manifest], Schedule]) -> Callable[..., OuterLoop]:
    """Return a constructor of loops with this schedule."""

    def make(session: RoundSession, manifest: Manifest, **model: Any) -> OuterLoop:
        return OuterLoop(session, schedule(manifest), **model)

    return make


_barrier = _loop(lambda manifest: Schedule())
_overlap = _loop(lambda manifest: Overlap(last=manifest.run.rounds))
_asynchronous = _loop(
    lambda manifest: Asynchronous(last=manifest.run.rounds, staleness=manifest.method(AsynchronousSpec).staleness)
)

_LOWER_K = "lower k in exchange.codec: fewer values are sent"

METHODS: Mapping[str, Method] = {
    "diloco": Method(Replica, RoundSession, _barrier, _dense),
    "muloco": Method(Replica, RoundSession, _barrier, _dense),
    "noloco": Method(
        GossipReplica,
        GossipSession,
        GossipLoop,
        _pairs,
        buffers="the replicas of noloco differ, so there is no common value",
    ),
    "sparseloco": Method(SparseReplica, RoundSession, _barrier, _sparse, _pieces, _LOWER_K),
    "powersgd": Method(
        PowerSGDReplica,
        RoundSession,
        _loop(lambda manifest: TwoPhase()),
        lambda manifest, layout: registry.dense("fp32"),
        _factors,
        "lower the rank in exchange.codec, or choose another method, such as sparseloco",
        buffers="a step of powersgd takes two rounds of factors",
    ),
    "merge": Method(Replica, RoundSession, _barrier, _dense),
    "demo": Method(DemoReplica, RoundSession, _barrier, _sparse, _pieces, _LOWER_K),
    "eager": Method(EagerReplica, RoundSession, _overlap, _dense),
    "co2": Method(Co2Replica, RoundSession, _overlap, _dense),
    "buffered-async": Method(FedBuffReplica, RoundSession, _asynchronous, _dense),
    "delayed-nesterov": Method(DelayedNesterovReplica, RoundSession, _asynchronous, _dense),
    "streaming": Method(
        FragmentReplicas,
        FragmentSessions,
        FragmentLoop,
        _dense,
        _part,
        "raise outer.fragments: a round is for one part; or choose a codec with fewer bits per value",
        buffers="fragments have separate rounds, and buffers belong to no fragment",
        partial=True,
    ),
}
"""Outer method -> its parts."""

SPARSE_STREAMING = replace(METHODS["streaming"], codec=_sparse, cut=_sparse_part, smaller=_LOWER_K)
"""Streaming with a sparse codec for each fragment's pseudo-gradient."""


def method_of(manifest: Manifest) -> Method:
    """Return the parts of a manifest's method."""
    method = METHODS[manifest.outer.method]
    return SPARSE_STREAMING if method.partial and manifest.sparse else method


def fitted(manifest: Manifest, layout: Layout) -> tuple[Any, Grid]:
    """Return codec and chunk grid for this layout. Raises ManifestError if the model is too large."""
    method = method_of(manifest)
    try:
        codec = method.codec(manifest, layout)
        if not layout.buffers.size:
            return codec, method.cut(manifest, layout, codec)
        codec = _with_buffers(manifest, method, codec, layout)
        cut = method.cut(manifest, layout, codec)
        largest = codec.nbytes(cut.size(0)) if isinstance(codec, BufferedCodec) else 0
        if largest > CHUNK_BYTES + CHUNK_BYTES // 16:
            raise ManifestError(
                f"the buffers of {layout.buffers.size} values are too large for a model of {layout.total} parameters",
                "register buffers that can be computed again with persistent=False; "
                "or the founder sets model.buffers = 'local'",
            )
        return codec, cut
    except ValueError as error:
        message = (
            f"exchange.codec {manifest.exchange.codec!r} does not suit a model of {layout.total} parameters: {error}"
        )
        raise ManifestError(message, method.smaller) from None


def _with_buffers(manifest: Manifest, method: Method, codec: Any, layout: Layout) -> Any:
    """Return a codec whose payloads also have the buffers. Raises ManifestError if there is none."""
    exchange, block = manifest.exchange, layout.buffers.block
    reason = method.buffers
    if not reason and exchange.topology != "butterfly":
        reason = f"exchange.topology = {exchange.topology!r} passes on sums"
    if not reason and exchange.collective == "sparse-butterfly":
        reason = "exchange.collective = 'sparse-butterfly' sends parts of sums"
    if not reason and exchange.rule.rule in NEEDS:
        reason = f"exchange.aggregation = {exchange.rule.rule!r} protects parameters only"
    if reason:
        names = ", ".join(piece.name for piece in layout.buffers.pieces[:3])
        raise ManifestError(
            f"the model has buffers ({names}{', …' if len(layout.buffers.pieces) > 3 else ''}), "
            f"which cannot be shared in this run: {reason}",
            "the founder sets model.buffers = 'local' to leave them to each peer, or a method such as diloco or sparseloco",
        )
    if isinstance(codec, SparseCodec):
        return replace(codec, block=block)
    return BufferedCodec(codec, block, layout.total)


def check_codec(manifest: Manifest, name: str) -> None:
    """Raise ManifestError for invalid parameters of a codec. `name`: name of the manifest's file."""
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
