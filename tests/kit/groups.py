"""Scenarios with groups of weak peers that share one model, beside peers that hold all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kit import scenarios
from kit.scenarios import INT8, events_of, one_state, rounds_of, swarm_of
from thinwire.sims.scenario.scenario import PeerSpec, Scenario
from thinwire.sims.simulation.world import SimulatedRun

MODEL = """
[model]
layers = {stages}
width = 8
heads = 2
context = 8
[inner]
batch = 1
accumulate = 2
warmup = 0
"""
PLANNED = 'microbatches = 4\npaths = "planned"\nskip_fraction = 0.34\n'
"""Lines of [pipeline]: the origin plans the paths of micro-batches."""

WEAK = 0.15 * 2**20
"""Bytes: less than the whole model takes, more than any stage does."""


def peer(index: int, *, stage: int | None = None, origin: int = 2, step: float = 0.5, **more: Any) -> PeerSpec:
    """Return a peer that holds a stage of the group of peer `origin`, or all of the model."""
    return scenarios.peer(index, step=step, stage=stage, origin=origin, **more)


def host(index: int, stage: int, *, origin: int = 2, join: float = 0.2, step: float = 0.1) -> PeerSpec:
    """Return a peer of a group that holds a stage."""
    return peer(index, stage=stage, origin=origin, join=join, step=step)


def weak(index: int, *, join: float = 0.2, step: float = 0.1) -> PeerSpec:
    """Return a peer whose memory is too small for the model, and that finds a stage by itself."""
    return peer(index, join=join, step=step, memory=WEAK)


FULL = (peer(0), peer(1))
GROUP = (host(2, 0), host(3, 1), host(4, 2))


def scenario(
    peers: Sequence[PeerSpec] = (*FULL, *GROUP),
    *,
    pipeline: str = "",
    outer: str = "",
    stages: int = 3,
    seconds: float = 20.0,
    **more: Any,
) -> Scenario:
    """Return a swarm that trains a small model for real. `pipeline`, `outer`: more lines of these tables."""
    toml = f'[run]\nrounds = 0\n[outer]\nmethod = "streaming"\nsync_every = {2 * stages}\n{outer}'
    toml += f"[pipeline]\nstages = {stages}\n"
    toml += f'codec = "fp32"\n{pipeline}[exchange]\nstraggler_timeout = 1.0\n{MODEL.format(stages=stages)}'
    return swarm_of(peers, toml, compute="torch", seconds=seconds, **more)


def agreed(run: SimulatedRun) -> Mapping[int, Mapping[int, str]]:
    """Check that each fragment has one state on all peers after each of its rounds.

    Returns peer -> {round: digest}.
    """
    return one_state(rounds_of(run, "round"))


def contributors(run: SimulatedRun, number: int) -> set[int]:
    """Return the numbers of contributors of a round, as its members report them."""
    return {event.fields["contributors"] for event in events_of(run, "round") if event.fields["round"] == number}


PROJECTED = """
[run]
rounds = 0
[model]
layers = 3
width = 8
heads = 2
context = 8
[inner]
lr = 0.03
batch = 1
accumulate = 2
warmup = 0
[outer]
method = "streaming"
sync_every = 6
[pipeline]
stages = 3
codec = "subspace(k=2)"
[exchange]
straggler_timeout = 1.0
codec = "{codec}"
"""
"""Manifest of a run in which weak peers train a projection of the model, beside peers that train all of it."""


def projected(*others: PeerSpec, codec: str = INT8, **more: Any) -> Scenario:
    """Return two full peers, a group of three that trains a projection of the model, and `others`."""
    peers = (*FULL, *GROUP, *others)
    return swarm_of(peers, PROJECTED.format(codec=codec), compute="torch", **more)
