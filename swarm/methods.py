"""What each outer method changes in a manifest's defaults, what it has no use for, and which codecs it can have."""

from __future__ import annotations

NOLOCO: dict[str, float | bool] = {"steps": 50, "lr": 0.7, "momentum": 0.5, "nesterov": False, "gamma": 0.7}
"""Defaults of [outer] that the method "noloco" changes: the values of its paper; it has none for gamma, its code takes lr."""

SPARSELOCO: dict[str, float | bool] = {"steps": 30, "lr": 1.0, "momentum": 0.0, "nesterov": False}
"""Defaults of [outer] that the method "sparseloco" changes: the values of its paper."""

DEMO: dict[str, float | bool] = {"steps": 1, "lr": 4e-4, "momentum": 0.0, "nesterov": False, "beta": 0.999}
"""Defaults of [outer] that the method "demo" changes: the values of its paper."""

MULOCO: dict[str, float | bool] = {"steps": 30, "lr": 0.7, "momentum": 0.6}
"""Defaults of [outer] that the method "muloco" changes: the values of its paper."""

MERGE: dict[str, float | bool] = {"steps": 1000, "lr": 1.0, "momentum": 0.0, "nesterov": False}
"""Defaults of [outer] that the method "merge" changes: the plain average."""

STREAMING: dict[str, float | bool] = {"steps": 30, "lr": 0.4}
"""Defaults of [outer] that the method "streaming" changes: the values of its paper."""

SPARSE_STREAMING: dict[str, float | bool] = {"lr": 1.0, "momentum": 0.0, "nesterov": False, "alpha": 0.0}
"""Defaults of [outer] that "streaming" changes once more where a small part is sent."""

EAGER: dict[str, float | bool] = {"steps": 30, "lr": 0.2}
"""Defaults of [outer] that the method "eager" changes."""

CO2: dict[str, float | bool] = {"steps": 30, "lr": 1.0, "momentum": 0.2, "nesterov": False}
"""Defaults of [outer] that the method "co2" changes."""

BUFFERED: dict[str, float | bool] = {"steps": 30, "lr": 1.0, "momentum": 0.0, "nesterov": False}
"""Defaults of [outer] that the method "buffered-async" changes: the plain average."""

DELAYED: dict[str, float | bool] = {"steps": 30, "lr": 0.7, "momentum": 0.9, "nesterov": False}
"""Defaults of [outer] that the method "delayed-nesterov" changes."""

OUTER: dict[str, dict[str, float | bool]] = {
    "diloco": {},
    "muloco": MULOCO,
    "noloco": NOLOCO,
    "sparseloco": SPARSELOCO,
    "demo": DEMO,
    "powersgd": {},
    "merge": MERGE,
    "streaming": STREAMING,
    "eager": EAGER,
    "co2": CO2,
    "buffered-async": BUFFERED,
    "delayed-nesterov": DELAYED,
}
"""Method -> its defaults of [outer]."""

_SPARSE = ("beta", "denominator", "on_exclusion")
_PARTS = ("fragments", "overlap", "alpha")
_POWER = ("work", "spread")
_LATE = ("late", "late_lr")
_STALE = ("staleness", "fade", "arrivals")
_AGE = ("clip", *_STALE)
FOREIGN = {
    "diloco": ("gamma", "decay", *_SPARSE, *_PARTS, *_LATE, *_AGE),
    "muloco": ("gamma", "decay", *_SPARSE, *_PARTS, *_LATE, *_AGE),
    "noloco": ("nesterov", "decay", *_SPARSE, *_POWER, *_PARTS, *_LATE, *_AGE),
    "sparseloco": ("momentum", "nesterov", "gamma", "decay", *_PARTS, *_AGE),
    "demo": ("momentum", "nesterov", "gamma", *_POWER, *_PARTS, *_LATE, *_AGE),
    "powersgd": ("gamma", "decay", "beta", "denominator", *_PARTS, *_LATE, *_AGE),
    "merge": ("lr", "momentum", "nesterov", "gamma", "decay", *_SPARSE, *_POWER, *_PARTS, *_LATE, *_AGE),
    "streaming": ("gamma", "decay", *_SPARSE, *_POWER, *_LATE, *_AGE),
    "eager": ("gamma", "decay", *_SPARSE, *_POWER, *_PARTS, *_LATE, *_AGE),
    "co2": ("nesterov", "gamma", "decay", *_SPARSE, *_POWER, *_PARTS, *_LATE, *_STALE),
    "buffered-async": ("gamma", "decay", *_SPARSE, *_PARTS, *_LATE, "clip"),
    "delayed-nesterov": ("nesterov", "gamma", "decay", *_SPARSE, *_PARTS, *_LATE, "clip"),
}
"""Keys of [outer] that a method has no use for."""

