"""Scenario: the peers, their links, the run, and the faults. Read from a file by `parser.py`.

A scenario does not depend on the level at which it is played: virtual time, real processes behind proxies, or
namespaces. Times are seconds since the start (virtual ones in virtual time), rates bytes per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from thinwire.sims.network.regions import PATHS, Path
from thinwire.sims.network.translator import Nat
from thinwire.sims.scenario.faults import Fault, Mix


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """Peer of a scenario: name, capabilities, and times of arrival and departure.

    `step_seconds`: one inner step on its machine. `up`, `down`: its access link in bytes/s. `leave`: time of a graceful
    leave, or None. `liar`: kind of lie, "" for an honest peer. `loss` (probability) and `jitter` (mean extra one-way
    seconds) of its own link, in addition to the scenario's. `site`: announced site. `held`: fragments of the model that
    it holds; None: all. `stage`: the one stage that it holds in the group of the peer of index `origin`, which itself
    holds stage 0; None: no stage. `memory`: bytes for training, so that it chooses a stage if the model does not fit;
    0: enough. `nat`: kind of its own address translator. The last five in virtual time only.
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
    nat: Nat = "none"


@dataclass(frozen=True, slots=True)
class Scenario:
    """Scenario of a simulation: everything but its code.

    `manifest`: the run's TOML. `compute`: "stub" (a model of `parameters` values that learns by formula, for large
    swarms) or "torch" (the manifest's model, really trained). `paths`: (region, region) -> Path, both orders. `jitter`:
    exponentially distributed part of the latency; `loss`: probability that a packet is lost. `faults` are scripted;
    `mix` is the rate of faults drawn from the seed. `interval`: seconds between two samples. `lines`: bytes/s down and
    up of the shared link of each site, `nats`: kind of the address translator of each site that has one; both in virtual
    time only.
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
    nats: Mapping[str, Nat] = field(default_factory=dict)

    @property
    def translated(self) -> bool:
        """True if some peers are behind address translators."""
        return bool(self.nats) or any(peer.nat != "none" for peer in self.peers)

    def path(self, i: int, j: int) -> Path:
        """Return the path between the regions of two peers."""
        return self.paths[self.peers[i].region, self.peers[j].region]

    def latency(self, i: int, j: int) -> float:
        """Return the one-way seconds from peer i to peer j, without jitter."""
        return self.path(i, j).rtt / 2

    def stream(self, i: int, j: int) -> float | None:
        """Return the maximum rate of a connection from i to j in bytes/s; None: only access links limit it."""
        return self.path(i, j).stream

    def with_(
        self, *, seed: int | None = None, duration: float | None = None, faults: tuple[Fault, ...] | None = None
    ) -> Scenario:
        """Return the scenario with another seed or duration; `faults` replace all, including drawn ones."""
        new = self
        if seed is not None:
            new = replace(new, seed=seed)
        if duration is not None:
            new = replace(new, duration=duration)
        if faults is not None:
            new = replace(new, faults=faults, mix={})
        return new
