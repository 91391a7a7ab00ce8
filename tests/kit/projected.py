"""Scenario in which weak peers train a projection of the model, beside peers that train all of it."""

from __future__ import annotations

from typing import Any

from kit import groups
from kit.scenarios import INT8, swarm_of
from thinwire.sims.scenario.scenario import PeerSpec, Scenario

TOML = """
[run]
rounds = 0
[model]
layers = 3
width = 8
heads = 2
context = 8
[inner]
lr = 0.003
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


def scenario(*others: PeerSpec, codec: str = INT8, **more: Any) -> Scenario:
    """Return two full peers, a group of three, and `others`."""
    peers = (*groups.FULL, *groups.GROUP, *others)
    return swarm_of(peers, TOML.format(codec=codec), compute="torch", **more)
