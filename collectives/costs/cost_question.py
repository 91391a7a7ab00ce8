"""Question about the costs of a round: a model, its peers, their links, the settings of a manifest."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from thinwire.collectives.costs.exchange_bytes import bits_of
from thinwire.collectives.gossip.pair_codec import PairCodec, parse_pair_codec
from thinwire.compression.powersgd import PowerSGD
from thinwire.compression.registry import Named
from thinwire.compression.registry import dense as dense_codec
from thinwire.compression.registry import parse as parse_codec
from thinwire.compression.sparse.demo import Demo
from thinwire.compression.sparse.topk import Sparse
from thinwire.swarm.choices import MethodName, Topology
from thinwire.swarm.identity.errors import HintedError
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.manifest.tables import Exchange
from thinwire.swarm.method_specs.base import CostRow
from thinwire.swarm.method_specs.noloco import NoLoCo
from thinwire.swarm.method_specs.registry import METHODS


class PlanError(HintedError):
    """The costs of this model and these peers cannot be computed."""

    exit_code: ClassVar[int] = 2


class ModelSize(msgspec.Struct, frozen=True):
    """Size of a model: numbers of trained and frozen parameters, number of layers, and their width.

    Layers and width are 0 if they are unknown.
    """

    parameters: int
    frozen: int
    layers: int
    width: int


class PeerMachine(msgspec.Struct, frozen=True):
    """Equal peers: their number, bytes/s down and up, and seconds of one inner step."""

    count: int
    down: float
    up: float
    step: float


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Model, its peers, and the parameters of their exchange.

    The model and the peers:

    - `parameters`: number of trained parameters. `frozen`: number of parameters that no peer trains or sends.
    - `tokens`: of one inner step of one peer; 0: unknown.
    - `memory`: bytes that a peer has for training; 0: unknown.
    - `moments`: values per parameter that the inner optimizer stores.
    - `rtt`: round-trip time in seconds.
    - `line`: the line to the other sites that the peers of a site share; None: every peer has its own line.
    - `stages`: number of stages of the manifest's pipeline; 0: no pipeline.

    The exchange:

    - `every`: inner steps per round.
    - `method`, `topology`, `quorum`: those of the manifest. `grace`: seconds.
    - `turns`: number of fragments with separate rounds.
    - `hidden`: True if the method trains during an exchange.
    - `sized`: True if chunks are assigned by bandwidth.
    - `codec`: a dense codec, for the methods that need one. `own_codec`: the codec of the manifest's method if that is
      another kind, with `own_bits` per parameter.
    - `lr`, `gamma`: β and γ of NoLoCo. `group`: number of peers of a gossip group. `parts`: number of parts of the slow
      weights (`outer.slow_weight_parts`).

    `assumed`: names of the values that were not given.
    """

    name: str
    parameters: int
    frozen: int = 0
    layers: int
    width: int
    tokens: int
    machines: tuple[PeerMachine, ...]
    rtt: float
    every: int
    codec: str
    method: MethodName
    topology: Topology
    lr: float
    gamma: float
    grace: float
    quorum: float
    memory: float
    moments: int
    sized: bool = True
    group: int = 2
    parts: int = 1
    assumed: tuple[str, ...]
    line: PeerMachine | None = None
    own_codec: str = ""
    own_bits: float = 0.0
    hidden: bool = False
    turns: int = 1
    stages: int = 0

    @property
    def row(self) -> CostRow:
        """Row of the manifest's method in the planner's table of methods."""
        return METHODS[self.method].costs

    @property
    def paired(self) -> bool:
        """True if rounds are those of pairs or gossip groups."""
        return METHODS[self.method].gossip

    @property
    def peers(self) -> int:
        return sum(machine.count for machine in self.machines)

    @property
    def codecs(self) -> PairCodec:
        """Codec of what one partner of a pair sends."""
        own = self.own_codec if self.paired and self.own_codec else self.codec
        return parse_pair_codec(own, lr=self.lr, gamma=self.gamma, parts=self.parts)

    @property
    def latency(self) -> float:
        """One-way latency in seconds."""
        return self.rtt / 2


def question_of(
    settings: Manifest,
    size: ModelSize,
    *,
    name: str,
    tokens: int,
    machines: tuple[PeerMachine, ...],
    rtt: float,
    every: int = 0,
    codec: str = "",
    memory: float = 0.0,
    line: PeerMachine | None = None,
    assumed: tuple[str, ...] = (),
) -> Question:
    """Return the question that a manifest asks with these peers.

    every, codec: those of the manifest, if not given. Raises SpecError for a codec that cannot be used.
    """
    gossip = settings.method(NoLoCo) if settings.outer.gossip else NoLoCo()
    own = parse_codec(settings.exchange.codec)
    own_bits = _bits(own, size.width)
    return Question(
        name=name,
        parameters=size.parameters,
        frozen=size.frozen,
        layers=size.layers,
        width=size.width,
        tokens=tokens,
        machines=machines,
        rtt=rtt,
        every=every or settings.outer.sync_every,
        codec=dense_codec(codec or (Exchange().codec if own_bits else settings.exchange.codec)).spec,
        method=settings.outer.method,
        topology=settings.exchange.topology,
        lr=gossip.lr,
        gamma=gossip.gamma,
        grace=settings.exchange.timeout_seconds,
        quorum=settings.quorum,
        memory=memory,
        moments=2 if settings.inner.optimizer == "adamw" else 1,
        sized=settings.exchange.chunk_assignment == "bandwidth" and settings.exchange.topology == "butterfly",
        group=settings.exchange.gossip_group_size,
        parts=gossip.slow_weight_parts,
        assumed=assumed,
        line=line,
        own_codec=own.spec if own_bits else "",
        own_bits=own_bits,
        hidden=settings.overlap > 0,
        turns=settings.outer.fragment_count,
        stages=settings.pipeline.stages,
    )


def _bits(codec: Named, width: int) -> float:
    """Return the bits per parameter of a codec that is not dense, for matrices of width × width; or 0."""
    if isinstance(codec, Sparse | Demo):
        return bits_of(codec)
    return 2 * 32 * codec.rank / width if isinstance(codec, PowerSGD) else 0.0
