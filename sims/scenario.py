"""A scenario: which peers, on which links, run what, and what happens to them. Read from a file by `scenariofile.py`.

Nothing in it depends on the level at which it is played: virtual time, real processes behind proxies, or namespaces.
Times are seconds since the start (virtual ones in virtual time), rates bytes per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .faults import Fault, Mix
from .regions import PATHS, Path


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """One peer: who it is, what it can do, and when it comes and goes.

    `step_seconds`: one inner step on its machine. `up`, `down`: its access link in bytes/s. `leave`: None, or when it says
    goodbye. `liar`: "" for an honest peer, else how it lies. `loss` (probability) and `jitter` (mean extra one-way seconds)
    are those of its own link, on top of the scenario's. `site`: what it says that it shares a fast network with.
    `held`: the fragments of the model that it holds; None: all. `stage`: the one stage that it holds of the group of the
    peer of index `origin`, which itself holds stage 0; None: no stage. `memory`: bytes that it has for training, so that it
    finds a stage by itself where the model does not fit; 0: enough. All in virtual time only.
    """

    index: int
    name: str
    region: str
    step_seconds: float
    up: float
    down: float
    join: float = 0.0
    leave: float | None = None
    liar: str = ""
    loss: float = 0.0
    jitter: float = 0.0
    group: str = ""
    site: str = ""
    held: tuple[int, ...] | None = None
    stage: int | None = None
    origin: int = 0
    memory: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything a simulation needs but its code.

    `manifest`: the run's TOML. `compute`: "stub" (a model of `parameters` values that learns by formula, for scale) or
    "torch" (the manifest's model, really trained). `paths`: (region, region) -> Path, both orders. `jitter`: part of the
    latency that is exponentially distributed; `loss`: probability that a packet is lost. `faults` are scripted, `mix` says
    how many more are drawn from the seed. `interval`: seconds between two samples. `lines`: bytes/s down and up that the
    peers of a site share to all others, by the site's name; in virtual time only.
    """

    name: str
    seed: int
    duration: float
    manifest: str
    peers: tuple[PeerSpec, ...]
    about: str = ""
    compute: str = "stub"
    parameters: int = 100_000
    paths: Mapping[tuple[str, str], Path] = field(default_factory=lambda: PATHS)
    jitter: float = 0.0
    loss: float = 0.0
    faults: tuple[Fault, ...] = ()
    mix: Mix = field(default_factory=dict)
    interval: float = 5.0
    lines: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def path(self, i: int, j: int) -> Path:
        """Between the regions of two peers."""
        return self.paths[self.peers[i].region, self.peers[j].region]

    def latency(self, i: int, j: int) -> float:
        """One-way seconds from peer i to peer j, without jitter."""
        return self.path(i, j).rtt / 2

    def stream(self, i: int, j: int) -> float | None:
        """Bytes/s that one connection from peer i to peer j can carry at most; None: only their access links count."""
        return self.path(i, j).stream

    def with_(
        self, *, seed: int | None = None, duration: float | None = None, faults: tuple[Fault, ...] | None = None
    ) -> Scenario:
        """The same with another seed or duration; `faults` replace all that the scenario has, drawn ones too."""
        new = self
        if seed is not None:
            new = replace(new, seed=seed)
        if duration is not None:
            new = replace(new, duration=duration)
        if faults is not None:
            new = replace(new, faults=faults, mix={})
        return new
