"""Comparison of the rounds of this process with a plan for its peers and their measured links."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.collectives.costs.cost_question import ModelSize, PeerMachine, question_of
from thinwire.collectives.costs.method_costs import methods, row_of
from thinwire.collectives.costs.plan_outcome import Comparison, RunOutcome, comparison, outcome_of
from thinwire.collectives.costs.round_costs import round_costs
from thinwire.collectives.topology.bandwidth_shares import PeerLoad, filled
from thinwire.swarm.manifest.manifest import Manifest
from thinwire.swarm.quantized_links import CEILING

ROUNDS = 64
"""Number of newest rounds whose medians are compared."""

CYCLES = 8
"""Least number of rounds of each fragment that are compared."""

NAMES = ("fragment", "contributors", "sync_seconds", "steps", "bytes_up", "bytes_down")
"""Fields of the event of a round that a comparison needs."""

LAYERS = 12
"""Layers that are assumed of a model other than the built-in one; they matter for streaming only."""

BYTES = ("sent a round", "received a round")
"""Names of comparisons that need no rates of links."""


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """Announcement of one peer: tokens per second, bytes/s up and down; 0: unknown."""

    speed: float
    up: int
    down: int


class PlanCheck:
    """Plan and outcome of one process.

    The plan is that of `thinwire plan`, for the peers that are here, their speeds, the rates that they announce and the
    round-trip times to them. So a difference comes from what such a plan leaves out, not from a wrong assumption.
    """

    def __init__(self) -> None:
        self._rounds: deque[Mapping[str, Any]] = deque(maxlen=ROUNDS + 1)

    def add(self, fields: Mapping[str, object], at: float, *, fragments: int = 1) -> None:
        """Add the event of a committed round with our contribution at `at` (monotonic seconds).

        fragments: number of those with separate rounds.
        """
        if len(self._rounds) == self._rounds.maxlen and self._rounds.maxlen < CYCLES * fragments:
            self._rounds = deque(self._rounds, maxlen=CYCLES * fragments)
        self._rounds.append({"kind": "round", "at": at, **{name: fields[name] for name in NAMES if name in fields}})

    def interrupt(self) -> None:
        """Note a round without our contribution: time and bytes until our next one belong to no round."""
        self._rounds.append({"kind": "start"})

    def compare(
        self,
        manifest: Manifest,
        parameters: int,
        mine: PeerFacts,
        others: Collection[PeerFacts],
        trips: Sequence[float],
    ) -> tuple[Comparison, ...]:
        """Return plan and outcome side by side; empty with too few rounds, and for methods without a plan.

        parameters: of the model. trips: known round-trip times in seconds. Only bytes are compared while no rate of a link
        is known: then a plan has no times.
        """
        outcome = outcome_of(self._rounds)
        if outcome is None or not others or manifest.asynchronous or manifest.pipeline.stages > 1:
            return ()
        everyone = [mine, *others]
        known = any(one.up and one.down for one in everyone)
        layers = manifest.model.layers if manifest.model.kind == "transformer" else LAYERS
        question = question_of(
            manifest,
            ModelSize(parameters, 0, layers, _width(manifest, parameters)),
            name=manifest.run.name,
            tokens=0,
            machines=_machines(everyone, outcome, balanced=manifest.outer.step_ratio != 1.0),
            rtt=sum(trips) / len(trips) if trips else 0.0,
        )
        costs = round_costs(question, row_of(question, methods(question)), chunks=0, fragments=0)
        rows = comparison(question, costs, outcome)
        return rows if known else tuple(row for row in rows if row.name in BYTES)


def _machines(peers: Sequence[PeerFacts], outcome: RunOutcome, *, balanced: bool) -> tuple[PeerMachine, ...]:
    """Return the peers of a plan, this peer first, whose inner step is known.

    The step of another peer takes longer in the ratio of the tokens per second, unless peers make as many steps as fit
    (`balanced`).
    """
    mine = peers[0].speed
    links = filled([PeerLoad(one.up, one.down) for one in peers]) if any(one.up for one in peers) else []
    machines = []
    for number, one in enumerate(peers):
        alike = balanced or not (one.speed and mine)
        up, down = (links[number].up, links[number].down) if links else (CEILING, CEILING)
        step = outcome.step if alike else outcome.step * mine / one.speed
        machines.append(PeerMachine(1, float(down), float(up), step))
    return tuple(machines)


def _width(manifest: Manifest, parameters: int) -> int:
    """Return the width of the model, or of a transformer with as many parameters."""
    if manifest.model.kind == "transformer":
        return manifest.model.width
    return max(1, round(math.sqrt(parameters / 12 / LAYERS)))