DENSE = ("fp32", "fp16", "bf16", "int8", "int4", "int3", "e3m0")
CODECS = {
    "diloco": DENSE,
    "muloco": DENSE,
    "noloco": DENSE,
    "sparseloco": ("topk",),
    "demo": ("demo",),
    "powersgd": ("powersgd",),
    "merge": DENSE,
    "streaming": (*DENSE, "topk"),
    "eager": DENSE,
    "co2": DENSE,
    "buffered-async": DENSE,
    "delayed-nesterov": DENSE,
}
"""Method -> the codecs that it can have, by the first word of their names."""

EXCHANGE: dict[str, dict[str, str | float]] = {
    "sparseloco": {"codec": "topk(k=64,chunk=4096)|2bit|rice", "collective": "gather"},
    "demo": {"codec": "demo(k=32,chunk=4096)|2bit|rice", "collective": "gather"},
    "powersgd": {"codec": "powersgd(rank=4)"},
    "merge": {"codec": "fp32", "grace": 3600.0},
    "buffered-async": {"grace": 2.0},
    "delayed-nesterov": {"grace": 2.0},
}
"""Method -> its defaults of [exchange]."""

RUN: dict[str, dict[str, object]] = {"merge": {"rounds": 2}}
"""Method -> its defaults of [run]."""

DATA: dict[str, dict[str, object]] = {"merge": {"domains": True}}
"""Method -> its defaults of [data]."""

ASYNCHRONOUS = ("buffered-async", "delayed-nesterov")
"""Methods whose rounds are of whoever is ready, while the others train on."""

UNBOOKED = ("noloco", "powersgd", "merge", "streaming", "eager", "co2", *ASYNCHRONOUS)
"""Methods that cannot keep book of the data: replicas differ, a step is two rounds, rounds overlap, or there is but one."""

INNER: dict[str, dict[str, object]] = {
    "muloco": {"optimizer": "muon"},
    "demo": {"optimizer": "sgd", "lr": 1.0, "betas": (0.0, 0.0), "weight_decay": 0.0, "warmup": 0},
}
"""Method -> its defaults of [inner]."""

MUON: dict[str, object] = {"lr": 0.02}
"""Defaults of [inner] that the optimizer "muon" changes: the values of MuLoCo's paper."""

ONLY_MUON = ("adam_lr", "momentum")
"""Keys of [inner] that other optimizers have no use for; younger than the first runs, whose ids must stay."""

PIPELINE: dict[str, float] = {"overlap": 0, "alpha": 0.0}
"""Defaults of [outer] that a model in stages changes, beside as many fragments as stages: a round is waited for."""

BOUNDARIES = ("fp32", "bf16", "fp16", "rows", "tah", "subspace")
"""Codecs of what crosses between stages, by the first word of their names."""


def gamma_limit(momentum: float, peers: int | None = None, group: int = 2) -> float:
    """The gamma from which on replicas that train nothing drift apart for ever, with random groups of `group` among `peers`
    (None: many, where it is lowest).

    Exact: the second moments of the deviations follow a linear map; its largest eigenvalue is below 1 for 0 < γ below this.
    With u a deviation and ū the mean of its group, E[ū²] = E[uū] = ρ E[u²], where ρ = (groups − 1) / (peers − 1) whatever
    the sizes are; so δ' = αδ − γ(u − ū) has the limit 2 (1 − α²) / (1 − α + 2αρ).
    """
    alike = (-(-peers // group) - 1) / (peers - 1) if peers else 1 / group
    return 2 * (1 - momentum**2) / (1 - momentum + 2 * momentum * alike)
