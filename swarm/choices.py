"""Closed sets of strings in manifests and code, as types.

So the type checker finds a name that is misspelt or was changed. `compression/core/types.py` has those of the codecs.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

MethodName: TypeAlias = Literal[
    "diloco",
    "muloco",
    "noloco",
    "sparseloco",
    "powersgd",
    "merge",
    "demo",
    "eager",
    "co2",
    "buffered-async",
    "delayed-nesterov",
    "streaming",
]
Collective: TypeAlias = Literal["butterfly", "all-gather", "sparse-butterfly"]
Topology: TypeAlias = Literal["butterfly", "ring", "hierarchy"]
Aggregation: TypeAlias = Literal[
    "clip",
    "mean",
    "rda",
    "centered-clip",
    "trimmed-mean",
    "median",
    "geometric-median",
    "flag",
    "krum",
    "multi-krum",
    "bulyan",
]
AdmissionMode: TypeAlias = Literal["closed", "invited", "open"]
SlowPeers: TypeAlias = Literal["report", "no-ownership"]
OnSplit: TypeAlias = Literal["merge", "discard"]
ChunkAssignment: TypeAlias = Literal["bandwidth", "equal"]
Balancing: TypeAlias = Literal["equal", "by-speed"]
Denominator: TypeAlias = Literal["bounded_contributor_mean", "contributor_mean", "mean"]
OnExclusion: TypeAlias = Literal["drop", "restore"]
ModelKind: TypeAlias = Literal["transformer", "module", "hf", "custom"]
BufferRule: TypeAlias = Literal["average", "heaviest", "local"]
InnerOptimizer: TypeAlias = Literal["adamw", "sgd", "muon"]
RateSchedule: TypeAlias = Literal["constant", "cosine"]
Precision: TypeAlias = Literal["auto", "fp32", "bf16"]
StageGradient: TypeAlias = Literal["all", "visits"]
StagePaths: TypeAlias = Literal["round-robin", "planned"]
