"""Interface between a peer and what it trains.

Its implementations are real training in a worker thread, and simulated training in virtual time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from thinwire.compression.core.types import Floats
from thinwire.node.state.data_ledger import DataLease
from thinwire.node.state.layout import Layout
from thinwire.node.state.snapshot import PrivateState
from thinwire.swarm.messages.registry import PeerId


class Stop(Protocol):
    """Flag that inner steps must end early; read from the training thread."""

    def is_set(self) -> bool:
        """Return True if the inner steps must end."""
        ...


@dataclass(frozen=True, slots=True)
class WorkShare:
    """This peer's share of the work of a round.

    `group`: the peers that share the data, including `me`. `round`: the last committed round. `lease`: data that the
    peer may use, if the swarm has a data ledger. `trial`: the peer is on trial, and trains on the batches assigned to it, see
    `Learner.score`. `step`: inner steps that every peer has made before, according to the swarm's rounds.
    """

    group: Sequence[PeerId]
    me: PeerId
    round: int
    lease: DataLease | None = None
    step: int = 0
    trial: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of inner steps.

    Has their number, mean and last loss (nats per token; NaN: unknown), tokens, seconds.
    """

    steps: int
    loss: float
    last: float
    tokens: int
    seconds: float


NOTHING = StepReport(0, math.nan, math.nan, 0, 0.0)
"""Report without any step."""


def together(first: StepReport, second: StepReport) -> StepReport:
    """Return the combined report of two consecutive ones."""
    if not (first.steps and second.steps):
        return second if second.steps else first
    steps = first.steps + second.steps
    known = [one for one in (first, second) if not math.isnan(one.loss)]
    counted = sum(one.steps for one in known)
    mean = sum(one.loss * one.steps for one in known) / counted if counted else math.nan
    last = known[-1].last if known else math.nan
    return StepReport(steps, mean, last, first.tokens + second.tokens, first.seconds + second.seconds)


class Learner(Protocol):
    """The trained model and its data.

    Calls never overlap. `steps` and the quick methods (`layout`, `assign`, `restore`, `skip_to`) run on the loop's
    thread, all others where computing is allowed (`Work`).
    """

    @property
    def layout(self) -> Layout:
        """Names and shapes of the parameters; its digest is equal on all peers."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        ...

    def parameters(self) -> Floats:
        """Return a copy of all parameters as flat float32; before the first step they are equal on every peer."""
        ...

    def read(self, start: int, stop: int, out: Any) -> None:
        """Copy parameters [start, stop) as float32 to an array, or on an accelerator to a tensor on `device`."""
        ...

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        """Set parameters [start, start + theta.size) to keep · current + (1 − keep) · theta."""
        ...

    def assign(self, share: WorkShare) -> None:
        """Train on this peer's share of the data."""
        ...

    async def steps(self, n: int, stop: asyncio.Event) -> StepReport:
        """Run `n` inner steps, or fewer if `stop` is set before or meanwhile."""
        ...

    def score(self, base: Floats, step: Floats, peer: PeerId, round: int, salt: bytes) -> tuple[float, float]:
        """Return how much the loss falls from parameters `base` to base - step, on two batches.

        The first one is assigned to `peer` after `round`, if it is on trial; the second one is another. `salt`, known to
        this peer only, draws them. Changes nothing.
        """
        ...

    def private(self) -> PrivateState | None:
        """Return the state that only this peer has, for a checkpoint that is written before the next step."""
        ...

    def restore(self, private: PrivateState) -> bool:
        """Restore the private state of a checkpoint; return False if it does not fit."""
        ...

    def skip_to(self, round: int, peers: int) -> None:
        """Set the state of a peer that has trained for `round` rounds in a group of `peers`."""
        ...
