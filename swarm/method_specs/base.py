"""MethodSpec: the base of all outer methods, and the types of keys that several methods share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias, cast

import msgspec
from msgspec import Meta
from thinwire.swarm.choices import Balancing, Collective, Denominator, MethodName, OnExclusion
from thinwire.swarm.messages.registry import MAX_GROUP

Steps: TypeAlias = Annotated[int, Meta(ge=1, le=2**20)]
LearningRate: TypeAlias = Annotated[float, Meta(gt=0, le=10)]
Momentum: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]
StepRatio: TypeAlias = Annotated[float, Meta(ge=1, le=1000)]
ResidualDecay: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Staleness: TypeAlias = Annotated[int, Meta(ge=0, le=2**20)]
StalenessExponent: TypeAlias = Annotated[float, Meta(ge=0, le=10)]
BufferSize: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_GROUP)]

DENSE = ("fp32", "fp16", "bf16", "int8", "int4", "int3", "e3m0")
"""Codecs of all elements of a vector, by the first word of their names."""

DEFAULT_RATIO = 4.0
"""Default of max_step_ratio."""

CostRow: TypeAlias = Literal["diloco", "streaming", "eager", "sparseloco", "powersgd", "noloco"]
"""Method of the planner's table, see collectives/costs/method_costs.py."""

Defaults: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Table of a manifest -> key -> default value."""


class ManifestTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of a manifest."""


class OuterSgd(NamedTuple):
    """Hyper-parameters of the outer SGD on the mean pseudo-gradient. The default is the plain average."""

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False


class ResidualRule(NamedTuple):
    """Error feedback: decay of the residual, denominator of the mean, rule for excluded contributions."""

    decay: float = 0.95
    denominator: Denominator = "bounded_contributor_mean"
    on_exclusion: OnExclusion = "drop"


class MethodSpec(ManifestTable, frozen=True, tag_field="method"):
    """Outer method: the fields are its keys of [outer], the class variables are its facts.

    sync_every: H, inner steps between two exchanges of the same part of the model. A larger H saves traffic, a smaller one
        keeps replicas closer together.

    `defaults` changes defaults of other tables. `required` names values of other tables that the method cannot do without,
    with the hint for a user who set another one. A new method is a subclass in a new file, and a row in registry.py.
    """

    codecs: ClassVar[tuple[str, ...]] = DENSE
    """Usable codecs, by the first word of their names."""
    collective: ClassVar[Collective] = "butterfly"
    """Collective of the method, `exchange.collective`."""
    collectives: ClassVar[tuple[Collective, ...]] = ()
    """Other collectives that the method can use."""
    later: ClassVar[tuple[str, ...]] = ()
    """Keys that were added after the first runs."""
    defaults: ClassVar[Defaults] = {}
    required: ClassVar[Mapping[str, tuple[Mapping[str, object], str, str]]] = {}
    """Table -> (key -> value, error message, hint)."""
    asynchronous: ClassVar[bool] = False
    """True if a round has the contributors that are ready, while the other peers train on and follow."""
    gossip: ClassVar[bool] = False
    """True if a round has a few partners instead of all peers; replicas then differ."""
    gathers_first: ClassVar[bool] = False
    """True if the run begins with a round without training, which makes the present peers members."""
    tracks_data: ClassVar[bool] = False
    """True if the swarm can record the used data (`data.exactly_once`)."""
    private_start: ClassVar[bool] = False
    """True if a peer trains from parameters that only it knows."""
    fragmented: ClassVar[bool] = False
    """True if each fragment of the model has separate rounds."""
    scored: ClassVar[bool] = False
    """True if members can score contributions, which have values of the whole model."""
    computable: ClassVar[bool] = False
    """True if other peers can compute a contribution from the state and the model of its peer.

    It is the outer parameters minus those of the model, so that the codec must have no residual.
    """
    costs: ClassVar[CostRow] = "diloco"
    """Row of the planner's table of methods with this method's costs."""
    rounds_per_step: ClassVar[int] = 1
    """Rounds of one outer step."""
    fixed_timeout: ClassVar[str] = ""
    """Reason why `exchange.straggler_timeout = "auto"` does not apply; empty if it does."""

    sync_every: Steps = 20

    @property
    def method(self) -> MethodName:
        """Name of the method in a manifest."""
        return method_name(type(self))

    @property
    def sgd(self) -> OuterSgd:
        """Hyper-parameters of the outer SGD."""
        return OuterSgd()

    @property
    def sign_decay(self) -> float:
        """Weight decay of a sign step; 0 without one."""
        return 0.0

    @property
    def residual(self) -> ResidualRule:
        """Rule of error feedback, for codecs that have one."""
        return ResidualRule()

    def lr_at(self, round: int) -> float:
        """Return the outer learning rate of a round."""
        return self.sgd.lr

    @property
    def step_ratio(self) -> float:
        """Maximum ratio of a peer's inner steps to `sync_every`; 1: all peers make equally many steps."""
        return 1.0

    @property
    def round_steps(self) -> int:
        """Inner steps between two rounds."""
        return self.sync_every

    @property
    def overlap_steps(self) -> int:
        """Inner steps of `round_steps` that a peer makes while the exchange is in progress."""
        return 0

    @property
    def lag(self) -> int:
        """Turns of other fragments that pass before the result of a fragment is awaited."""
        return 0

    @property
    def fragment_count(self) -> int:
        """Number of fragments of the model, which take turns."""
        return 1

    def steps_after(self, round: int) -> int:
        """Return the inner steps of a peer up to the end of a round."""
        return round // self.rounds_per_step * self.round_steps

    def adjusted(self, sparse: bool, stages: int) -> Defaults:
        """Return defaults that depend on the codec and on the number of pipeline stages."""
        return {}

    def contradictions(self, sparse: bool) -> Iterator[tuple[str, str]]:
        """Yield pairs of a message and a hint for values of the method's own keys that exclude each other."""
        return iter(())

    def warnings(self) -> tuple[str, ...]:
        """Return warnings about values that are allowed but unwise."""
        return ()


def method_name(kind: type[MethodSpec]) -> MethodName:
    """Return the name of a method in a manifest."""
    return cast(MethodName, kind.__struct_config__.tag)


def balanced(how: Balancing, most: float) -> float:
    """Return the step ratio of a method with the keys step_balancing and max_step_ratio."""
    return most if how == "by-speed" else 1.0


def unused_ratio(how: Balancing, most: float) -> Iterator[tuple[str, str]]:
    """Yield a contradiction if max_step_ratio is set without step balancing."""
    if how == "equal" and most != DEFAULT_RATIO:
        yield (
            "outer.max_step_ratio only applies with outer.step_balancing = 'by-speed'",
            "remove the key, or set outer.step_balancing = 'by-speed'",
        )
