"""The seam between a peer's life and what it trains: real training in a worker thread, or made-up training in virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from thinwire.compression.codec import Floats
from thinwire.swarm.protocol import PeerId

from .fragments import Layout
from .ledger import Lease
from .snapshot import PrivateState


class Stop(Protocol):
    """Whether inner steps shall end early; looked at from the thread that trains."""

    def is_set(self) -> bool:
        """Whether they shall."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """What is this peer's of the work of a round. `group`: the peers that share the data, `me` among them. `round`: the last
    one that was committed. `lease`: what of the data it may use, where the swarm keeps book of it. `step`: inner steps that all
    have made before these, as the swarm's rounds count them.
    """

    group: Sequence[PeerId]
    me: PeerId
    round: int
    lease: Lease | None = None
    step: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """What inner steps came to: their number, mean and last loss (nats per token; NaN: not known), tokens, seconds."""

    steps: int
    loss: float
    last: float
    tokens: int
    seconds: float


NOTHING = StepReport(0, math.nan, math.nan, 0, 0.0)
"""No step."""


def together(first: StepReport, second: StepReport) -> StepReport:
    """What both come to, the second after the first."""
    if not (first.steps and second.steps):
        return second if second.steps else first
    steps = first.steps + second.steps
    heard = [one for one in (first, second) if not math.isnan(one.loss)]
    seen = sum(one.steps for one in heard)
    mean = sum(one.loss * one.steps for one in heard) / seen if seen else math.nan
    last = heard[-1].last if heard else math.nan
    return StepReport(steps, mean, last, first.tokens + second.tokens, first.seconds + second.seconds)


class Learner(Protocol):
    """What is trained. One call at a time: `steps`, and what is quick (`layout`, `assign`, `restore`, `skip_to`), on the loop's
    thread; all else where computing is allowed (`Work`).
    """

    @property
    def layout(self) -> Layout:
        """Names and shapes of the parameters; its digest is equal on all peers."""
        ...

    def parameters(self) -> Floats:
        """A copy of all parameters as flat float32; before the first step they are equal on every peer."""
        ...

    def read(self, start: int, stop: int, out: Floats) -> None:
        """Copy parameters [start, stop) as float32."""
        ...

    def write(self, theta: Floats, start: int = 0, keep: float = 0.0) -> None:
        """Set parameters [start, start + theta.size) to keep · what they are + (1 − keep) · theta."""
        ...

    def assign(self, share: Share) -> None:
        """Train on the data that is this peer's share."""
        ...

    async def steps(self, n: int, stop: asyncio.Event) -> StepReport:
        """Make `n` inner steps; fewer when `stop` is set on the way, or before."""
        ...

    def private(self) -> PrivateState | None:
        """What only this peer has, for a checkpoint that is written before the next step."""
        ...

    def restore(self, private: PrivateState) -> bool:
        """Take up the private state of a checkpoint; False when it does not fit."""
        ...

    def skip_to(self, round: int, peers: int) -> None:
        """Stand where a peer stands that has trained for `round` rounds in a group of `peers`."""
        ...
